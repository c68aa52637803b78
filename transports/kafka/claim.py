"""One partition under one fence.

    feed -> buffer -> read -> pending -> commit

The membership feeds it, suspends it while the group rebalances, and is told when a call has failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from arriero.schemas.errors import Fenced, LogError, RecordTooLarge, Revoked
from arriero.transports.kafka.connection import Connection, Place
from arriero.transports.kafka.producing import PartitionProducer, check_size
from arriero.transports.ledger import PENDING_MAX, Ledger, LedgerError, Stamp
from arriero.transports.log import Commit, Outgoing, Record

LOW_WATER: Final = PENDING_MAX // 2
"""Fewer records than this in the buffer, and more are fetched: enough for the next reads while a fetch is under way."""
SETTLE_S: Final = 2.0
"""How long a commit under way may take to finish when the partition is given up. The broker waits 6 s for all."""


class KafkaClaim:
    """See `Claim`. Made by `taking`, with the fence committed."""

    def __init__(
        self,
        place: Place,
        group: str,
        ledger: Ledger,
        producer: PartitionProducer,
        connection: Connection,
        failed: Callable[[KafkaClaim, LogError], None],
        hungry: Callable[[], None],
    ) -> None:
        self._place = place
        self._group = group
        self._ledger = ledger
        self._producer = producer
        self._connection = connection
        self._failed = failed
        self._hungry = hungry
        self._position = ledger.offset
        self._gaps: list[tuple[int, int]] = []
        self._pending: set[int] = set()
        self._last: Stamp | None = None
        self._buffer: deque[Record] = deque()
        self._ended: LogError | None = None
        self._steady = asyncio.Event()
        self._changed = asyncio.Event()
        self._committing = asyncio.Lock()
        self._transaction: asyncio.Task[None] | None = None
        self.seeks = 0
        """Counts the times that the consumer's position was set: what was fetched before one is not fed after it."""

    # What the seam shows

    @property
    def topic(self) -> str:
        return str(self._place.topic)

    @property
    def partition(self) -> int:
        return int(self._place.partition)

    @property
    def fence(self) -> int:
        return self._ledger.fence

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def capacity(self) -> int:
        return PENDING_MAX - len(self._pending)

    async def read(self, most: int) -> list[Record]:
        while True:
            self._check()
            room = min(most, self.capacity, len(self._buffer))
            if room > 0 and self._steady.is_set():
                was_full = not self.wants_more
                records = [self._buffer.popleft() for _ in range(room)]
                self._pending.update(record.offset for record in records)
                if was_full and self.wants_more:
                    self._hungry()
                return records
            self._changed.clear()
            await self._changed.wait()

    async def commit(self, commit: Commit) -> None:
        for record in commit.records:
            check_size(record)
        async with self._committing:
            await self._finished()  # of a commit whose caller was cancelled
            await self._steady.wait()
            self._check()
            gaps = len(self._gaps)
            ledger = self._ledger.settle(commit.settled).cover(self._gaps)
            if commit.oldest_start_ms is not None:
                ledger = ledger.with_start(commit.oldest_start_ms)
            if self._last is not None:
                ledger = ledger.with_stamp(self._last)
            ledger.encode()  # too long: refused before anything is begun
            # A task of its own: a caller that is cancelled must not leave a transaction half done.
            self._transaction = asyncio.create_task(
                self._commit(commit.records, ledger, commit.settled, gaps), name=f"commit-{self.topic}-{self.partition}"
            )
            self._transaction.add_done_callback(_hear)
            await asyncio.shield(self._transaction)

    async def release(self) -> None:
        await self.end(Revoked(f"{self.topic}/{self.partition} was given up"))

    # What the membership does

    @property
    def position(self) -> int:
        """The next offset to be fetched."""
        return self._position

    @property
    def wants_more(self) -> bool:
        return self._ended is None and len(self._buffer) < LOW_WATER

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    def feed(self, records: Sequence[Record]) -> None:
        """Records fetched from `position` on. Offsets that were passed over hold no committed record."""
        for record in records:
            if record.offset > self._position:
                self._gaps.append((self._position, record.offset))
            self._position = record.offset + 1
            self._last = Stamp(record.offset, record.time_ms)
            if not self._ledger.is_settled(record.offset):
                self._buffer.append(record)
        self._changed.set()

    def resume(self) -> None:
        self._steady.set()
        self._changed.set()

    async def suspend(self) -> None:
        """No more reads and commits until `resume`; a commit under way may finish."""
        self._steady.clear()
        await self._finished(SETTLE_S)

    async def end(self, reason: LogError) -> None:
        """The claim is over for its holder; what it holds of the broker is closed."""
        self.void(reason)
        await self._finished(SETTLE_S)
        await self._producer.close()

    def void(self, reason: LogError) -> None:
        """All calls raise from now on."""
        if self._ended is None:
            self._ended = reason
        self._steady.set()
        self._changed.set()

    # Inside

    def _check(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended)) from self._ended

    async def _finished(self, timeout_s: float | None = None) -> None:
        if self._transaction is not None and not self._transaction.done():
            await asyncio.wait({self._transaction}, timeout=timeout_s)

    async def _commit(self, records: Sequence[Outgoing], ledger: Ledger, settled: Sequence[int], gaps: int) -> None:
        try:
            try:
                await self._producer.transact(records, ledger)
            except RecordTooLarge:
                await self._reopen()
                raise
        except RecordTooLarge:
            raise
        except LogError as error:
            self.void(error)
            self._failed(self, error)
            raise
        self._ledger = ledger
        del self._gaps[:gaps]
        self._pending.difference_update(settled)
        self._changed.set()

    async def _reopen(self) -> None:
        """A producer whose record was refused has lost count of its sequence and goes on failing; a new one fences it.

        It would fence a rightful owner as well, so the ledger must still be ours.
        """
        await self._producer.close()
        await self._producer.open()
        found = await self._connection.committed(self._group, [self._place])
        offset, text = found.get(self._place, (-1, ""))
        try:
            ledger = Ledger.decode(offset, text)
        except LedgerError as error:
            raise Fenced(f"the ledger of {self.topic}/{self.partition} is gone") from error
        if (ledger.fence, ledger.owner) != (self._ledger.fence, self._ledger.owner):
            raise Fenced(f"{self.topic}/{self.partition} belongs to {ledger.owner} now")


def _hear(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
