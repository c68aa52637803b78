"""A batch's records in the log, and the search for those that the bus does not know of."""

from __future__ import annotations

from collections.abc import Sequence
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
    places: dict[str, Place] = {}
    """The first terminal event of each job that has one, by its id."""
    published: set[str] = set()
    """Ids of which a record lies in a job topic: a worker will end them, if it has not."""
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


async def search_log(
    job_log: JobLog, events: str, job_topics: Sequence[str], wanted: set[str], *, prefix: bytes, since_s: float
) -> Found:
    """Read events and job topics from a time (Unix seconds) to their present ends, once."""
    found = Found()
    topics = [events, *job_topics]
    ends = await job_log.ends(topics)
    behind = {place for place, end in ends.items() if await _is_since(job_log, place, end - 1, since_s)}
    if not behind:
        return found
    async with aclosing(job_log.tail(topics, since_s)) as batches:
        async for batch in batches:
            for record in batch:
                if record.topic == events:
                    _note(found, record, event_of(record, prefix), wanted)
                elif record.key is not None and record.key.startswith(prefix):
                    found.published |= {record.key.decode(errors="replace")} & wanted
                if record.offset >= ends[record.topic, record.partition] - 1:
                    behind.discard((record.topic, record.partition))
            if not behind:
                break
    return found


def _note(found: Found, record: Record, event: Event | None, wanted: set[str]) -> None:
    if isinstance(event, Started):
        found.model = event.model
    elif isinstance(event, Terminal) and event.id in wanted:
        found.places.setdefault(event.id, Place(record.partition, record.offset))


async def _is_since(job_log: JobLog, place: tuple[str, int], offset: int, since_s: float) -> bool:
    """Whether a partition's last record is there, and young enough for a tail from that time to meet it."""
    last = await job_log.fetch(*place, [offset]) if offset >= 0 else []
    return bool(last) and last[0].time_ms >= since_s * 1000
