"""A job's state: the fold of its events.

All events of a job lie in one partition under one order, so the state after the event at offset n is a pure
function of the events up to n: folding an event again changes nothing, and two projectors that read the same
log write the same states.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from arriero.schemas.event import (
    Cancelled,
    CancelRequested,
    Completed,
    Crashed,
    DeadLettered,
    Duplicate,
    Error,
    Event,
    Expired,
    Failed,
    Origin,
    OwnerEvent,
    Preempted,
    Progressed,
    Rejected,
    Requeued,
    Resumed,
    RetryScheduled,
    Started,
    Terminal,
    Usage,
)
from arriero.schemas.job import BatchRef, Job, PriorityClass, body_digest
from arriero.schemas.token import FinishReason, StreamEnd

Status = Literal[
    "queued",
    "running",
    "delayed",
    "cancelling",
    "completed",
    "failed",
    "cancelled",
    "expired",
    "rejected",
    "dead_lettered",
]

TERMINAL_STATUS: Final[dict[type[Terminal], Status]] = {
    Completed: "completed",
    Failed: "failed",
    Cancelled: "cancelled",
    Expired: "expired",
    Rejected: "rejected",
    DeadLettered: "dead_lettered",
}

HISTORY_MAX: Final = 1_000
"""Event offsets kept for `history`. A job that checkpoints for hours stays readable; later checkpoints drop out."""
DUPLICATES_MAX: Final = 16
CRASH_REPORTS_MAX: Final = 16


class DuplicateRef(msgspec.Struct, frozen=True, array_like=True):
    """A later record under the same id, and whether it asked for something else."""

    origin: Origin
    body_differs: bool


class JobState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one job. Times are Unix milliseconds."""

    id: str
    phase: Status = "queued"
    priority: PriorityClass | None = msgspec.field(name="class", default=None)
    tenant: str = "default"
    model: str = ""
    root: str = ""
    """Origin of the job's first record. A guess until the first owner's event says it."""
    owned: bool = False
    """Whether an owner's event has been folded in: `root` and `digest` are certain."""
    digest: str = ""
    record: Origin | None = None
    batch: BatchRef | None = None
    replay_of: str = ""
    """The dead-lettered job that this one runs again."""
    attempt: int = 1
    worker: str = ""
    queued_ms: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    cancel_requested: bool = False
    crashes: int = 0
    """Reported crashes of workers that had it in hand, in all."""
    crashes_in_row: int = 0
    """Those since it last gained a token between two of them."""
    crashes_alone: int = 0
    """Of all of them, with nothing else at work."""
    crash_reports: list[str] = []
    """Which reports these are, by worker and time: one whose publishing was not confirmed may lie in the log twice."""
    crash_tokens: int = 0
    """Its tokens at the last of them."""
    finish_reason: FinishReason | None = None
    error: Error | None = None
    usage: Usage = Usage()
    tokens: int = 0
    """Tokens in the recorded output, or at the last checkpoint."""
    partition: int = -1
    """The events partition that holds the job's history."""
    offset: int = -1
    """The last event folded in."""
    terminal: int = -1
    """Offset of the first terminal event: the result."""
    history: list[int] = []
    duplicates: list[DuplicateRef] = []
    late_terminals: int = 0
    """Terminal events after the first; they are ignored and counted."""

    @property
    def status(self) -> Status:
        if self.cancel_requested and not self.ended:
            return "cancelling"
        return self.phase

    @property
    def ended(self) -> bool:
        return self.terminal >= 0


def queued(job: Job, origin: Origin, priority: PriorityClass) -> JobState:
    """The state of a job nobody has read yet."""
    return JobState(
        id=job.id,
        priority=priority,
        tenant=job.tenant,
        model=job.model or "",
        root=job.root or str(origin),
        digest=body_digest(job),
        record=origin,
        batch=job.batch,
        replay_of=job.replay_of or "",
        attempt=job.attempt,
        queued_ms=origin.time_ms,
    )


def fold(state: JobState | None, event: Event, partition: int, offset: int) -> JobState:
    """The state after one more event. An event at or before `state.offset` changes nothing."""
    if state is None:
        state = JobState(id=event.id)
    if offset <= state.offset:
        return state
    changes: dict[str, object] = {"partition": partition, "offset": offset}
    if len(state.history) < HISTORY_MAX or not isinstance(event, Progressed):
        changes["history"] = [*state.history, offset]
    if isinstance(event, OwnerEvent):
        changes |= _owned(state, event)
    match event:
        case Started() if not state.ended:
            changes |= {"phase": "running", "model": event.model, "worker": event.worker, "attempt": event.attempt}
            changes |= {"started_ms": state.started_ms or event.time_ms, "tokens": event.from_token}
        case Progressed() if not state.ended:
            changes["tokens"] = event.first + len(event.tokens)
        case Preempted() if not state.ended:
            changes["phase"] = "queued"
        case Resumed() if not state.ended:
            changes["phase"] = "running"
        case RetryScheduled() if not state.ended:
            changes |= {"phase": "delayed", "error": event.error, "attempt": event.next_attempt}
        case Requeued() if not state.ended:
            changes["phase"] = "queued"
        case Duplicate():
            known = [*state.duplicates, DuplicateRef(event.origin, event.body_differs)]
            changes["duplicates"] = known[:DUPLICATES_MAX]
        case CancelRequested():
            changes["cancel_requested"] = True
        case Crashed():
            changes |= _crashed(state, event)
        case Terminal() if state.ended:
            changes["late_terminals"] = state.late_terminals + 1
        case Terminal():
            changes |= _ended(event, offset)
        case _:
            pass
    return msgspec.structs.replace(state, **changes)


def _owned(state: JobState, event: OwnerEvent) -> dict[str, object]:
    """What the first owner's event says of the job; only it can know which record came first."""
    if state.owned or isinstance(event, Duplicate):  # a Duplicate speaks of another record
        return {}
    return {
        "owned": True,
        "root": event.root,
        "record": event.origin,
        "queued_ms": event.origin.time_ms,
        "priority": event.priority or state.priority,
        "tenant": event.tenant,
        "digest": getattr(event, "digest", "") or state.digest,
    }


def _crashed(state: JobState, event: Crashed) -> dict[str, object]:
    report = f"{event.worker}@{event.time_ms}"
    if report in state.crash_reports:
        return {}
    gained = state.tokens > state.crash_tokens
    return {
        "crash_reports": [*state.crash_reports, report][-CRASH_REPORTS_MAX:],
        "crashes": state.crashes + 1,
        "crashes_in_row": 1 if gained else state.crashes_in_row + 1,
        "crashes_alone": state.crashes_alone + event.alone,
        "crash_tokens": state.tokens,
    }


def _ended(event: Terminal, offset: int) -> dict[str, object]:
    changes: dict[str, object] = {
        "phase": TERMINAL_STATUS[type(event)],
        "terminal": offset,
        "finished_ms": event.time_ms,
        "worker": event.worker,
        "attempt": event.attempt,
        "usage": event.usage,
        "tokens": event.output.count,
    }
    error = getattr(event, "error", None)
    if error is not None:
        changes["error"] = error
    if isinstance(event, Completed):
        changes["finish_reason"] = event.finish_reason
    return changes


def stream_end(event: Terminal) -> StreamEnd:
    """A terminal event as the last word of its stream."""
    error: Error | None = getattr(event, "error", None)
    if isinstance(event, Expired):
        error = Error("expired", f"the deadline passed; the time went into: {event.stage}")
    return StreamEnd(
        status=TERMINAL_STATUS[type(event)],
        count=event.output.count,
        tail=event.output.tail,
        finish_reason=event.finish_reason if isinstance(event, Completed) else None,
        code=error.code if error else None,
        error=error.message if error else None,
    )
