"""Which replica runs which request: the router's decisions, without tasks, clocks or engines."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable


class Dispatcher:
    """Assigns tickets (numbers standing for requests) to the least loaded of the living replicas.

    A replica's load is the number of tickets it was given and has not finished. With equal loads the lower index comes
    first, so the same tickets always go the same way. Tickets assigned together go to a replica in neighbouring runs,
    which keeps the samples of one prompt where its prefix is cached.

    Args:
        replicas: their number; all live at first.
        max_in_flight: tickets a replica has at a time at most; more wait until some replica is free. None: no limit.
        max_attempts: replicas that a ticket may fail on.
    """

    def __init__(self, replicas: int, max_in_flight: int | None = None, max_attempts: int = 3) -> None:
        self._live = set(range(replicas))
        self._in_flight: list[set[int]] = [set() for _ in range(replicas)]
        self._waiting: deque[int] = deque()
        self._replica_of: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._max_in_flight = max_in_flight
        self._max_attempts = max_attempts

    @property
    def loads(self) -> list[int]:
        """Unfinished tickets of each replica."""
        return [len(tickets) for tickets in self._in_flight]

    @property
    def live(self) -> list[int]:
        """Indices of the living replicas."""
        return sorted(self._live)

    @property
    def waiting(self) -> list[int]:
        """Tickets that no replica has yet."""
        return list(self._waiting)

    def submit(self, tickets: Iterable[int]) -> None:
        """Queue new tickets."""
        for ticket in tickets:
            self._attempts[ticket] = 0
            self._waiting.append(ticket)

    def take(self) -> dict[int, list[int]]:
        """Assign as many waiting tickets as may run: replica -> its new tickets, oldest first."""
        heap = [(len(self._in_flight[index]), index) for index in self._live]
        heapq.heapify(heap)
        shares: dict[int, int] = {}
        for _ in self._waiting:
            if not heap or (self._max_in_flight is not None and heap[0][0] >= self._max_in_flight):
                break
            load, index = heap[0]
            heapq.heapreplace(heap, (load + 1, index))
            shares[index] = shares.get(index, 0) + 1
        assigned = {}
        for index in sorted(shares):
            assigned[index] = [self._waiting.popleft() for _ in range(shares[index])]
            self._in_flight[index].update(assigned[index])
            self._replica_of |= dict.fromkeys(assigned[index], index)
        return assigned

    def finished(self, ticket: int) -> None:
        """A replica finished `ticket`, or nobody wants it any more."""
        del self._attempts[ticket]
        index = self._replica_of.pop(ticket, None)
        if index is None:
            self._waiting.remove(ticket)
        else:
            self._in_flight[index].remove(ticket)

    def failed(self, index: int) -> list[int]:
        """Replica `index` is gone: its tickets wait again, before all others. Returns those out of attempts instead."""
        self._live.discard(index)
        again: list[int] = []
        exhausted: list[int] = []
        for ticket in sorted(self._in_flight[index]):
            del self._replica_of[ticket]
            self._attempts[ticket] += 1
            (exhausted if self._attempts[ticket] >= self._max_attempts else again).append(ticket)
        self._in_flight[index].clear()
        self._waiting.extendleft(reversed(again))
        for ticket in exhausted:
            del self._attempts[ticket]
        return exhausted

    def joined(self, index: int) -> None:
        """Replica `index` lives again."""
        self._live.add(index)
