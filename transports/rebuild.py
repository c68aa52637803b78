"""Ledgers that are gone, made anew from the settling events. Pure.

An adapter fences the former owner, feeds every event up to the end that it sees after that, reads the times of the
records from `first` up to `stop`, and commits what `ledger` answers, under a fence beyond `fence`.

An event counts only when the record at its origin has the origin's time: events of a topic that was deleted and made
anew name offsets of other records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from arriero.schemas.codec import decode_event
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

    def ledger(self, times: Mapping[int, int]) -> Ledger:
        """The ledger, without fence and owner.

        times: by offset, the time of every record from `first` up to `stop`. Offsets left out hold no record
        (transaction markers) and need no settling.
        """
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
            event = decode_event(record.value or b"")
        except msgspec.MsgspecError:
            log.warning("event_unreadable", partition=record.partition, offset=record.offset)
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
