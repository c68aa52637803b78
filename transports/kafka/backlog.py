"""What is not settled yet: count and oldest age, exact while it is small."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from arriero.schemas.clock import Clock
from arriero.transports.kafka.connection import EARLIEST, LATEST, Connection, Place
from arriero.transports.ledger import Ledger, LedgerError
from arriero.transports.log import Backlog

log = structlog.get_logger(__name__)

LOOK_BYTES: Final = 64 << 10
"""Read of each partition that lags. Records in it are counted; offsets behind it are, and may hold markers too."""
AT_ONCE: Final = 8
PATIENCE_S: Final = 0.5
"""Wait for commits that are being ended. A killed worker's is open longer: then what held before it is answered."""


class _Part(NamedTuple):
    records: int
    oldest_ms: int | None


async def ledgers(connection: Connection, group: str, topics: Sequence[str]) -> dict[Place, Ledger]:
    """The ledgers as committed, by partition."""
    found: dict[Place, Ledger] = {}
    committed = await connection.committed(group, await connection.places(topics), PATIENCE_S)
    for place, (offset, text) in committed.items():
        try:
            found[place] = Ledger.decode(offset, text)
        except LedgerError as error:
            log.error("ledger_unreadable", group=group, topic=place.topic, partition=place.partition, error=str(error))
            found[place] = Ledger(offset=0, fault=str(error))
    return found


async def backlog(connection: Connection, clock: Clock, group: str, topics: Sequence[str]) -> dict[str, Backlog]:
    """See `JobLog.backlog`."""
    places = await connection.places(topics)
    known = await ledgers(connection, group, topics)
    firsts = await connection.offsets(places, EARLIEST, committed=True)
    ends = await connection.offsets(places, LATEST, committed=True)
    gate = asyncio.Semaphore(AT_ONCE)

    async def look(place: Place) -> _Part:
        ledger = known.get(place, Ledger(offset=0)).cover([(0, firsts[place])])
        async with gate:
            return await _look(connection, place, ledger, ends[place])

    parts = dict(zip(places, await asyncio.gather(*map(look, places)), strict=True))
    now_ms = clock.time() * 1000
    answer: dict[str, Backlog] = {}
    for topic in topics:
        of_topic = [part for place, part in parts.items() if place.topic == topic]
        oldest = min((part.oldest_ms for part in of_topic if part.oldest_ms is not None), default=None)
        age_s = max(0.0, (now_ms - oldest) / 1000) if oldest is not None else 0.0
        answer[topic] = Backlog(sum(part.records for part in of_topic), age_s)
    return answer


async def _look(connection: Connection, place: Place, ledger: Ledger, end: int) -> _Part:
    offset = ledger.offset
    while offset < end:
        chunk = await connection.read(place, offset, most_bytes=LOOK_BYTES)
        open_ = [record for record in chunk.records if record.offset < end and not ledger.is_settled(record.offset)]
        if open_ or chunk.next_offset <= offset:
            behind = range(chunk.next_offset, end)
            settled = sum(max(0, min(stop, end) - max(start, chunk.next_offset)) for start, stop in ledger.settled)
            oldest_ms = open_[0].time_ms if open_ else None
            return _Part(len(open_) + len(behind) - settled, oldest_ms)
        offset = chunk.next_offset
    return _Part(0, None)
