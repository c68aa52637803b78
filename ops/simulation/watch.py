"""What must hold after every commit, checked while a simulation runs."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import apsw

from arriero.schemas.codec import decode_event
from arriero.schemas.event import Crashed, OwnerEvent, SettlingEvent, Started, Terminal
from arriero.schemas.names import Names
from arriero.transports.embedded.records import Place, read
from arriero.transports.log import Record

TRACE_KEPT: Final = 60


class Violation(Exception):
    """A promise that was broken."""


class Watch:
    """Sees every event in the moment in which it is committed. `broken` is the first promise that did not hold."""

    def __init__(self, names: Names, max_attempts: int) -> None:
        self.broken = ""
        self.events = 0
        self.trace: list[str] = []
        """The last events, for people."""
        self._names = names
        self._max_attempts = max_attempts
        self._seen: dict[int, int] = {}
        self._settled: set[tuple[str, int, int]] = set()
        self._results: set[tuple[str, str]] = set()
        self._fences: dict[tuple[str, int], int] = {}
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Of all that was recorded, in order: two runs of one seed have the same."""
        return self._digest.hexdigest()

    def look(self, connection: apsw.Connection) -> None:
        rows: Any = connection.execute(
            "SELECT number, partition, next FROM partitions WHERE topic = ?", (self._names.events,)
        ).fetchall()
        for number, partition, end in rows:
            start = self._seen.get(number, 0)
            if end > start:
                self._seen[number] = end
                for record in read(connection, Place(number, self._names.events, partition), start, end, end - start):
                    self._note(record, connection)

    def _note(self, record: Record, connection: apsw.Connection) -> None:
        event = decode_event(record.value)
        self.events += 1
        self._digest.update(record.value or b"")
        origin = getattr(event, "origin", None)
        self.trace.append(f"{event.time_ms} {type(event).__name__} {event.id} {origin or ''}")
        del self.trace[:-TRACE_KEPT]
        if isinstance(event, Crashed):
            self._break(f"{event.id} is blamed for a crash that nobody had")
        if isinstance(event, Started) and event.attempt > self._max_attempts:
            self._break(f"{event.id} is in attempt {event.attempt}")
        if not isinstance(event, SettlingEvent):
            return
        place = event.origin.topic, event.origin.partition, event.origin.offset
        if place in self._settled:
            self._break(f"{event.origin} of {event.id} was settled twice")
        self._settled.add(place)
        row: Any = connection.execute(
            "SELECT time_ms FROM records JOIN partitions ON place = number << 40 | ? WHERE topic = ? AND partition = ?",
            (event.origin.offset, event.origin.topic, event.origin.partition),
        ).fetchone()
        if row is None or row[0] != event.origin.time_ms:
            self._break(f"an event settles {event.origin}, where no such record is")
        if event.fence < self._fences.get(place[:2], 0):
            self._break(f"{event.origin} was settled under fence {event.fence}, after a later one")
        self._fences[place[:2]] = max(self._fences.get(place[:2], 0), event.fence)
        if isinstance(event, Terminal) and isinstance(event, OwnerEvent):
            if (event.id, event.root) in self._results:
                self._break(f"{event.id} of root {event.root} has two results")
            self._results.add((event.id, event.root))

    def _break(self, sentence: str) -> None:
        self.broken = self.broken or sentence
