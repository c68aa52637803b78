"""What must hold after every commit, checked while a simulation runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, Final

import apsw

from arriero.schemas.codec import decode_event
from arriero.schemas.event import Crashed, Origin, SettlingEvent, Started, Terminal
from arriero.schemas.names import Names
from arriero.transports.embedded.records import Place, read
from arriero.transports.ledger import Ledger
from arriero.transports.log import Record

TRACE_KEPT: Final = 60


class Watch:
    """Sees every event in the moment in which it is committed. `broken` is the first promise that did not hold."""

    def __init__(self, names: Names, max_attempts: int) -> None:
        self.broken = ""
        self.events = 0
        self.trace: list[str] = []
        """The last events, for people."""
        self.in_hand: set[tuple[str, Origin]] = set()
        """Jobs, or records, that were in a worker's hands when it crashed."""
        self._names = names
        self._max_attempts = max_attempts
        self._seen: dict[int, int] = {}
        self.settled: set[Origin] = set()
        self.ends: dict[str, Terminal] = {}
        """The result of each job: its first terminal event."""
        self.crashed: Counter[str] = Counter()
        """How often each job has been named in a report."""
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
            self.crashed[event.id] += 1
            if (event.id, event.origin) not in self.in_hand:
                self._break(f"{event.id} is blamed for a crash that it was no part of")
        if isinstance(event, Started) and event.attempt > self._max_attempts:
            self._break(f"{event.id} is in attempt {event.attempt}")
        if not isinstance(event, SettlingEvent):
            return
        place = event.origin.topic, event.origin.partition
        if event.origin in self.settled:
            self._break(f"{event.origin} of {event.id} was settled twice")
        self.settled.add(event.origin)
        row: Any = connection.execute(
            "SELECT time_ms FROM records JOIN partitions ON place = number << 40 | ? WHERE topic = ? AND partition = ?",
            (event.origin.offset, event.origin.topic, event.origin.partition),
        ).fetchone()
        if row is None or row[0] != event.origin.time_ms:
            self._break(f"an event settles {event.origin}, where no such record is")
        lease: Any = connection.execute(
            "SELECT offset, ledger FROM leases JOIN partitions USING (number) WHERE topic = ? AND partition = ?", place
        ).fetchone()
        if lease is None or not Ledger.decode(*lease).is_settled(event.origin.offset):
            self._break(f"an event settles {event.origin}, and the ledger does not")
        if event.fence < self._fences.get(place, 0):
            self._break(f"{event.origin} was settled under fence {event.fence}, after a later one")
        self._fences[place] = max(self._fences.get(place, 0), event.fence)
        if isinstance(event, Terminal):
            if (event.id, event.root) in self._results:
                self._break(f"{event.id} of root {event.root} has two results")
            self._results.add((event.id, event.root))
            self.ends.setdefault(event.id, event)

    def _break(self, sentence: str) -> None:
        self.broken = self.broken or sentence
