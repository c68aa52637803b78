"""A batch's events in the log, and the search for results that the bus has forgotten."""

from __future__ import annotations

from contextlib import aclosing
from typing import NamedTuple

import msgspec
import structlog

from arriero.schemas.codec import decode_event
from arriero.schemas.event import Event, Started, Terminal
from arriero.transports.log import JobLog, Record

log = structlog.get_logger(__name__)


class Place(NamedTuple):
    """Where a terminal event lies in the events topic."""

    partition: int
    offset: int


class Found(msgspec.Struct):
    places: dict[str, Place]
    """The first terminal event of each job that has one, by its id."""
    model: str = ""
    """What the fleet called the model."""


def event_of(record: Record, prefix: bytes) -> Event | None:
    """The event of a job whose id begins so. Others are not even decoded."""
    if record.key is None or record.value is None or not record.key.startswith(prefix):
        return None
    try:
        return decode_event(record.value)
    except msgspec.MsgspecError:
        log.warning("event_unreadable", partition=record.partition, offset=record.offset)
        return None


async def search_log(job_log: JobLog, topic: str, wanted: set[str], *, prefix: bytes, since_s: float) -> Found:
    """Read the events from a time (Unix seconds) to the present end, once."""
    found = Found({})
    ends = await job_log.ends([topic])
    behind = {place for place, end in ends.items() if await _is_since(job_log, place, end - 1, since_s)}
    if not behind:
        return found
    async with aclosing(job_log.tail([topic], since_s)) as batches:
        async for batch in batches:
            for record in batch:
                event = event_of(record, prefix)
                if isinstance(event, Started):
                    found.model = event.model
                elif isinstance(event, Terminal) and event.id in wanted:
                    found.places.setdefault(event.id, Place(record.partition, record.offset))
                if record.offset >= ends[record.topic, record.partition] - 1:
                    behind.discard((record.topic, record.partition))
            if not behind:
                break
    return found


async def _is_since(job_log: JobLog, place: tuple[str, int], offset: int, since_s: float) -> bool:
    """Whether a partition's last record is there, and young enough for a tail from that time to meet it."""
    last = await job_log.fetch(*place, [offset]) if offset >= 0 else []
    return bool(last) and last[0].time_ms >= since_s * 1000
