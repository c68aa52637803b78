"""The job log seam: durable topics, claims, one transaction a commit.

Two adapters keep it: `kafka/log.py` on Apache Kafka, `embedded/log.py` on one SQLite file. One contract suite
holds both to what is said here. Producers, seeks, waits and rebalances are the adapter's business and nothing
else is: it never looks into a job.

A *claim* is one partition owned by one incarnation of a worker under one fence. It is

    gained   -> read, commit, read, commit ... -> lost

and when any call of it fails with something else than cancellation, the claim has ended and that commit may
or may not have happened. The membership then takes the partition anew by itself and says so:

    Lost(claim, final=False)   in doubt: keep what is in memory, commit nothing
    Gained(claim, continued)   the ledger answers. `continued`: nobody owned it in between, so what the ledger
                               lists as settled is recorded and the rest may be committed again without
                               decoding; otherwise drop everything of this partition and start like a stranger
    Lost(claim, final=True)    another has it, or will: drop everything, record nothing
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from arriero.transports.ledger import Ledger

RECORD_MAX_BYTES: Final = 4 << 20
"""Largest record of a fleet topic. A dead-letter record wraps a job of 1 MiB, escaped at worst."""
KEEP_RESULTS_S: Final = 14 * 86_400.0


class Record(msgspec.Struct, frozen=True, gc=False):
    """A committed record."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A record to be written. The partition follows from the key (murmur2), as with Kafka's own clients."""

    topic: str
    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where a published record lies."""

    topic: str
    partition: int
    offset: int
    time_ms: int


class TopicSpec(msgspec.Struct, frozen=True):
    """A topic as the fleet needs it."""

    name: str
    partitions: int
    retention_s: float = KEEP_RESULTS_S
    append_time: bool = False
    """Records carry the log's time of writing instead of the client's."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes true at once: records written, offsets settled."""

    records: Sequence[Outgoing] = ()
    """Events first, then retry and dead-letter records."""
    settled: Sequence[int] = ()
    oldest_start_ms: int | None = None
    """Earliest start among what is still running; None leaves the ledger's, 0 says that nothing runs."""


class Claim(Protocol):
    """One partition under one fence. All calls raise Fenced, Revoked or LogUnavailable once it has ended."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def fence(self) -> int: ...

    @property
    def ledger(self) -> Ledger:
        """As last committed."""
        ...

    @property
    def capacity(self) -> int:
        """How many more records may be read before something must be settled."""
        ...

    async def read(self, most: int) -> list[Record]:
        """Waits for records that are not settled; returns 1 to `most` of them, in order, each only once."""
        ...

    async def commit(self, commit: Commit) -> None:
        """One transaction; when it returns, all of it is durable. One at a time.

        Raises RecordTooLarge, with nothing written and the claim alive, when the log refuses a record's size.
        """
        ...

    async def release(self) -> None:
        """Give the partition up cleanly. What has been read and not settled is read again by the next owner. This
        membership does not take it again by itself, and does not report it as lost."""
        ...


class Gained(msgspec.Struct, frozen=True):
    claim: Claim
    continued: bool
    """Whether this same incarnation owned it last. The claim reads again, either way, all that its ledger does not
    list as settled: who holds such a record already knows it by its offset."""


class Lost(msgspec.Struct, frozen=True):
    claim: Claim
    final: bool
    reason: str = ""


class Membership(Protocol):
    """One worker in one consumer group. Leaving it releases what is held, then leaves the group."""

    async def change(self) -> Gained | Lost:
        """Waits for the next claim gained or lost. Raises LogUnavailable only when it will never recover."""
        ...


class Backlog(msgspec.Struct, frozen=True):
    """Records of one topic that are not settled, and the age of the oldest, in seconds (0 when none)."""

    count: int
    oldest_s: float


Positions = Mapping[tuple[str, int], int]
"""Next offset by (topic, partition)."""


class JobLog(Protocol):
    """A connection to the log. An async context manager; nothing is acquired before it is entered."""

    async def __aenter__(self) -> JobLog: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def ensure(self, topics: Sequence[TopicSpec]) -> None:
        """Make the topics that are missing, then check all. Raises TopicFault with the mending command when one
        is set so that a guarantee breaks."""
        ...

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises TopicFault when it does not exist."""
        ...

    async def publish(self, records: Sequence[Outgoing]) -> list[Placed | BaseException]:
        """Idempotent; durable for each `Placed` that it returns. One record's failure is returned in its place."""
        ...

    def join(
        self, group: str, topics: Sequence[str], worker: str, events: str
    ) -> AbstractAsyncContextManager[Membership]:
        """Own partitions of these topics (all of equal partition count: the same numbers of each go to one worker).

        `worker` names the process for people; the adapter adds an incarnation. `events` is the topic whose
        settling events a ledger that is gone is rebuilt from.
        """
        ...

    def tail(self, topics: Sequence[str], start: Positions | float) -> AsyncGenerator[list[Record], None]:
        """Committed records in order of each partition, without end, in batches as they come.

        `start`: next offsets (partitions left out begin at their first record), or a time in Unix seconds.
        Waiting costs no polling. Close the iterator (`aclosing`) to stop.
        """
        ...

    async def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> list[Record]:
        """Single records by offset; those that are gone are left out."""
        ...

    async def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        """The offset behind the last committed record, by (topic, partition): a tail that has come there has seen
        all that was there. (The next record may come later than that: transactions take offsets, too.)"""
        ...

    async def backlog(self, group: str, topics: Sequence[str]) -> dict[str, Backlog]:
        """What is not settled yet, by topic, ledgers included."""
        ...

    async def ledgers(self, group: str, topics: Sequence[str]) -> dict[tuple[str, int], Ledger]:
        """The ledgers as committed, read without claiming; partitions nobody has claimed yet are left out.

        One whose text cannot be read says so (`Ledger.fault`), and is otherwise as if nothing were settled."""
        ...
