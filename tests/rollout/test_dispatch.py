"""Which replica takes which request."""

from jaxrl_ppo.rollout.dispatch import Dispatcher


def test_dispatcher_is_deterministic_and_balanced():
    def run():
        dispatcher = Dispatcher(3)
        dispatcher.submit(range(5))
        taken = [dispatcher.take()]
        dispatcher.finished(0)
        dispatcher.submit([5, 6, 7])
        taken.append(dispatcher.take())
        return taken, dispatcher.loads

    assert run() == run() == ([{0: [0, 1], 1: [2, 3], 2: [4]}, {0: [5, 6], 2: [7]}], [3, 2, 2])


def test_dispatcher_requeues_the_tickets_of_a_failed_replica_first_and_gives_up_on_some():
    dispatcher = Dispatcher(2, max_in_flight=2, max_attempts=2)
    dispatcher.submit(range(6))
    assert dispatcher.take() == {0: [0, 1], 1: [2, 3]}
    assert dispatcher.failed(0) == []
    assert dispatcher.waiting == [0, 1, 4, 5]
    assert dispatcher.take() == {}
    dispatcher.joined(0)
    assert dispatcher.take() == {0: [0, 1]}
    assert dispatcher.failed(0) == [0, 1]
    assert (dispatcher.loads, dispatcher.live, dispatcher.waiting) == ([0, 2], [1], [4, 5])
    dispatcher.finished(4)
    assert dispatcher.waiting == [5]
