"""What is wrong with a record, and the events that say so. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from arriero.schemas.codec import encode
from arriero.schemas.errors import ArrieroError, BadJob, Undecodable, UnknownVersion
from arriero.schemas.event import DeadLettered, DeadRecord, Duplicate, Error, Origin, Rejected
from arriero.schemas.event import Undecodable as UndecodableEvent
from arriero.schemas.job import JOB_MAX_BYTES, Job, PriorityClass, body_digest, read_job
from arriero.schemas.names import Names
from arriero.schemas.state import JobState
from arriero.transports.log import Outgoing, Record
from arriero.workers.held import about

log = structlog.get_logger(__name__)


def check_record(record: Record, priority: PriorityClass, model_names: Sequence[str]) -> tuple[Job, str]:
    """The job in a record, and the digest of its body. Raises BadJob, UnknownVersion, Undecodable, and nothing else."""
    try:
        job = read_job(record.value)
        digest = body_digest(job)
    except ArrieroError:
        raise
    except Exception as error:  # a fault of ours that this record brings out must not stop the others
        log.error(
            "record_not_read", topic=record.topic, partition=record.partition, offset=record.offset, exc_info=True
        )
        raise Undecodable(f"the record cannot be read: {type(error).__name__}", code="malformed_json") from error
    if job.priority is not None and job.priority != priority:
        raise BadJob(
            f"the job says class `{job.priority}` and lies in the topic of `{priority}`",
            code="class_mismatch",
            field="class",
            job_id=job.id,
        )
    if job.model is not None and job.model not in model_names:
        raise BadJob(
            f"model `{job.model[:100]}` is not served by this pool; it serves "
            + ", ".join(f"`{name}`" for name in model_names),
            code="unknown_model",
            field="model",
            job_id=job.id,
        )
    return job, digest


def refusal(
    names: Names, record: Record, priority: PriorityClass | None, error: BadJob | Undecodable, time_ms: int
) -> tuple[Rejected | DeadLettered | UndecodableEvent, list[Outgoing]]:
    """How a record that is no acceptable job ends: its event, and a copy for the dead-letter topic where the job may
    run one day or nothing else tells what it was."""
    origin = origin_of(record)
    reason = Error(error.code, error.message, getattr(error, "field", None))
    if isinstance(error, Undecodable) or error.job_id is None:
        event = UndecodableEvent(
            id=str(origin), time_ms=time_ms, origin=origin, worker="", fence=0, error=reason, priority=priority
        )
        dead = DeadRecord(
            reason="undecodable",
            error=reason,
            origin=origin,
            time_ms=time_ms,
            raw=None if record.value is None else record.value[:JOB_MAX_BYTES],
        )
        return event, [Outgoing(names.dead, event.id.encode(), encode(dead))]
    if isinstance(error, UnknownVersion):
        letter = DeadLettered(**about(error.job_id, origin, priority, time_ms), reason="unknown_version", error=reason)
        dead = DeadRecord(
            reason=letter.reason, error=reason, origin=origin, time_ms=time_ms, **_body(record.value or b"")
        )
        return letter, [Outgoing(names.dead, error.job_id.encode(), encode(dead))]
    return Rejected(**about(error.job_id, origin, priority, time_ms), error=reason), []


def duplicate_refused(record: Record, priority: PriorityClass, job_id: str, first_root: str, time_ms: int) -> Duplicate:
    """A record that is no acceptable job, under the id of one that is: it must not end that one."""
    return Duplicate(**about(job_id, origin_of(record), priority, time_ms), first_root=first_root, body_differs=True)


def owner_elsewhere(state: JobState | None, root: str) -> bool:
    """Whether an event has said that this id belongs to another record."""
    return state is not None and state.owned and state.root != root


def origin_of(record: Record) -> Origin:
    return Origin(record.topic, record.partition, record.offset, record.time_ms)


def _body(value: bytes) -> dict[str, Any]:
    """The job as it was, readable where it is JSON."""
    try:
        msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {"raw": value}
    return {"job": msgspec.Raw(value)}
