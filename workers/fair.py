"""The waiting line of each class: fair between tenants, by deadline within one, and nobody waits for ever.

Between tenants decides the virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024):
who was served least comes next, an output token counting `OUTPUT_WEIGHT` times an input token. A tenant that comes
back starts where the least served of those who wait stands, so idleness earns no credit.

The share comes before the deadline, and deadlines order only the work of one tenant: else whoever stamps everything as
due now would be served alone.

Who has waited `AGING_S` in a class goes up to the next one, one of each class at a time: so nothing starves, and a
backlog that has grown old as a whole does not take the place of what is urgent.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from typing import Final, NamedTuple

import msgspec

OUTPUT_WEIGHT: Final = 2.0
"""The paper's: what one output token costs in input tokens."""
AGING_S: Final = 60.0
"""Long beside what urgent work should wait, short beside what a batch may take."""
REMEMBERED: Final = 1_000
"""Counters kept of tenants that have nothing here."""

Rank = tuple[float, float, int]
"""Place within a tenant's work of one class: deadline, arrival, key."""


class Ticket(msgspec.Struct, eq=False):
    """A sequence as the line knows it."""

    rank: Rank
    tenant: str
    home: int
    """Its class, 0 the most urgent."""
    level: int
    """The line that it stands in; falls with age."""
    waits: bool = False
    since: float = 0.0
    """When it came to this line; a ticket that has left it counts no more there."""

    @property
    def key(self) -> int:
        return self.rank[2]


class _Entry(NamedTuple):
    since: float
    ticket: Ticket


class Lines:
    """One line a class; `enter` and `leave` may come in any order and number."""

    def __init__(self, levels: int) -> None:
        self._lines: list[dict[str, list[tuple[Rank, int, Ticket]]]] = [{} for _ in range(levels)]
        """By level and tenant a heap; what has left is dropped when it comes up."""
        self._ages: list[deque[_Entry]] = [deque() for _ in range(levels)]
        """By class, who waits in it, the longest first."""
        self._raised: list[Ticket | None] = [None] * levels
        """By class, who has gone up from it and is not over yet."""
        self._pushes = itertools.count()
        """Tells two entries of one ticket apart: that it comes back before its first one has come up."""
        self._served: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._last = 0.0
        """Counter of the tenant whose last waiting work was taken last."""

    def enter(self, ticket: Ticket, now: float) -> None:
        """Stand in line; a preempted sequence comes back this way, too."""
        if not self._waiting[ticket.tenant]:
            floor = min((self._served[one] for one in self._waiting), default=self._last)
            self._served[ticket.tenant] = max(self._served.get(ticket.tenant, 0.0), floor)
        self._waiting[ticket.tenant] += 1
        ticket.waits = True
        self._push(ticket, now)

    def leave(self, ticket: Ticket) -> None:
        """It runs now, or is over."""
        if not ticket.waits:
            return
        ticket.waits = False
        self._waiting[ticket.tenant] -= 1
        if not self._waiting[ticket.tenant]:
            del self._waiting[ticket.tenant]
            self._last = self._served[ticket.tenant]
            if not self._waiting:
                self._forget()

    def forget(self, ticket: Ticket) -> None:
        """It is over."""
        self.leave(ticket)
        if self._raised[ticket.home] is ticket:
            self._raised[ticket.home] = None

    def charge(self, tenant: str, tokens: float) -> None:
        """Count service that a tenant has got, in input tokens."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def head(self, level: int) -> Ticket | None:
        """Who comes next in a class."""
        line = self._lines[level]
        best: Ticket | None = None
        for tenant in list(line):
            heap = line[tenant]
            while heap and not (heap[0][2].waits and heap[0][2].level == level):
                heapq.heappop(heap)
            if not heap:
                del line[tenant]
                continue
            first = heap[0][2]
            if best is None or self._order(first) < self._order(best):
                best = first
        return best

    def age(self, now: float) -> None:
        """Move up who has waited long enough."""
        for home in range(1, len(self._ages)):
            ages, raised = self._ages[home], self._raised[home]
            while ages and not self._stands(ages[0]):
                ages.popleft()
            if raised is None and ages and ages[0].since + AGING_S <= now:
                raised = self._raised[home] = ages.popleft().ticket
                self._raise(raised, now)
            elif raised is not None and raised.waits and raised.level and raised.since + AGING_S <= now:
                self._raise(raised, now)

    # --- inside --------------------------------------------------------------------------------------------

    def _order(self, ticket: Ticket) -> tuple[float, Rank]:
        return self._served[ticket.tenant], ticket.rank

    def _stands(self, entry: _Entry) -> bool:
        ticket = entry.ticket
        return ticket.waits and ticket.level == ticket.home and ticket.since == entry.since

    def _raise(self, ticket: Ticket, now: float) -> None:
        ticket.level -= 1
        self._push(ticket, now)

    def _push(self, ticket: Ticket, now: float) -> None:
        ticket.since = now
        heapq.heappush(
            self._lines[ticket.level].setdefault(ticket.tenant, []), (ticket.rank, next(self._pushes), ticket)
        )
        if ticket.level == ticket.home:
            self._ages[ticket.level].append(_Entry(now, ticket))

    def _forget(self) -> None:
        if len(self._served) > REMEMBERED:
            kept = heapq.nlargest(REMEMBERED // 2, self._served.items(), key=lambda item: item[1])
            self._served = dict(kept)
