"""A job in a worker's hands, and the events that tell what becomes of it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from arriero.schemas.errors import ERROR_TEXT_CHARS
from arriero.schemas.event import (
    Cancelled,
    Completed,
    DeadLettered,
    Duplicate,
    Error,
    Expired,
    Failed,
    Origin,
    Output,
    Preempted,
    Progressed,
    Rejected,
    Resumed,
    RetryScheduled,
    Stage,
    Started,
    Usage,
)
from arriero.schemas.job import Job, PriorityClass
from arriero.schemas.token import FinishReason, Token
from arriero.workers.commit import Committer
from arriero.workers.engine.seam import Ending
from arriero.workers.flight import label_of
from arriero.workers.stream import Stream

PROGRESS_MAX_TOKENS: Final = 20_000
"""Tokens of one Progressed event: about 1 MiB, far below what the log takes in one record."""


class Held(msgspec.Struct, kw_only=True, eq=False):
    """One job record from its reading to its settling. Moments are seconds on the monotonic clock, 0 for not yet."""

    key: int
    """Its handle in the engine."""
    job: Job
    origin: Origin
    priority: PriorityClass
    digest: str
    """Of its body."""
    model: str
    digests: str
    """Of the model and adapter that decode it."""
    arrived: float
    """When the record entered the log."""
    size_bytes: int
    committer: Committer[Held]
    stream: Stream
    tokens: list[Token]
    """All decoded so far; the stream looks at the same list."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt: Sequence[int] = ()
    sealed: FinishReason | None = None
    """An earlier owner has decoded all of it and did not get to record it."""
    alone: bool = False
    """It may have crashed workers: it decodes with nothing beside it."""
    since_ms: int = 0
    """No event of it that matters is older, in the time of the events topic; 0 while there is none."""
    waiting: bool = True
    """Counts as read ahead: it has not been seated yet."""
    over: bool = False
    """Nothing more is expected from the engine."""
    started_ms: int = 0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    checkpointed: int = 0
    """How many of the tokens Progressed events carry."""
    label: str = ""
    """What names it in a crash report."""
    _every_event: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self.label = label_of(self.job.id, self.origin)
        own = {"attempt": self.job.attempt, "root": self.root, "tenant": self.job.tenant}
        self._every_event = about(self.job.id, self.origin, self.priority, 0) | own

    @property
    def root(self) -> str:
        return self.stream.root

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            queue_s=_span(self.arrived, self.admitted),
            ttft_s=_span(self.arrived, self.first_token),
            decode_s=_span(self.first_token, self.last_token),
        )

    def started(self, time_ms: int) -> Started:
        return Started(
            **self._owner(time_ms),
            model=self.model,
            digest=self.digest,
            prompt_tokens=self.prompt_tokens,
            from_token=len(self.tokens),
        )

    def preempted(self, time_ms: int) -> Preempted:
        return Preempted(**self._owner(time_ms), count=len(self.tokens))

    def resumed(self, time_ms: int) -> Resumed:
        return Resumed(**self._owner(time_ms), count=len(self.tokens))

    def progressed(self, time_ms: int) -> list[Progressed]:
        """The tokens since the last checkpoint, as events; none when there are none."""
        events = []
        while self.checkpointed < len(self.tokens):
            first = self.checkpointed
            tokens = self.tokens[first : first + PROGRESS_MAX_TOKENS]
            events.append(
                Progressed(
                    **self._owner(time_ms),
                    lineage=self.stream.lineage,
                    first=first,
                    tokens=tokens,
                    digests=self.digests,
                )
            )
            self.checkpointed += len(tokens)
        return events

    def ended(self, ending: Ending, time_ms: int) -> Completed | Cancelled | Expired | Failed:
        """What the engine said last, as the job's terminal event."""
        about = self._terminal(time_ms, ending.tail)
        match ending.kind:
            case "finished":
                return Completed(**about, finish_reason=ending.finish_reason or "stop")
            case "cancelled":
                return Cancelled(**about)
            case "expired":
                return Expired(**about, stage=ending.stage)
            case "failed":
                return Failed(**about, error=Error(ending.code or "engine_error", ending.error[:ERROR_TEXT_CHARS]))

    def cancelled(self, time_ms: int) -> Cancelled:
        return Cancelled(**self._terminal(time_ms))

    def expired(self, time_ms: int, stage: Stage) -> Expired:
        return Expired(**self._terminal(time_ms), stage=stage)

    def rejected(self, time_ms: int, error: Error) -> Rejected:
        return Rejected(**self._terminal(time_ms), error=error)

    def failed(self, time_ms: int, error: Error) -> Failed:
        return Failed(**self._terminal(time_ms), error=error)

    def retry_scheduled(self, time_ms: int, error: Error, *, step: str, due_ms: int) -> RetryScheduled:
        return RetryScheduled(
            **self._owner(time_ms),
            digest=self.digest,
            error=error,
            next_attempt=self.job.attempt + 1,
            step=step,
            due_ms=due_ms,
            streamed=len(self.tokens),
        )

    def dead_lettered(self, time_ms: int, reason: str, error: Error) -> DeadLettered:
        return DeadLettered(**self._terminal(time_ms), reason=reason, error=error)

    def duplicate(self, time_ms: int, first_root: str, body_differs: bool) -> Duplicate:
        return Duplicate(**self._owner(time_ms), digest=self.digest, first_root=first_root, body_differs=body_differs)

    def _owner(self, time_ms: int) -> dict[str, Any]:
        return {**self._every_event, "time_ms": time_ms}

    def _terminal(self, time_ms: int, tail: str = "") -> dict[str, Any]:
        output = Output(tokens=self.tokens, tail=tail, lineage=self.stream.lineage)
        return {
            **self._every_event,
            "time_ms": time_ms,
            "digest": self.digest,
            "output": output,
            "usage": self.usage,
        }


def about(job_id: str, origin: Origin, priority: PriorityClass | None, time_ms: int) -> dict[str, Any]:
    """What every owner's event says. Worker and fence are stamped on when it is committed: the fence may have been
    raised by then."""
    return {
        "id": job_id,
        "time_ms": time_ms,
        "attempt": 1,
        "root": str(origin),
        "origin": origin,
        "worker": "",
        "fence": 0,
        "priority": priority,
    }


def _span(start: float, end: float) -> float:
    return max(0.0, end - start) if end else 0.0
