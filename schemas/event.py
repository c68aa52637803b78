"""The events: what happened to a job, as it lies in the events topic under the job's id.

Every record read from a job or delay topic gets exactly one *settling* event, with that record's origin.
A *terminal* event also ends the job; the first terminal event of a job is its result. Readers ignore
fields that they do not know.

    owner's events   Started, Progressed, Preempted, Resumed
      settling       RetryScheduled, Requeued, Duplicate
        terminal     Completed, Failed, Cancelled, Expired, Rejected, DeadLettered
    others           Undecodable (settles; no job), CancelRequested (clients), Crashed (a worker's next child)
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec

from arriero.schemas.job import PriorityClass
from arriero.schemas.token import FinishReason, Token

EVENT_VERSION: Final = 1
"""Raised when an event changes its meaning or a type is added; never for a field that older readers may ignore. Whether
a type settles a record does not change with the version."""

Stage = Literal["queue", "prefill", "decode", "commit"]


class Origin(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One record's place: what an event settles. `time_ms` is the record's own timestamp."""

    topic: str
    partition: int
    offset: int
    time_ms: int

    def __str__(self) -> str:
        """The form in which it names a job's root."""
        return f"{self.topic}/{self.partition}/{self.offset}"


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job took. Durations are seconds, measured by the worker that settled it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that a shared prefix saved."""
    queue_s: float = 0.0
    """From the record's timestamp to admission into the batch."""
    ttft_s: float = 0.0
    """From the record's timestamp to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was generated. The text is the pieces and then the tail."""

    tokens: list[Token] = []
    tail: str = ""
    lineage: str = ""
    """Which epoch decoded the tokens from which index on: `epoch@from,epoch@from...`."""

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        return "".join(token.piece for token in self.tokens) + self.tail


class Error(msgspec.Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    field: str | None = None


class EventBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    id: str
    """The job's id, which is also the record's key."""
    time_ms: int
    v: int = EVENT_VERSION


class OwnerEvent(EventBase, frozen=True, kw_only=True, omit_defaults=True):
    """Written by the claim's owner, in its commits only."""

    attempt: int
    root: str
    origin: Origin
    worker: str
    fence: int
    priority: PriorityClass | None = msgspec.field(name="class", default=None)
    tenant: str = "default"


class Started(OwnerEvent, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Admitted into a batch. The first of them makes `root` the job's root and `digest` its body."""

    model: str = ""
    digest: str = ""
    prompt_tokens: int = 0
    from_token: int = 0
    """Where decoding starts: more than 0 when a taken-over generation goes on."""


class Progressed(OwnerEvent, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A checkpoint: the tokens since the last one. `first` is the index of the first of them."""

    lineage: str
    first: int
    tokens: list[Token]
    digests: str = ""
    """Of the model and adapter that decoded them."""


class Preempted(OwnerEvent, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    count: int = 0
    """Tokens decoded so far; they are kept."""


class Resumed(OwnerEvent, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    count: int = 0


class Settling(OwnerEvent, frozen=True, kw_only=True, omit_defaults=True):
    """Settles the record at `origin`."""

    digest: str = ""
    """The body's digest: a later record of this id with another one is a conflicting duplicate."""


class RetryScheduled(Settling, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    error: Error
    next_attempt: int
    step: str
    due_ms: int
    streamed: int = 0


class Requeued(Settling, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Settles a delay record: the relay has put the job back on its class topic."""


class Duplicate(Settling, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Another record owns this id. With `body_differs` the caller asked for something else under it."""

    first_root: str = ""
    body_differs: bool = False


class Terminal(Settling, frozen=True, kw_only=True, omit_defaults=True):
    output: Output = Output()
    usage: Usage = Usage()


class Completed(Terminal, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    finish_reason: FinishReason


class Failed(Terminal, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    error: Error


class Cancelled(Terminal, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    pass


class Expired(Terminal, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    stage: Stage
    """What used the time up."""


class Rejected(Terminal, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    error: Error


class DeadLettered(Terminal, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    reason: str
    error: Error


class Undecodable(EventBase, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Settles a record without a job. `id` is the origin's text, for want of a job id; a copy of the record
    lies in the dead-letter topic."""

    origin: Origin
    worker: str
    fence: int
    error: Error
    priority: PriorityClass | None = msgspec.field(name="class", default=None)


class CancelRequested(EventBase, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    reason: str = ""


class Crashed(EventBase, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A worker's child died with this job in its hands. `id` is the origin's text where decoding killed it."""

    origin: Origin
    worker: str
    operation: str
    signal: str
    alone: bool = False


Event = (
    Started
    | Progressed
    | Preempted
    | Resumed
    | RetryScheduled
    | Requeued
    | Duplicate
    | Completed
    | Failed
    | Cancelled
    | Expired
    | Rejected
    | DeadLettered
    | Undecodable
    | CancelRequested
    | Crashed
)
SettlingEvent = Settling | Undecodable
"""`isinstance(event, SettlingEvent)`: does it settle the record at its origin?"""
EVENT_TYPES: Final[dict[str, type[EventBase]]] = {kind.__name__: kind for kind in get_args(Event)}
"""By the name that stands in `type`."""


class DeadRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record of the dead-letter topic: the job as it was, or the bytes that were no job."""

    reason: str
    error: Error
    origin: Origin
    time_ms: int
    job: Any = None
    raw: bytes | None = None
    """The undecodable value, base64 in JSON; cut to 1 MiB."""
