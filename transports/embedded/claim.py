"""A claim on a partition of log.db."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import apsw
import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import ArrieroError, Fenced, LogError, Revoked
from arriero.transports.embedded import groups, records
from arriero.transports.embedded.bells import Bell
from arriero.transports.embedded.db import Database
from arriero.transports.embedded.records import Catalog, Place
from arriero.transports.ledger import PENDING_MAX, Ledger, Stamp
from arriero.transports.log import Commit, Outgoing, Record

QUIET_S: Final = 0.02
"""Results gather while a commit runs. One more commit that begins within this time is let through before a partition
changes hands, so that less is decoded twice."""
QUIET_MAX_S: Final = 2.0
"""How long a busy claim may hold up the member that waits for its partition."""

log = structlog.get_logger(__name__)


class EmbeddedClaim:
    """See the seam's `Claim`. `on_end` is called, in the loop, when a call of it has ended it: `ended` says why."""

    def __init__(
        self,
        db: Database,
        catalog: Catalog,
        clock: Clock,
        group: str,
        place: Place,
        ledger: Ledger,
        on_end: Callable[[EmbeddedClaim], None],
    ) -> None:
        self.place = place
        self.ended: ArrieroError | None = None
        """Why it has ended; None while it lives."""
        self._db = db
        self._catalog = catalog
        self._clock = clock
        self._group = group
        self._ledger = ledger
        self._on_end = on_end
        self._position = ledger.offset
        self._holes: list[tuple[int, int]] = []
        self._stamp = ledger.stamp
        self._suspended = False
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        """No commit is in flight, and the last one's outcome is in `_ledger`."""
        self._commits = 0
        self._bell = Bell()
        """Struck for new records, for room in the ledger, and for the end."""

    @property
    def topic(self) -> str:
        return self.place.topic

    @property
    def partition(self) -> int:
        return self.place.partition

    @property
    def fence(self) -> int:
        return self._ledger.fence

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def capacity(self) -> int:
        return max(0, PENDING_MAX - self._ledger.cover(self._holes).pending(self._position))

    async def read(self, most: int) -> list[Record]:
        while True:
            self._check()
            seen = self._bell.count
            room = 0 if self._suspended else min(most, self.capacity)
            if room > 0 and (found := self._next(room)):
                return found
            await self._bell.wait(seen)

    async def commit(self, commit: Commit) -> None:
        """Steps: 1. check sizes, so that a refusal writes nothing 2. one at a time, also behind a commit whose
        caller was cancelled 3. the new ledger 4. one transaction: fence, ledger, records 5. only then believe it."""
        # 1.
        for record in commit.records:
            records.check_size(record)
        async with self._turn:
            # 2.
            await self.settle_down()
            self._check()
            # 3.
            holes, self._holes = self._holes, []
            ledger = self._ledger.cover(holes).settle(commit.settled)
            if commit.oldest_start_ms is not None:
                ledger = ledger.with_start(commit.oldest_start_ms)
            if self._stamp is not None:
                ledger = ledger.with_stamp(self._stamp)
            # 4.
            self._commits += 1
            self._idle.clear()
            rings = tuple(dict.fromkeys(record.topic for record in commit.records))
            written = self._db.submit(partial(self._write, ledger, commit.records), rings=rings)
            # 5.
            written.add_done_callback(partial(self._written, ledger))
            await asyncio.shield(written)

    async def release(self) -> None:
        async with self._turn:
            await self.settle_down()
            if self.ended is None:
                self.end(Revoked("the claim was released"))
                self._on_end(self)

    def arrived(self, end: int) -> None:
        """The partition reaches up to this offset now."""
        if end > self._position:
            self._bell.strike()

    async def quiet(self) -> None:
        """Hand out no more records, and wait until its commits have come to rest."""
        self._suspended = True
        async with asyncio.timeout(QUIET_MAX_S):
            while self.ended is None:
                commits = self._commits
                await self.settle_down()
                await asyncio.sleep(QUIET_S)
                if commits == self._commits:
                    return

    def end(self, reason: ArrieroError) -> None:
        """Every call raises `reason` from now on. What is in flight may still be written."""
        if self.ended is None:
            self.ended = reason
            self._bell.strike()

    def _next(self, most: int) -> list[Record]:
        """The next records that are not settled, possibly none yet."""
        for start, stop in self._ledger.unsettled(self._position):
            try:
                found = self._db.read(partial(records.read, place=self.place, start=start, stop=stop, most=most))
            except LogError as error:
                self._fail(error)
                raise
            if not found and stop is None:
                break
            at = start
            for record in found:
                self._skip(at, record.offset)
                at = record.offset + 1
            if found:
                self._position = at
                self._stamp = Stamp(found[-1].offset, found[-1].time_ms)
                return found
            assert stop is not None
            self._skip(at, stop)
            self._position = stop
        return []

    def _skip(self, start: int, stop: int) -> None:
        """Offsets whose records retention has removed before they were read: lost, and settled by that."""
        if start < stop:
            self._holes.append((start, stop))
            log.error("records_lost_to_retention", topic=self.topic, partition=self.partition, count=stop - start)

    def _write(self, ledger: Ledger, outgoing: Sequence[Outgoing], connection: apsw.Connection) -> None:
        if not groups.put_ledger(connection, self._group, self.place.number, ledger, self.fence):
            raise Fenced(f"another worker owns {self.topic}/{self.partition} now")
        for answer in records.append(connection, self._catalog, outgoing, now_ms(self._clock)):
            if isinstance(answer, LogError):
                raise answer

    def _written(self, ledger: Ledger, future: asyncio.Future[None]) -> None:
        self._idle.set()
        error = future.exception()
        if error is None:
            self._ledger = ledger
            self._bell.strike()
        else:
            self._fail(error)

    def _check(self) -> None:
        if self.ended is not None:
            # An instance each: raising one exception in many tasks would tangle their tracebacks.
            raise type(self.ended)(self.ended.message, code=self.ended.code) from self.ended

    def _fail(self, error: BaseException) -> None:
        if self.ended is None:
            self.end(error if isinstance(error, ArrieroError) else LogError(f"{type(error).__name__}: {error}"))
            self._on_end(self)

    async def settle_down(self) -> None:
        """Wait for the commit in flight, if there is one."""
        await self._idle.wait()
