"""Taking a look, and what is confirmed by several.

The log moves while it is read, and a commit becomes true in several topics at once. So a look takes its measures in an
order in which the truth cannot look false:

    1. what the bus says it has projected 2. ledgers 3. the ends of the events 4. the ends of job and delay topics: a
    record is older than the event about it 5. read both up to these ends, records first 6. ledgers again: they list
    all that these events settle 7. compare

On Kafka a commit's markers do not arrive everywhere in one moment, and an open transaction of a killed worker hides
events of others for seconds. What compares with something that moves is therefore a suspicion at first, and a breach
when it is still there after PATIENCE_S.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Final

import structlog

from arriero.ops.audit.books import Books
from arriero.ops.audit.projection import Projection
from arriero.ops.audit.reading import Places, stretch
from arriero.ops.audit.report import LASTING, Account, Breach, Progress, Report
from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.codec import decode_event
from arriero.schemas.errors import TopicFault, Unreadable
from arriero.schemas.event import Terminal, Undecodable
from arriero.schemas.names import Names
from arriero.transports.bus import TokenBus
from arriero.transports.ledger import Ledger
from arriero.transports.log import JobLog, Record

log = structlog.get_logger(__name__)

PATIENCE_S: Final = 30.0
"""How long a suspicion must last: brokers abort an orphaned transaction after 10 s and look for such every 10 s."""
AGAIN_S: Final = 1.0
"""Pause between two looks at a suspicion."""
SHOWN: Final = 20
REMEMBERED: Final = 10_000
"""Suspicions and breaches of one code that are told apart; what is beyond is counted."""
COMPARED_JOBS: Final = 1_000_000
"""Of more jobs than so many only a share is compared with the bus, unless all are asked for."""


class Auditor:
    """Looks again and again; each look reads what has come since the last one."""

    def __init__(
        self,
        job_log: JobLog,
        bus: TokenBus,
        *,
        names: Names,
        pools: Sequence[str],
        clock: Clock,
        sample: int | None = None,
        patience_s: float = PATIENCE_S,
        shown: int = SHOWN,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """sample: compare one of so many jobs with the bus; None decides by their number."""
        self._log, self._bus, self._names, self._pools, self._clock = job_log, bus, names, list(pools), clock
        self._sample = sample
        self._patience_s = patience_s
        self._shown = shown
        self._progress = progress
        self._books = Books(self._hear)
        self._projection = Projection(job_log, bus, names, clock, self._books.ended)
        self._groups: dict[str, list[str]] = {}
        """Topics by the group that settles them."""
        self._positions: Places = {}
        self._lasting: dict[Breach, None] = {}
        self._counts: Counter[str] = Counter()
        """Lasting breaches by code, remembered or not."""
        self._since: dict[tuple[str, str], float] = {}
        """Since when (monotonic) each suspicion has been there at every look."""
        self._repaired = 0
        self._took_s = 0.0

    async def look(self) -> Report:
        """One look, by the steps of the module's docstring. Raises LogUnavailable, BusUnavailable, TopicFault."""
        began_s = self._clock.monotonic()
        await self._find_topics()
        topics = [topic for of_group in self._groups.values() for topic in of_group]
        # 1.
        await self._projection.begin()
        # 2.
        before = await self._ledgers()
        # 3.
        event_ends = await self._log.ends([self._names.events])
        # 4.
        record_ends = await self._log.ends(topics)
        # 5.
        await self._read(record_ends, event_ends)
        # 6.
        after = await self._ledgers()
        # 7.
        accounts, lost = self._books.balance()
        wrong = await self._projection.finish()
        suspicions = [*lost, *self._books.compare(before, after), *wrong]
        self._took_s += self._clock.monotonic() - began_s
        return self._report(accounts, suspicions)

    async def repair(self) -> int:
        """Project the states anew that were wrong at the last look; how many. The log is never touched."""
        count = await self._projection.repair()
        self._repaired += count
        return count

    # --- reading -------------------------------------------------------------------------------------------

    async def _find_topics(self) -> None:
        for pool in self._pools:
            await self._take_up(self._names.workers_group(pool), self._names.job_topics(pool))
            for topic in self._names.delay_topics(pool):
                try:
                    await self._take_up(self._names.relay_group(pool), [topic])
                except TopicFault:
                    continue  # made by a release that knew no retries

    async def _take_up(self, group: str, topics: Iterable[str]) -> None:
        known = self._groups.get(group, [])
        for topic in topics:
            if topic not in known:
                self._books.shelve(topic, await self._log.partitions(topic))
                self._groups.setdefault(group, []).append(topic)

    async def _ledgers(self) -> dict[tuple[str, int], Ledger]:
        found: dict[tuple[str, int], Ledger] = {}
        for group, topics in self._groups.items():
            found |= await self._log.ledgers(group, topics)
        return found

    async def _read(self, record_ends: Places, event_ends: Places) -> None:
        total = sum(record_ends.values()) + sum(event_ends.values())
        if self._sample is not None:
            self._projection.every = self._sample
        elif not self._positions:
            self._projection.every = max(1, sum(record_ends.values()) // COMPARED_JOBS)
        async with aclosing(stretch(self._log, self._positions, record_ends)) as batches:
            async for batch in batches:
                for record in batch:
                    self._books.add_record(record)
                    self._positions[record.topic, record.partition] = record.offset + 1
                self._progress(sum(self._positions.values()), total)
        self._books.nothing_before(record_ends)
        async with aclosing(stretch(self._log, self._positions, event_ends)) as batches:
            async for batch in batches:
                for record in batch:
                    # First: what has been entered must not be read again, whatever goes wrong with the bus.
                    self._positions[record.topic, record.partition] = record.offset + 1
                    await self._add_event(record)
                self._progress(sum(self._positions.values()), total)
        self._positions |= record_ends | event_ends
        self._progress(total, total)

    async def _add_event(self, record: Record) -> None:
        try:
            event = decode_event(record.value)
        except Unreadable as error:
            code = "event_of_later_version" if error.code == "unknown_version" else "event_unreadable"
            self._hear(Breach(code, f"{record.topic}/{record.partition}/{record.offset}", error.message))
            self._projection.cannot_read(record)
            return
        first_end = isinstance(event, Terminal) and event.id not in self._books.ended
        self._books.add_event(event, record)
        if not isinstance(event, Undecodable) and self._projection.chosen(event.id):
            await self._projection.add(event, record, first_end=first_end)

    def _hear(self, breach: Breach) -> None:
        assert breach.code in LASTING, breach.code
        self._counts[breach.code] += 1
        if self._counts[breach.code] <= REMEMBERED:
            self._lasting[breach] = None

    # --- judging -------------------------------------------------------------------------------------------

    def _report(self, accounts: list[Account], suspicions: list[Breach]) -> Report:
        books, projection = self._books, self._projection
        counts, confirmed, unconfirmed = self._confirm(suspicions)
        breaches = self._counts + counts
        return Report(
            holds=not breaches,
            at_ms=now_ms(self._clock),
            took_s=round(self._took_s, 3),
            records=books.records,
            events=books.events,
            settled=books.settled,
            accounts=accounts,
            breaches=dict(sorted(breaches.items())),
            shown=[*self._lasting, *confirmed][: self._shown],
            unconfirmed=unconfirmed,
            excused={
                name: count
                for name, count in {
                    **books.excused,
                    "states_lagging": projection.lagging,
                    "streams_short": projection.short,
                }.items()
                if count
            },
            sampled=projection.every,
            states=projection.states,
            streams=projection.streams,
            tokens_recorded=projection.tokens_recorded,
            tokens_streamed=projection.tokens_streamed,
            repaired=self._repaired,
        )

    def _confirm(self, suspicions: list[Breach]) -> tuple[Counter[str], list[Breach], int]:
        """What has been suspected for long enough: how many by code, which; and how many not yet."""
        now = self._clock.monotonic()
        since: dict[tuple[str, str], float] = {}
        counts: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        confirmed: list[Breach] = []
        for breach in suspicions:
            seen[breach.code] += 1
            if seen[breach.code] > REMEMBERED:
                continue
            key = breach.code, breach.where
            since[key] = self._since.get(key, now)
            if now - since[key] >= self._patience_s:
                confirmed.append(breach)
                counts[breach.code] += 1
        self._since = since
        return counts, confirmed, len(since) - len(confirmed)


async def audit(
    job_log: JobLog,
    bus: TokenBus,
    *,
    names: Names,
    pools: Sequence[str],
    clock: Clock,
    sample: int | None = None,
    patience_s: float = PATIENCE_S,
    shown: int = SHOWN,
    progress: Progress = lambda done, total: None,
    repair: bool = False,
) -> Report:
    """Look, and look again for as long as a suspicion waits to be confirmed; with `repair`, mend states then and report
    what is left. Workers may run meanwhile.

    patience_s: how long a suspicion must last; 0 where nothing moves. Raises LogUnavailable, BusUnavailable,
    TopicFault.
    """
    auditor = Auditor(
        job_log,
        bus,
        names=names,
        pools=pools,
        clock=clock,
        sample=sample,
        patience_s=patience_s,
        shown=shown,
        progress=progress,
    )
    report = await auditor.look()
    began_s = clock.monotonic()
    while report.unconfirmed and clock.monotonic() - began_s < patience_s + AGAIN_S:
        await asyncio.sleep(min(AGAIN_S, patience_s / 4))
        report = await auditor.look()
    if repair and await auditor.repair():
        report = await auditor.look()
    return report
