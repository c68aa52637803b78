"""Topics and records in log.db. Functions over a connection: those that write run inside a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import apsw
import msgspec

from arriero.schemas.errors import LogError, RecordTooLarge, TopicFault
from arriero.transports.log import RECORD_MAX_BYTES, Outgoing, Placed, Record, TopicSpec
from arriero.transports.partitioner import partition_of

SCHEMA: Final = """
CREATE TABLE topics (
    name TEXT PRIMARY KEY, partitions INTEGER NOT NULL, retention_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
-- `first`: what retention has left; `next`: the offset to be written next
CREATE TABLE partitions (
    number INTEGER PRIMARY KEY, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    first INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0, UNIQUE (topic, partition)
) STRICT;
-- place = number << 40 | offset: one partition's records lie side by side, in order, without another index
CREATE TABLE records (
    place INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, key BLOB, value BLOB, headers BLOB
) STRICT;
"""
_OFFSET_BITS: Final = 40
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
BATCH_MAX_BYTES: Final = 4 << 20
"""A read stops behind this much, so that it neither holds the loop nor fills the memory."""

_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(tuple[tuple[str, bytes], ...]).decode


class Place(msgspec.Struct, frozen=True):
    """A partition's number in this file, and its name."""

    number: int
    topic: str
    partition: int


class Catalog:
    """The topics' partitions, remembered: topics are never deleted, and never get more partitions."""

    def __init__(self) -> None:
        self._topics: dict[str, tuple[Place, ...]] = {}

    def places(self, connection: apsw.Connection, topic: str) -> tuple[Place, ...]:
        """The topic's partitions in order. Raises TopicFault when there is no such topic."""
        places = self._topics.get(topic)
        if places is None:
            rows = connection.execute(
                "SELECT number, topic, partition FROM partitions WHERE topic = ? ORDER BY partition", (topic,)
            )
            places = tuple(Place(*row) for row in rows)
            if not places:
                raise TopicFault(f"there is no topic {topic} in this data folder: start a stack on it first")
            self._topics[topic] = places
        return places


def ensure_topic(connection: apsw.Connection, spec: TopicSpec) -> None:
    """Make the topic, or check it. Raises TopicFault."""
    row = connection.execute("SELECT partitions FROM topics WHERE name = ?", (spec.name,)).fetchone()
    if row is None:
        connection.executemany(
            "INSERT INTO partitions (topic, partition) VALUES (?, ?)",
            [(spec.name, partition) for partition in range(spec.partitions)],
        )
    elif row[0] != spec.partitions:
        raise TopicFault(
            f"topic {spec.name} has {row[0]} partitions and {spec.partitions} are asked for: the number is fixed once "
            f"a topic is there. Ask for {row[0]}, or use another data folder"
        )
    connection.execute(
        "INSERT INTO topics VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET retention_ms = excluded.retention_ms",
        (spec.name, spec.partitions, int(spec.retention_s * 1000)),
    )


def check_size(record: Outgoing) -> None:
    """Raises RecordTooLarge, by the measure of Kafka's brokers: all of a record's bytes."""
    size = len(record.key) + len(record.value) + sum(len(name) + len(value) for name, value in record.headers)
    if size > RECORD_MAX_BYTES:
        raise RecordTooLarge(f"a record of {size} bytes for {record.topic}; {RECORD_MAX_BYTES} are allowed")


def append(
    connection: apsw.Connection, catalog: Catalog, records: Sequence[Outgoing], now_ms: int
) -> list[Placed | LogError]:
    """Write records in order; one that cannot be written is answered by its error and leaves no gap."""
    answers: list[Placed | LogError] = []
    ends: dict[int, int] = {}
    rows: list[tuple[int, int, bytes, bytes, bytes | None]] = []
    for record in records:
        try:
            check_size(record)
            places = catalog.places(connection, record.topic)
        except LogError as error:
            answers.append(error)
            continue
        place = places[partition_of(record.key, len(places))]
        if place.number not in ends:
            ends[place.number] = _next_offset(connection, place.number)
        offset = ends[place.number]
        ends[place.number] = offset + 1
        headers = _encode_headers(record.headers) if record.headers else None
        rows.append((place.number << _OFFSET_BITS | offset, now_ms, record.key, record.value, headers))
        answers.append(Placed(place.topic, place.partition, offset, now_ms))
    connection.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows)
    connection.executemany(
        "UPDATE partitions SET next = ? WHERE number = ?", [(end, number) for number, end in ends.items()]
    )
    return answers


def read(connection: apsw.Connection, place: Place, start: int, stop: int | None, most: int) -> list[Record]:
    """Up to `most` records with start <= offset < stop, in order; fewer when they are many bytes, at least one."""
    base = place.number << _OFFSET_BITS
    rows = connection.execute(
        "SELECT place, time_ms, key, value, headers FROM records WHERE place >= ? AND place < ? ORDER BY place LIMIT ?",
        (base + start, base + (_OFFSET_MASK if stop is None else stop), most),
    )
    records: list[Record] = []
    size = 0
    for at, time_ms, key, value, headers in rows:
        records.append(
            Record(
                topic=place.topic,
                partition=place.partition,
                offset=at & _OFFSET_MASK,
                time_ms=time_ms,
                key=key,
                value=value,
                headers=_decode_headers(headers) if headers is not None else (),
            )
        )
        size += len(value or b"")
        if size >= BATCH_MAX_BYTES:
            break
    return records


def times(connection: apsw.Connection, number: int, start: int, stop: int) -> dict[int, int]:
    """The times of the records with start <= offset < stop, by offset."""
    base = number << _OFFSET_BITS
    rows = connection.execute(
        "SELECT place, time_ms FROM records WHERE place >= ? AND place < ?", (base + start, base + stop)
    )
    return {at & _OFFSET_MASK: time_ms for at, time_ms in rows}


def bounds(connection: apsw.Connection, numbers: Iterable[int]) -> dict[int, tuple[int, int]]:
    """First and next offset of partitions, by number."""
    wanted = ",".join(map(str, numbers))
    rows = connection.execute(f"SELECT number, first, next FROM partitions WHERE number IN ({wanted})")  # noqa: S608 - integers
    return {number: (first, end) for number, first, end in rows}


def offset_at(connection: apsw.Connection, number: int, time_ms: int) -> int:
    """The first offset whose record is not older than a time; the next offset when all are.

    A binary search: records lie in the order of their times, but for jumps of the machine's clock.
    """
    low, high = bounds(connection, [number])[number]
    base = number << _OFFSET_BITS
    while low < high:
        middle = (low + high) // 2
        row = connection.execute("SELECT time_ms FROM records WHERE place = ?", (base + middle,)).fetchone()
        if row is None or row[0] < time_ms:
            low = middle + 1
        else:
            high = middle
    return low


def expirable(connection: apsw.Connection, now_ms: int) -> list[tuple[Place, int]]:
    """Partitions whose first record has outlived its topic's retention, with the time before which all have."""
    rows = connection.execute(
        "SELECT number, topic, partition, ? - retention_ms FROM partitions JOIN topics ON topic = name "
        "WHERE (SELECT time_ms FROM records WHERE place = number << 40 | first) < ? - retention_ms",
        (now_ms, now_ms),
    )
    return [(Place(number, topic, partition), before_ms) for number, topic, partition, before_ms in rows]


def expire(connection: apsw.Connection, place: Place, before_ms: int, most: int) -> tuple[int, int]:
    """Delete up to `most` of a partition's records older than a time; the first offset before, and now."""
    first, _ = bounds(connection, [place.number])[place.number]
    stop = min(offset_at(connection, place.number, before_ms), first + most)
    base = place.number << _OFFSET_BITS
    connection.execute("DELETE FROM records WHERE place >= ? AND place < ?", (base, base + stop))
    connection.execute("UPDATE partitions SET first = ? WHERE number = ?", (stop, place.number))
    return first, stop


def _next_offset(connection: apsw.Connection, number: int) -> int:
    return bounds(connection, [number])[number][1]
