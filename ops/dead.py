"""The dead-letter topic: what was given up, found again, and put back into the queue under new ids.

A dead record's number is its offset, which stays its own for as long as it is kept. It is replayed as `<id>~<number>`:
doing that twice is one job, as with any id, and no two dead records ever share one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
import structlog

from arriero.producer.client import Client
from arriero.schemas.codec import decode_dead
from arriero.schemas.errors import BadJob, JobNotFound
from arriero.schemas.event import DeadRecord
from arriero.schemas.job import ID_PATTERN, Job, check_size, encode_job
from arriero.schemas.names import parse_job_topic
from arriero.transports.log import Outgoing, Placed
from arriero.transports.reading import until_now

log = structlog.get_logger(__name__)

_REPLAYED: Final = re.compile(r"~[0-9.]+\Z")


class Dead(msgspec.Struct, frozen=True):
    """A record of the dead-letter topic."""

    number: int
    record: DeadRecord

    @property
    def id(self) -> str:
        """The job's; empty for a record that was no job."""
        job = self.record.job
        found = job.get("id") if isinstance(job, dict) else None
        return found if isinstance(found, str) and ID_PATTERN.match(found) else ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead records. Times are Unix milliseconds; what is not given does not matter."""

    ids: Sequence[str] = ()
    """Of jobs, or numbers."""
    reason: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    @property
    def everything(self) -> bool:
        return self == Wanted()

    def fits(self, dead: Dead) -> bool:
        record = dead.record
        return (
            (not self.ids or dead.id in self.ids or str(dead.number) in self.ids)
            and (self.reason is None or record.reason == self.reason)
            and (self.since_ms is None or record.time_ms >= self.since_ms)
            and (self.until_ms is None or record.time_ms < self.until_ms)
        )


class Replay(msgspec.Struct, frozen=True):
    """A dead record and the record that runs it again. `known`: that one is there already."""

    dead: Dead
    new_id: str
    record: Outgoing
    known: bool


async def find(client: Client, wanted: Wanted) -> AsyncGenerator[Dead, None]:
    """In the order in which they died."""
    topic = client.names.dead
    start = {(topic, number): 0 for number in range(await client.log.partitions(topic))}
    async with aclosing(until_now(client.log, start)) as batches:
        async for batch in batches:
            for record in batch:
                try:
                    dead = Dead(record.offset, decode_dead(record.value or b""))
                except msgspec.MsgspecError:
                    log.warning("dead_record_unreadable", offset=record.offset)
                    continue
                if wanted.fits(dead):
                    yield dead


async def plan_replay(client: Client, dead: Dead, *, again: bool) -> Replay:
    """How a dead record is run again. With `again` under an id that nobody knows yet.

    Raises BadJob for what can be no job, and for one that has become too large.
    """
    if not dead.id:
        raise BadJob(f"no. {dead.number} was no job ({dead.record.error.code}); mend it and submit it anew")
    stem = _REPLAYED.sub("", dead.id) if _is_replay(dead) else dead.id
    new_id = f"{stem}~{dead.number}"
    known = await _is_known(client, new_id)
    count = 1
    while again and known:
        count += 1
        new_id = f"{stem}~{dead.number}.{count}"
        known = await _is_known(client, new_id)
    return Replay(dead, new_id, _record(client, dead, new_id), known)


async def run_replay(client: Client, replay: Replay) -> None:
    """Raises LogUnavailable, and what else the log has against it."""
    (placed,) = await client.log.publish([replay.record])
    if not isinstance(placed, Placed):
        raise placed


def _is_replay(dead: Dead) -> bool:
    return isinstance(dead.record.job, dict) and bool(dead.record.job.get("replay_of"))


async def _is_known(client: Client, job_id: str) -> bool:
    try:
        await client.status(job_id)
    except JobNotFound:
        return False
    return True


def _record(client: Client, dead: Dead, new_id: str) -> Outgoing:
    """The job as it was, for the topic that it came from: a new first attempt under a new id."""
    raw: dict[str, Any] = dead.record.job
    try:
        came_from = parse_job_topic(dead.record.origin.topic)
    except ValueError as error:
        raise BadJob(f"no. {dead.number} says that it came from {dead.record.origin}: {error}") from error
    fields: dict[str, Any] = {name: raw[name] for name in raw if name not in _FLEETS}
    deadline = fields.get("deadline")
    if isinstance(deadline, int | float) and deadline <= client.clock.time():
        del fields["deadline"]  # it would expire at once
    fields |= {"id": new_id, "replay_of": dead.id}
    try:
        job = msgspec.convert(fields, Job)
        key, value = job.key, encode_job(job)
    except msgspec.ValidationError:
        # Of a version that is unknown here: as it was. A worker that reads it will check it.
        key, value = str(fields.get("affinity") or new_id), msgspec.json.encode(fields)
        check_size(value, new_id)
    return Outgoing(client.names.jobs(came_from.pool, came_from.priority), key.encode(), value)


_FLEETS: Final = frozenset(("attempt", "root", "streamed", "started_ms", "class"))
"""Fields of an earlier attempt. The class is the topic's."""
