"""The router over fake replicas that fail on command: routing, re-routing, replacement, deadlines, weights."""

import asyncio

import numpy as np
import pytest

from jaxrl_ppo.rollout.engine import Completion, Request, SamplingParams
from jaxrl_ppo.rollout.errors import EngineDead, RequestError, RolloutError
from jaxrl_ppo.rollout.router import Limits, Router
from jaxrl_ppo.weights.manifest import WeightError, WeightManifest

HANG, DIE, END = "hang", "die", "end"
QUICK = Limits(backoff_s=0.0)


def request(number, prompt=(1, 2)):
    return Request(f"r{number}", tuple(prompt), number, SamplingParams(max_new_tokens=4))


def requests(count):
    return [request(number) for number in range(count)]


def manifest(version):
    return WeightManifest(version, f"/store/{version}", {})


class FakeReplica:
    """Completes requests one by one; after `good` of them it does what `then` says."""

    def __init__(self, good=10**9, then=None, load_error=None):
        self.good, self.then, self.load_error = good, then, load_error
        self.seen, self.loaded, self.running, self.closed, self.asleep = [], [], 0, False, False
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, requests):
        self.seen.append([request.id for request in requests])
        self.running += 1
        try:
            for request in requests:
                await self.gate.wait()
                if self.good == 0:
                    if self.then == DIE:
                        raise EngineDead("the core is gone")
                    if self.then == HANG:
                        await asyncio.Event().wait()
                    if self.then == END:
                        return
                    raise self.then
                self.good -= 1
                await asyncio.sleep(0)
                tokens = np.full(3, request.seed, np.int32)
                yield Completion(request.id, tokens, np.zeros(3, np.float32), np.zeros(3, np.int32), "length")
        finally:
            self.running -= 1

    async def load_weights(self, manifest):
        await self.gate.wait()
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(manifest.version)

    async def sleep(self):
        await self.gate.wait()
        if self.then == DIE:
            raise EngineDead("the core is gone")
        self.asleep = True

    async def score(self, token_ids):
        if self.then == HANG:
            await asyncio.Event().wait()
        if self.then == DIE:
            raise EngineDead("the core is gone")
        return np.zeros(len(token_ids) - 1, np.float32)

    async def check_health(self):
        if self.then == DIE:
            raise EngineDead("the core is gone")

    async def close(self):
        self.closed = True


async def collect(router, requests):
    return {completion.request_id: completion async for completion in router.generate(requests)}


async def test_requests_submitted_at_once_are_split_evenly_in_neighbouring_runs():
    replicas = [FakeReplica() for _ in range(3)]
    router = Router(replicas)
    done = await collect(router, requests(7))
    assert [replica.seen for replica in replicas] == [[["r0", "r1", "r2"]], [["r3", "r4"]], [["r5", "r6"]]]
    assert sorted(done) == [f"r{number}" for number in range(7)]
    assert all(completion.token_ids[0] == int(id[1:]) for id, completion in done.items())
    assert router.loads == [0, 0, 0]
    assert [done[f"r{number}"].replica for number in range(7)] == [0, 0, 0, 1, 1, 2, 2]


async def test_later_requests_go_to_the_least_loaded():
    busy, idle = FakeReplica(), FakeReplica()
    busy.gate.clear()
    router = Router([busy, idle])
    first = asyncio.create_task(collect(router, requests(4)))
    while router.loads != [2, 0]:
        await asyncio.sleep(0)
    await collect(router, [request(10)])
    await collect(router, [request(11)])
    assert idle.seen[1:] == [["r10"], ["r11"]]
    busy.gate.set()
    assert len(await first) == 4


async def test_with_a_limit_a_free_replica_takes_what_a_slow_one_has_not_started():
    slow, fast = FakeReplica(), FakeReplica()
    slow.gate.clear()
    router = Router([slow, fast], max_in_flight=2)
    task = asyncio.create_task(collect(router, requests(8)))
    while router.loads != [2, 0]:
        await asyncio.sleep(0)
    slow.gate.set()
    assert len(await task) == 8
    assert slow.seen == [["r0", "r1"]]
    assert sum(len(ids) for ids in fast.seen) == 6


async def test_completions_are_yielded_before_the_others_finish():
    slow, fast = FakeReplica(), FakeReplica()
    slow.gate.clear()
    router = Router([slow, fast])
    stream = router.generate(requests(2))
    assert (await anext(stream)).request_id == "r1"
    slow.gate.set()
    assert (await anext(stream)).request_id == "r0"


@pytest.mark.parametrize("then", [DIE, END, KeyError("engine bug")])
async def test_unfinished_requests_of_a_failed_replica_run_elsewhere_once(then):
    bad, good = FakeReplica(good=1, then=then), FakeReplica()
    faults = []
    router = Router([bad, good], on_fault=lambda *fault: faults.append(fault))
    done = await collect(router, requests(6))
    assert sorted(done) == [f"r{number}" for number in range(6)]
    assert bad.seen == [["r0", "r1", "r2"]]
    assert good.seen == [["r3", "r4", "r5"], ["r1", "r2"]]
    assert router.live == [1]
    assert [name for name, _ in faults] == ["replica_failed"]
    assert "replica 0 failed with 2 requests" in faults[0][1]
    await collect(router, requests(3))
    assert len(good.seen) == 3


async def test_a_hung_replica_fails_at_its_deadline_and_its_stream_is_cancelled(caplog):
    hung, good = FakeReplica(good=1, then=HANG), FakeReplica()
    router = Router([hung, good], limits=Limits(completion_s=0.5))
    done = await collect(router, requests(4))
    assert len(done) == 4
    assert (hung.running, router.live) == (0, [1])
    assert "replica 0 to finish one of 1 requests (r1)" in caplog.text


async def test_a_failed_replica_is_replaced_with_current_weights_before_it_serves():
    dead = FakeReplica(good=0, then=DIE)
    fresh = FakeReplica()
    asked = []

    async def replace(index):
        asked.append(index)
        return fresh

    faults = []
    router = Router([dead], replace=replace, on_fault=lambda name, message: faults.append(name))
    await router.load_weights(manifest(4))
    done = await collect(router, requests(3))
    assert (asked, fresh.loaded, len(done)) == ([0], [4], 3)
    assert (router.live, faults) == ([0], ["replica_failed", "replica_replaced"])


async def test_a_replacement_that_joins_during_a_sync_ends_on_the_newer_version():
    dead, other, fresh = FakeReplica(good=0, then=DIE), FakeReplica(), FakeReplica()
    fresh.gate.clear()

    async def replace(index):
        return fresh

    router = Router([dead, other], replace=replace)
    await router.load_weights(manifest(1))
    await collect(router, requests(2))
    await router.load_weights(manifest(2))
    fresh.gate.set()
    while router.live != [0, 1]:
        await asyncio.sleep(0)
    assert (fresh.loaded, other.loaded) == ([1, 2], [1, 2])


async def test_replacing_stops_at_the_cap_and_names_the_cause():
    attempts = []

    async def replace(index):
        attempts.append(index)
        raise RuntimeError("no room on the device")

    router = Router([FakeReplica(good=0, then=DIE)], replace=replace, limits=QUICK)
    with pytest.raises(RolloutError, match=r"no rollout replica is left.*replica 0.*no room on the device"):
        await collect(router, requests(2))
    assert attempts == [0, 0, 0]
    with pytest.raises(RolloutError, match="no rollout replica is left"):
        await collect(router, requests(1))
    with pytest.raises(RolloutError, match="no rollout replica is left"):
        await router.load_weights(manifest(1))


async def test_a_replacement_that_hangs_meets_its_deadline():
    async def replace(index):
        await asyncio.Event().wait()

    limits = Limits(replace_s=0.1, backoff_s=0.0, max_replacements=2)
    router = Router([FakeReplica(good=0, then=DIE)], replace=replace, limits=limits)
    late = r"gave up waiting for the replacement of replica 0 \(trainer\.deadlines\.start_s\) after"
    with pytest.raises(RolloutError, match=late):
        await collect(router, requests(1))


async def test_a_request_that_kills_every_replica_is_given_up_by_name():
    async def replace(index):
        return FakeReplica(good=0, then=DIE)

    limits = Limits(backoff_s=0.0, max_attempts=2, max_replacements=9)
    router = Router([FakeReplica(good=0, then=DIE)], replace=replace, limits=limits)
    with pytest.raises(RolloutError, match=r"request r7 \(prompt of 2 tokens\) failed on 2 replicas.*replica 0.*core"):
        await collect(router, [request(7)])


async def test_replacements_in_a_row_are_counted_anew_after_a_completion():
    async def replace(index):
        return FakeReplica(good=1, then=DIE)

    limits = Limits(backoff_s=0.0, max_attempts=100, max_replacements=1)
    faults = []
    router = Router(
        [FakeReplica(good=1, then=DIE)],
        replace=replace,
        limits=limits,
        on_fault=lambda name, message: faults.append(name),
    )
    assert len(await collect(router, requests(5))) == 5
    assert faults.count("replica_replaced") == 4


async def test_a_bad_request_fails_its_call_only():
    bad = RequestError("request r0: prompt too long")
    refuses, good = FakeReplica(good=0, then=bad), FakeReplica()
    router = Router([refuses, good])
    with pytest.raises(RequestError, match="request r0: prompt too long"):
        await collect(router, [request(0)])
    assert router.live == [0, 1]
    with pytest.raises(RequestError, match="request r3 was submitted twice"):
        await collect(router, [request(3), request(3)])


async def test_leaving_the_iteration_aborts_what_is_unfinished():
    slow, fast = FakeReplica(), FakeReplica()
    slow.gate.clear()
    router = Router([slow, fast], max_in_flight=1)
    stream = router.generate(requests(6))
    await anext(stream)
    await stream.aclose()
    while slow.running or fast.running:
        await asyncio.sleep(0)
    assert router.loads == [0, 0]
    slow.gate.set()
    assert len(await collect(router, requests(6))) == 6


async def test_several_calls_share_the_replicas_and_get_their_own_completions():
    router = Router([FakeReplica(), FakeReplica(good=3, then=DIE), FakeReplica()])
    calls = [[request(100 * call + number) for number in range(5)] for call in range(4)]
    results = await asyncio.gather(*(collect(router, call) for call in calls))
    for call, result in zip(calls, results):
        assert sorted(result) == sorted(request.id for request in call)


async def test_weights_reach_all_replicas_and_a_failing_one_is_taken_out():
    replicas = [FakeReplica(), FakeReplica(load_error=EngineDead("gone")), FakeReplica()]
    router = Router(replicas)
    await router.load_weights(manifest(3))
    assert ([replica.loaded for replica in replicas], router.live) == ([[3], [], [3]], [0, 2])


async def test_weights_that_every_replica_refuses_are_at_fault():
    replicas = [FakeReplica(load_error=WeightError("tensor a: corrupt")) for _ in range(2)]
    router = Router(replicas)
    with pytest.raises(WeightError, match="tensor a: corrupt"):
        await router.load_weights(manifest(3))
    assert router.live == [0, 1]
    for replica in replicas:
        replica.load_error = None
    await router.load_weights(manifest(3))


async def test_a_load_that_hangs_meets_its_deadline():
    hung, good = FakeReplica(), FakeReplica()
    hung.gate.clear()
    router = Router([hung, good], limits=Limits(load_s=0.2))
    await router.load_weights(manifest(9))
    assert router.live == [1]
    good.then = DIE
    with pytest.raises(RolloutError, match="replica 0 to load weight version 9"):
        await router.check_health()


async def test_verification_runs_on_every_loaded_replica_and_can_refuse_one():
    replicas, fresh = [FakeReplica(), FakeReplica()], FakeReplica()
    verified = []

    async def verify(index, replica, manifest):
        verified.append((index, manifest.version, replica is fresh))
        if replica is replicas[1]:
            raise WeightError("still on the old weights")

    async def replace(index):
        return fresh

    router = Router(replicas, replace=replace, verify=verify)
    await router.load_weights(manifest(2))
    while router.live != [0, 1]:
        await asyncio.sleep(0)
    assert verified == [(0, 2, False), (1, 2, False), (1, 2, True)]


async def test_a_probe_that_hangs_fails_its_replica_at_the_deadline_of_the_weights():
    faults = []

    async def verify(index, replica, loaded):
        await asyncio.Event().wait()

    async def replace(index):
        raise EngineDead("no more")

    router = Router(
        [FakeReplica()],
        replace=replace,
        verify=verify,
        limits=Limits(load_s=0.1, backoff_s=0.0),
        on_fault=lambda name, message: faults.append((name, message)),
    )
    with pytest.raises(RolloutError, match="no rollout replica is left"):
        await router.load_weights(manifest(2))
    late = "gave up waiting for the probe of replica 0 (trainer.deadlines.weights_s) after 0.1 s"
    assert faults[0] == ("replica_failed", f"replica 0 failed with 0 requests: DeadlineExceeded: {late}")


async def test_every_living_replica_is_scored_and_a_failing_one_is_left_out():
    router = Router([FakeReplica(), FakeReplica(then=DIE), FakeReplica()])
    assert [scores.shape for scores in await router.score([1, 2, 3])] == [(2,), (2,)]
    assert router.live == [0, 2]
    hung = Router([FakeReplica(then=HANG)], limits=Limits(load_s=0.1))
    with pytest.raises(RolloutError, match="replica 0 to score 3 tokens"):
        await hung.score([1, 2, 3])


async def test_closing_closes_replicas_and_stops_recoveries():
    started = asyncio.Event()

    async def replace(index):
        started.set()
        await asyncio.Event().wait()

    dead, good = FakeReplica(then=DIE), FakeReplica()
    router = Router([dead, good], replace=replace)
    await router.check_health()
    await started.wait()
    await router.close()
    assert (dead.closed, good.closed) == (True, True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_errors_from_other_processes_are_told_without_their_traceback():
    wrapped = RuntimeError("Traceback (most recent call last):\n  File ...")
    wrapped.cause = EngineDead("the core is gone")
    router = Router([FakeReplica(good=0, then=wrapped)])
    with pytest.raises(RolloutError) as raised:
        await collect(router, requests(1))
    assert str(raised.value) == "no rollout replica is left (replica 0: EngineDead: the core is gone)"


async def test_it_sleeps_when_every_replica_does_replaced_ones_too():
    dead, well, new = FakeReplica(then=DIE), FakeReplica(), FakeReplica()
    started = asyncio.Event()

    async def replace(index):
        started.set()
        await asyncio.sleep(0)
        return new

    faults = []
    router = Router(
        [dead, well], replace=replace, limits=QUICK, on_fault=lambda name, message: faults.append((name, message))
    )
    await router.load_weights(manifest(1))
    await router.sleep()
    assert started.is_set()
    assert new.loaded == [1]
    assert [dead.asleep, well.asleep, new.asleep] == [False, True, True]
    assert [name for name, _ in faults] == ["replica_failed", "replica_replaced"]
    await router.load_weights(manifest(2))
    assert (well.loaded, new.loaded) == ([1, 2], [1, 2])
    assert len(await collect(router, requests(4))) == 4
