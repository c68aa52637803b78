"""Looking into the log: for what the bus does not know, or not any more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec
import structlog

from arriero.schemas.codec import decode_event
from arriero.schemas.errors import ArrieroError, Unreadable
from arriero.schemas.event import Event, Origin, Started, Terminal, Undecodable
from arriero.schemas.job import read_job
from arriero.schemas.names import Names, parse_job_topic
from arriero.schemas.state import JobState, fold, queued
from arriero.transports.log import JobLog, Record
from arriero.transports.partitioner import partition_of
from arriero.transports.reading import since, until_now

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
    """The event of a job whose id begins so. Others are not even decoded.

    Raises Unreadable for one of a later release: it may be the job's end.
    """
    if record.key is None or record.value is None or not record.key.startswith(prefix):
        return None
    try:
        return decode_event(record.value)
    except Unreadable as error:
        if error.code == "unknown_version":
            raise
        log.warning("event_unreadable", code=error.code, partition=record.partition, offset=record.offset)
        return None


async def state_in_log(job_log: JobLog, names: Names, pool: str, job_id: str) -> JobState | None:
    """A job's state by the log alone: the fold of its events, else its record in the queue."""
    key, events = job_id.encode(), names.events
    partition = partition_of(key, await job_log.partitions(events))
    state: JobState | None = None
    async with aclosing(until_now(job_log, {(events, partition): 0})) as batches:
        async for batch in batches:
            for record in batch:
                event = event_of(record, key) if record.key == key else None
                if event is not None and not isinstance(event, Undecodable):
                    state = fold(state, event, record.partition, record.offset)
    return state or await _queued_in_log(job_log, names, pool, job_id)


async def _queued_in_log(job_log: JobLog, names: Names, pool: str, job_id: str) -> JobState | None:
    """The state of a job that nobody has read yet: its record lies behind its partition's ledger."""
    topics = names.job_topics(pool)
    ledgers = await job_log.ledgers(names.workers_group(pool), topics)
    places = [(topic, number) for topic in topics for number in range(await job_log.partitions(topic))]
    start = {place: ledgers[place].offset if place in ledgers else 0 for place in places}
    async with aclosing(until_now(job_log, start)) as batches:
        async for batch in batches:
            for record in batch:
                if (state := _queued_record(record, job_id)) is not None:
                    return state
    return None


def _queued_record(record: Record, job_id: str) -> JobState | None:
    if record.value is None or job_id.encode() not in record.value:
        return None
    try:
        job = read_job(record.value)
    except ArrieroError:
        return None
    if job.id != job_id:
        return None
    origin = Origin(record.topic, record.partition, record.offset, record.time_ms)
    return queued(job, origin, parse_job_topic(record.topic).priority)


async def search_log(
    job_log: JobLog, events: str, job_topics: Sequence[str], wanted: set[str], *, prefix: bytes, since_s: float
) -> Found:
    """Read events and job topics from a time (Unix seconds) to their present ends, once."""
    found = Found()
    async with aclosing(since(job_log, [events, *job_topics], since_s)) as batches:
        async for batch in batches:
            for record in batch:
                if record.topic == events:
                    _note(found, record, event_of(record, prefix), wanted)
                elif record.key is not None and record.key.startswith(prefix):
                    found.published |= {record.key.decode(errors="replace")} & wanted
    return found


def _note(found: Found, record: Record, event: Event | None, wanted: set[str]) -> None:
    if isinstance(event, Started):
        found.model = event.model
    elif isinstance(event, Terminal) and event.id in wanted:
        found.places.setdefault(event.id, Place(record.partition, record.offset))
