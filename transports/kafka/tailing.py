"""Committed records as they come, read without a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

import aiokafka.errors as kafka_errors
from aiokafka import AIOKafkaConsumer

from arriero.transports.kafka.closing import close_consumer
from arriero.transports.kafka.connection import EARLIEST, LATEST, Connection, Place, as_record, connect, translate
from arriero.transports.log import Positions, Record

POLL_S: Final = 3_600.0
"""The consumer is asked again this often when nothing comes; it wakes up by itself before."""
BATCH_RECORDS: Final = 5_000
FETCH_WAIT_MS: Final = 250


async def tail(
    connection: Connection, topics: Sequence[str], start: Positions | float
) -> AsyncGenerator[list[Record], None]:
    """See `JobLog.tail`. While brokers are away it waits for them."""
    places = await connection.places(topics)
    positions = await _positions(connection, places, start)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=connection.bootstrap,
        client_id=connection.client_id,
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # retention has passed the position, or the topic was made anew
        fetch_max_wait_ms=FETCH_WAIT_MS,
    )
    try:
        await connect(consumer.start, connection.bootstrap)
        consumer.assign(places)
        for place in places:  # before anything waits, so that nothing is fetched from elsewhere
            consumer.seek(place, positions[place])
        while True:
            try:
                found = await consumer.getmany(timeout_ms=int(POLL_S * 1000), max_records=BATCH_RECORDS)
            except kafka_errors.KafkaError as error:
                raise translate(error) from error
            if records := [as_record(record) for batch in found.values() for record in batch]:
                yield records
    finally:
        await close_consumer(consumer)


async def _positions(connection: Connection, places: Sequence[Place], start: Positions | float) -> dict[Place, int]:
    if isinstance(start, Mapping):
        firsts = await connection.offsets([place for place in places if place not in start], EARLIEST, committed=True)
        return {place: start[place] if place in start else firsts[place] for place in places}
    # Ends first: what is written between the two requests comes after them.
    ends = await connection.offsets(places, LATEST, committed=True)
    since = await connection.offsets(places, max(0, int(start * 1000)), committed=True)
    return {place: since[place] if since[place] >= 0 else ends[place] for place in places}


async def fetch(connection: Connection, place: Place, offsets: Sequence[int]) -> list[Record]:
    """See `JobLog.fetch`: neighbours come with one request."""
    found: list[Record] = []
    wanted, seen = set(offsets), -1
    if place.partition >= await connection.partitions(place.topic):
        return found
    (first,) = (await connection.offsets([place], EARLIEST, committed=True)).values()
    (stop,) = (await connection.offsets([place], LATEST, committed=True)).values()
    for offset in sorted(wanted):
        if first <= offset < stop and offset >= seen:
            chunk = await connection.read(place, offset, most_bytes=64 << 10)
            found += [record for record in chunk.records if record.offset in wanted and record.offset >= seen]
            seen = chunk.next_offset
    return found


async def committed_ends(connection: Connection, topics: Sequence[str]) -> dict[tuple[str, int], int]:
    """The offset behind the last committed record of each partition. Markers of transactions lie behind it."""
    places = await connection.places(topics)
    firsts = await connection.offsets(places, EARLIEST, committed=True)
    ends = await connection.offsets(places, LATEST, committed=True)
    found = await asyncio.gather(*(_last_record(connection, place, firsts[place], ends[place]) for place in places))
    return {(place.topic, place.partition): end for place, end in zip(places, found, strict=True)}


async def _last_record(connection: Connection, place: Place, first: int, end: int) -> int:
    """Looks at the end, and further back each time that nothing but markers is there."""
    step, start = 2, end
    while start > first:
        start = max(first, end - step)
        offset, last = start, -1
        while offset < end:
            chunk = await connection.read(place, offset)
            last = max((record.offset for record in chunk.records if record.offset < end), default=last)
            if chunk.next_offset <= offset:
                break
            offset = chunk.next_offset
        if last >= 0:
            return last + 1
        step *= 4
    return first
