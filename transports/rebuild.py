"""Ledgers that are gone, made anew from the settling events. Pure.

An adapter fences the former owner, feeds every event up to the end that it sees after that, cuts what they say at the
partition's end, reads the times of the records from `first` up to `stop`, and commits what `ledger` answers, under a
fence beyond `fence`.

An event counts only when the record at its origin has the origin's time: events of a topic that was deleted and made
anew name offsets of other records.

What cannot be read in the events topic is passed over only where it cannot have settled anything:

    of a later version      refused, unless its type settles nothing: what it settled would be run and recorded twice
    of a known version,     names the record that it settles: that is settled. Its result is lost, and was before; no
      but damaged           second one is recorded
    anything else           no release has written it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from arriero.schemas.codec import decode_event, remains_of
from arriero.schemas.errors import Unreadable
from arriero.schemas.event import Crashed, SettlingEvent, Started
from arriero.transports.ledger import PENDING_MAX, Ledger, Stamp
from arriero.transports.log import Record

log = structlog.get_logger(__name__)


class Rebuild:
    """One partition's part of the events."""

    def __init__(self, first: int) -> None:
        """`first`: the first offset that the partition still holds; nothing before it matters."""
        self.first = first
        self.stop = first
        """The offset behind the last one that an event settles or starts."""
        self.fence = 0
        """The highest fence seen."""
        self.refusal: Unreadable | None = None
        """Why no ledger can be had: there is an event that only a later release can read."""
        self._settled: dict[int, set[int]] = {}
        self._started: dict[int, int] = {}

    def settle(self, offset: int, time_ms: int) -> None:
        if offset >= self.first:
            self._settled.setdefault(offset, set()).add(time_ms)
            self.stop = max(self.stop, offset + 1)

    def start(self, offset: int, event_ms: int) -> None:
        if offset >= self.first:
            self._started.setdefault(offset, event_ms)
            self.stop = max(self.stop, offset + 1)

    def cut(self, end: int) -> None:
        """`end`: the offset behind the partition's last record. What events say of later ones is said of a topic that
        had this name before; taken for offsets without a record, those to come would count as settled."""
        self.stop = min(self.stop, end)

    def ledger(self, times: Mapping[int, int]) -> Ledger:
        """The ledger, without fence and owner.

        times: by offset, the time of every record from `first` up to `stop`. Offsets left out hold no record
        (transaction markers) and need no settling. Raises Unreadable.
        """
        if self.refusal is not None:
            raise self.refusal
        ledger = Ledger(offset=self.first).settle(
            offset
            for offset in range(self.first, self.stop)
            if offset not in times or times[offset] in self._settled.get(offset, ())
        )
        # More gaps than a claim may have pending: events are missing. What is cut off runs again, and its second
        # result is ignored.
        ledger = msgspec.structs.replace(ledger, settled=ledger.settled[:PENDING_MAX])
        running = [ms for offset, ms in self._started.items() if offset in times and not ledger.is_settled(offset)]
        ledger = ledger.with_start(min(running, default=0))
        last = max(times, default=None)
        return ledger if last is None else ledger.with_stamp(Stamp(last, times[last]))


def fold_events(events: Iterable[Record], partitions: Mapping[tuple[str, int], Rebuild]) -> None:
    """Fold records of the events topic into the partitions, by (topic, partition), that are being rebuilt."""
    for record in events:
        try:
            event = decode_event(record.value)
        except Unreadable as error:
            _fold_unreadable(record, error, partitions)
            continue
        origin = getattr(event, "origin", None)
        rebuild = partitions.get((origin.topic, origin.partition)) if origin is not None else None
        if origin is None or rebuild is None or isinstance(event, Crashed):
            continue
        rebuild.fence = max(rebuild.fence, getattr(event, "fence", 0))
        if isinstance(event, SettlingEvent):
            rebuild.settle(origin.offset, origin.time_ms)
        elif isinstance(event, Started):
            rebuild.start(origin.offset, record.time_ms)


def _fold_unreadable(record: Record, error: Unreadable, partitions: Mapping[tuple[str, int], Rebuild]) -> None:
    """See the module's docstring."""
    log.error("event_unreadable", code=error.code, partition=record.partition, offset=record.offset)
    remains = remains_of(record.value)
    if remains is None or remains.settles is False:
        return
    origin = remains.origin
    if error.code == "unknown_version":
        refusal = Unreadable(
            f"no ledger can be rebuilt: at {record.topic}/{record.partition}/{record.offset} lies {error.message}",
            code=error.code,
        )
        for place, rebuild in partitions.items():
            if origin is None or ((origin.topic, origin.partition) == place and origin.offset >= rebuild.first):
                rebuild.refusal = refusal
    elif remains.settles and origin is not None and (origin.topic, origin.partition) in partitions:
        rebuild = partitions[origin.topic, origin.partition]
        rebuild.fence = max(rebuild.fence, remains.fence)
        rebuild.settle(origin.offset, origin.time_ms)
