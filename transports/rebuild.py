"""A ledger that is gone, made anew from the settling events. Pure.

An adapter fences the former owner, feeds every event up to the end that it sees after that, reads the times of the
records between `first` and `stop`, and commits what `ledger` answers, with a fence beyond `fence`.

An event counts only when the record at its origin has the origin's time: events of a topic that was deleted and made
anew name offsets of other records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from arriero.schemas.codec import decode_event
from arriero.schemas.errors import ArrieroError
from arriero.schemas.event import Crashed, SettlingEvent, Started
from arriero.transports.ledger import PENDING_MAX, Ledger, Stamp
from arriero.transports.log import Record

log = structlog.get_logger(__name__)


class Rebuild:
    """The fold over events for one partition."""

    def __init__(self, topic: str, partition: int, first: int) -> None:
        """`first`: the first offset that the partition still holds. Nothing before it matters."""
        self.first = first
        self.fence = 0
        """The highest fence seen."""
        self._place = (topic, partition)
        self._settled: dict[int, set[int]] = {}
        self._started: dict[int, int] = {}

    @property
    def stop(self) -> int:
        """The offset behind the last one that an event settles."""
        return max(self._settled, default=self.first - 1) + 1

    def add(self, events: Iterable[Record]) -> None:
        """Fold in records of the events topic."""
        for record in events:
            try:
                event = decode_event(record.value or b"")
            except (ArrieroError, msgspec.MsgspecError):
                log.warning("event_unreadable", partition=record.partition, offset=record.offset)
                continue
            origin = getattr(event, "origin", None)
            if origin is None or (origin.topic, origin.partition) != self._place or isinstance(event, Crashed):
                continue
            self.fence = max(self.fence, getattr(event, "fence", 0))
            if origin.offset < self.first:
                continue
            if isinstance(event, SettlingEvent):
                self._settled.setdefault(origin.offset, set()).add(origin.time_ms)
            elif isinstance(event, Started):
                self._started.setdefault(origin.offset, record.time_ms)

    def ledger(self, times: Mapping[int, int]) -> Ledger:
        """The ledger, without fence and owner.

        times: by offset, the time of every record from `first` up to `stop`. Offsets that are missing hold no record.
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
        return ledger.with_stamp(Stamp(last, times[last])) if (last := max(times, default=None)) is not None else ledger
