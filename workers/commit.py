"""Committing: what became of a partition's records, recorded in transactions. See docs/job-log.md.

One committer a partition, for as long as it is ours. Events and settled offsets gather while a commit is in flight
and go with the next; there is no fixed window. What nobody waits for (Started and the like) rides along, or goes
alone after a moment.

    claim ──a call fails──▶ in doubt: keep all, commit nothing ──resume──▶ claim
                                                               ──drop────▶ over

The commit that failed may have happened. The new claim's ledger tells: when it lists what the commit settled, all of
that commit is recorded, for it was one transaction; otherwise it is committed again. A commit that settled nothing is
always repeated: a second Started or Progressed changes no state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import structlog

from arriero.schemas.clock import Clock
from arriero.schemas.codec import encode
from arriero.schemas.errors import LogError, RecordTooLarge
from arriero.schemas.event import (
    Cancelled,
    Completed,
    DeadLettered,
    Duplicate,
    Error,
    Expired,
    Failed,
    Output,
    OwnerEvent,
    Preempted,
    Progressed,
    Rejected,
    Requeued,
    Resumed,
    RetryScheduled,
    Started,
    Terminal,
    Undecodable,
)
from arriero.schemas.names import Names
from arriero.transports.failpoints import reach
from arriero.transports.ledger import PENDING_MAX, Ledger
from arriero.transports.log import RECORD_MAX_BYTES, Claim, Commit, Outgoing
from arriero.workers.metrics import CommitMetrics

log = structlog.get_logger(__name__)

RIDE_S: Final = 0.05
"""How long an event that nobody waits for waits for a commit to ride along with: status shows `running` so much
later at worst."""
COMMIT_MAX_ITEMS: Final = 512
COMMIT_MAX_BYTES: Final = 8 << 20
"""A commit's size: it must be through within the log's deadline for a transaction."""
EVENT_MAX_BYTES: Final = RECORD_MAX_BYTES - 1024
"""Room for the key, and for what brokers add to a record."""

OwnersEvent = (
    Started
    | Progressed
    | Preempted
    | Resumed
    | RetryScheduled
    | Requeued
    | Duplicate
    | Completed
    | Failed
    | Cancelled
    | Expired
    | Rejected
    | DeadLettered
    | Undecodable
)
"""What a worker records of the jobs that it owns."""


class Item(msgspec.Struct, eq=False):
    """One event to be recorded, what it settles, and records that become true with it."""

    event: OwnersEvent
    settles: int | None = None
    records: Sequence[Outgoing] = ()
    done: Callable[[], None] | None = None
    """Called once it is durable, or given up with the partition."""
    alone: bool = False
    """A commit with it was refused for a record's size. Now each goes alone, which finds the one."""


class Inherited(msgspec.Struct):
    """What a former owner has left of a partition: records before `stop` may have been begun, none of them earlier than
    `since_ms`, and `count` of them are still to be read."""

    stop: int = 0
    since_ms: int = 0
    count: int = 0

    @staticmethod
    def of(ledger: Ledger) -> Inherited:
        if not ledger.oldest_start_ms or ledger.stamp is None:
            return Inherited()
        stop = ledger.stamp.offset + 1
        count = ledger.pending(stop)
        return Inherited(stop, ledger.oldest_start_ms, count) if count else Inherited()

    def read(self, offset: int) -> int:
        """A record is read: since when there may be events of it, 0 for one that nobody has begun."""
        since_ms = self.since_ms if offset < self.stop else 0
        self.count -= bool(since_ms)
        if self.count <= 0 or offset >= self.stop:
            self.since_ms = 0  # all have been read: each is told of by who holds it
        return since_ms


def _horizon(ledger: Ledger) -> int:
    """A claim holds no more than PENDING_MAX records unsettled; as many offsets again may be markers."""
    read = ledger.offset if ledger.stamp is None else max(ledger.offset, ledger.stamp.offset + 1)
    return read + 2 * PENDING_MAX


class Pending(Protocol):
    """What a committer knows of a record that is in hand."""

    since_ms: int
    """No event of it that matters is older; 0 while there is none."""


P = TypeVar("P", bound=Pending)


class Committer(Generic[P]):
    """What a worker holds of one partition. `run` must be running until it is dropped or released."""

    def __init__(
        self,
        claim: Claim,
        *,
        names: Names,
        worker: str,
        clock: Clock,
        metrics: CommitMetrics,
        settled: Callable[[OwnersEvent], None],
    ) -> None:
        """settled: told each event that has settled a record, once it is durable."""
        self.topic, self.partition = claim.topic, claim.partition
        self._settled = settled
        self.fence = claim.fence
        """The claim's; while in doubt, that of the last one."""
        self.pending: dict[int, P | None] = {}
        """Records read and not settled, by offset; None for those in preparation."""
        self.dropped = False
        self.inherited = Inherited.of(claim.ledger)
        self.horizon = _horizon(claim.ledger)
        """No former owner can have read a record from here on."""
        self._left_ms = 0
        """The oldest start among what is left to the next owner."""
        self._names = names
        self._worker = worker
        self._clock = clock
        self._metrics = metrics
        self._claim: Claim | None = claim
        self._queue: deque[Item] = deque()
        self._added = self._done = 0
        self._in_flight: list[Item] = []
        self._lazy, self._urgent = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()

    # --- the claim comes and goes ---------------------------------------------------------------------------

    async def claim(self) -> Claim:
        """The claim; waits while it is in doubt."""
        while self._claim is None:
            await self._changed.wait()
        return self._claim

    def doubt(self, claim: Claim) -> None:
        """A call of this claim has failed."""
        if self._claim is claim:
            self._claim = None

    def resume(self, claim: Claim) -> None:
        """It is ours again, and was nobody's in between."""
        self._claim, self.fence = claim, claim.fence
        self._change()

    def drop(self) -> None:
        """It is another's, or given up: record nothing more."""
        self.dropped, self._claim = True, None
        items = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        self._let_go(items)
        self.pending.clear()
        self._change()

    # --- what is to be recorded -----------------------------------------------------------------------------

    def add(
        self,
        event: OwnersEvent,
        *,
        settles: int | None = None,
        records: Sequence[Outgoing] = (),
        done: Callable[[], None] | None = None,
        lazy: bool = False,
    ) -> None:
        """Have an event recorded, with the next commit; `lazy`: with the next that comes anyway, or soon."""
        if self.dropped:
            if done is not None:
                done()
            return
        self._added += 1
        self._queue.append(Item(event, settles, records, done))
        self._call(urgent=not lazy)

    def forget(self, offset: int) -> None:
        """A record is left to the next owner."""
        held = self.pending.pop(offset, None)
        if held is not None:
            self._left_ms = _oldest([self._left_ms, held.since_ms])
        self._change()

    async def flush(self) -> None:
        """Waits until all that has been added is recorded, or given up with the partition."""
        added = self._added
        await self.until(lambda: self._done >= added)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something about this partition makes it true; it is asked after each change."""
        while not condition():
            await self._changed.wait()

    # --- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps: 1. something is due 2. take what has gathered, under the claim's fence 3. one transaction 4. when it
        is in doubt, ask the next claim's ledger 5. only what is recorded is forgotten."""
        while True:
            # 1.
            await self._due()
            # 2.
            claim = await self.claim()
            records = self._take()
            if not records:
                continue
            # 3.
            recorded = await self._commit(claim, records)
            # 4.
            if recorded is None:
                self.doubt(claim)
                recorded = self._is_recorded(await self.claim())
            # 5.
            if recorded:
                reach("committer.recorded")
                self._finish()
            else:
                self._queue.extendleft(reversed(self._in_flight))
                self._in_flight.clear()
                self._call(urgent=True)

    async def _due(self) -> None:
        """Waits for something urgent, or a moment after something lazy."""
        await self._lazy.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RIDE_S):
                await self._urgent.wait()
        self._lazy.clear()
        self._urgent.clear()

    def _take(self) -> list[Outgoing]:
        """Moves what goes into one commit from the queue into `_in_flight`; its records, events first."""
        events: list[Outgoing] = []
        others: list[Outgoing] = []
        size = 0
        while self._queue and len(self._in_flight) < COMMIT_MAX_ITEMS and size < COMMIT_MAX_BYTES:
            if self._queue[0].alone and self._in_flight:
                break
            item = self._queue.popleft()
            value = self._encode(item)
            if len(value) > EVENT_MAX_BYTES:
                self._shrink(item)
                value = self._encode(item)
            self._in_flight.append(item)
            events.append(Outgoing(self._names.events, item.event.id.encode(), value))
            others += item.records
            size += len(value) + sum(len(record.value) for record in item.records)
            if item.alone:
                break
        if self._queue:
            self._call(urgent=True)
        return events + others

    def _encode(self, item: Item) -> bytes:
        return encode(msgspec.structs.replace(item.event, fence=self.fence, worker=self._worker))

    async def _commit(self, claim: Claim, records: Sequence[Outgoing]) -> bool | None:
        """Whether it is recorded; None when nobody knows."""
        settled = [item.settles for item in self._in_flight if item.settles is not None]
        left = self.pending.keys() - settled
        running = [held.since_ms for at in left if (held := self.pending[at]) is not None]
        oldest_ms = _oldest([*running, self._left_ms, self.inherited.since_ms])
        began = self._clock.monotonic()
        try:
            await claim.commit(Commit(records=records, settled=settled, oldest_start_ms=oldest_ms))
        except RecordTooLarge:
            for item in self._in_flight:
                if len(self._in_flight) == 1:
                    self._shrink(item)
                item.alone = True
            return False
        except LogError as error:
            log.warning("commit_in_doubt", topic=self.topic, partition=self.partition, error=error.message)
            return None
        self._metrics.commit_time.observe(self._clock.monotonic() - began)
        self._metrics.commit_items.observe(len(self._in_flight))
        return True

    def _shrink(self, item: Item) -> None:
        """Make an item smaller that the log has refused. Raises RecordTooLarge when nothing is left to leave out."""
        log.error("event_too_large", topic=self.topic, partition=self.partition, kind=type(item.event).__name__)
        if isinstance(item.event, Terminal) and item.event.output.count:
            item.event = _without_output(item.event)
        elif isinstance(item.event, Progressed) and item.event.tokens:
            # The job goes on without this checkpoint: what a later one adds begins behind it, so readers see the gap.
            item.event = msgspec.structs.replace(item.event, tokens=[])
        elif isinstance(item.event, RetryScheduled):
            item.event, item.records = _without_retry(item.event), ()
        elif item.records and isinstance(item.event, Terminal | Undecodable):
            item.records = ()  # the copy in the dead-letter topic; the event still tells how it ended
        else:
            raise RecordTooLarge(f"the log refuses even a small record for {self._names.events}")

    def _is_recorded(self, claim: Claim) -> bool:
        """Whether the commit in doubt happened. It was one transaction, so one settled record tells of all."""
        return any(item.settles is not None and claim.ledger.is_settled(item.settles) for item in self._in_flight)

    def _finish(self) -> None:
        items = list(self._in_flight)
        self._in_flight.clear()
        for item in items:
            if item.settles is not None:
                self.pending.pop(item.settles, None)
                self._settled(item.event)
        self._let_go(items)
        self._change()

    def _let_go(self, items: Sequence[Item]) -> None:
        self._done += len(items)
        for item in items:
            if item.done is not None:
                item.done()

    def _call(self, *, urgent: bool) -> None:
        self._lazy.set()
        if urgent:
            self._urgent.set()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _without_output(event: Terminal) -> Failed:
    """What is recorded in place of a terminal event that the log refuses for its size."""
    kept = {name: getattr(event, name) for name in OwnerEvent.__struct_fields__}
    error = Error("output_too_large", f"the output of {event.output.count:,} tokens is larger than a record may be")
    return Failed(**kept, digest=event.digest, usage=event.usage, output=Output(), error=error)


def _without_retry(event: RetryScheduled) -> Failed:
    """What is recorded in place of a retry whose record the log refuses for its size."""
    kept = {name: getattr(event, name) for name in OwnerEvent.__struct_fields__}
    return Failed(**kept, digest=event.digest, error=event.error)


def _oldest(starts: Iterable[int]) -> int:
    """The earliest of these milliseconds; 0 stands for none."""
    return min((start for start in starts if start), default=0)
