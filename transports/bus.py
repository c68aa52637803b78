"""The token bus seam: live token streams, job states, presence of workers. Disposable: the log is the truth.

Two adapters keep it: `redis/bus.py` and `embedded/bus.py`; one contract suite holds both to what is said
here. The rules by which a stream survives takeovers and losses are in docs/token-bus.md; `lineage.py` is their
arithmetic. Every call is atomic for each job in it. Calls take lists so that one round trip serves a whole
decode step; answers come in the order of the requests. All raise BusUnavailable when the bus is out of reach.

Tokens are strings `<id>|<piece>` (schemas/token.py). An epoch is `<attempt>.<fence>`; a lineage says which epoch
decoded the tokens from which index on: `epoch@from,epoch@from...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Literal, Protocol

import msgspec

from arriero.schemas.token import Message

APPEND_MAX_TOKENS: Final = 256
"""Tokens in one append: bounds how long a script holds the bus, and a frame's size."""


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An owner takes hold of a stream.

    mode   start    a first run, or after `none` with what the log had: creates the stream
           take     a takeover that creates nothing: `none` when the stream is absent or shorter than `least`
           restart  what is there is cut to nothing under the new epoch, and readers are reset
           mine     the owner already runs: the stream is made equal to `tokens` from where lineages part
    """

    job_id: str
    root: str
    attempt: int
    fence: int
    epoch: str
    mode: Literal["start", "take", "restart", "mine"]
    least: int = 0
    lineage: str = ""
    tokens: Sequence[str] = ()
    digests: str = ""
    """Digests of model and adapter that decode it."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """code  fresh     created; `lineage` is the one asked for
    have      this owner's now; `tokens` are what it holds, `seal` when generation was complete
    none      nothing to take over
    foreign   another record of this id streams; run unseen
    fenced    a later owner has it
    finished  it has ended: the job is recorded
    """

    code: Literal["fresh", "have", "none", "foreign", "fenced", "finished"]
    cancelled: bool = False
    lineage: str = ""
    seal: str = ""
    digests: str = ""
    crashes: int = 0
    tokens: list[str] = []


class AppendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens from index `first` on; written only when the stream ends there. None at all is a touch.

    `seal`, `<count>|<reason>`: with these tokens generation is complete.
    """

    job_id: str
    root: str
    attempt: int
    fence: int
    epoch: str
    first: int
    tokens: Sequence[str] = ()
    seal: str = ""


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """code  ok        go on from `next`
    gone      the stream is not there (any more): checkpoint, then open it as `mine`
    reopen    the stream carries another epoch: open it as `mine`
    foreign, fenced, finished   as in `Opened`
    """

    code: Literal["ok", "gone", "reopen", "foreign", "fenced", "finished"]
    cancelled: bool = False
    next: int = 0


class FinishRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The projector ends a stream with the recorded result. The first try carries no tokens (`base` = `count`)."""

    job_id: str
    root: str
    lineage: str
    count: int
    end: str
    """An encoded `StreamEnd`."""
    base: int
    tokens: Sequence[str] = ()
    """The output's tokens from index `base` on."""


class Finished(msgspec.Struct, frozen=True):
    """code  ok    ended now
    done  had ended before
    need  say it again with the tokens from index `base` on
    """

    code: Literal["ok", "done", "need"]
    base: int = 0


class Position(msgspec.Struct, frozen=True):
    """What a reader has shown: `count` tokens of `root`'s stream, the last decoded in `epoch`."""

    root: str = ""
    epoch: str = ""
    count: int = 0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as a reader at some position sees it.

    status  none   no stream is there; `terminal` may still say that the job has ended
            stale  the bus has failed over to an older copy: wait
            open   being decoded
            fin    ended and recorded: `end` is an encoded `StreamEnd`
    """

    status: Literal["none", "stale", "open", "fin"]
    root: str = ""
    lineage: str = ""
    start: int = 0
    """Index of the first of `tokens`. Less than the reader's count: what it shows from there on is not the result."""
    end: str = ""
    terminal: str = ""
    """`<partition>/<offset>` of the terminal event, once projected."""
    tokens: list[str] = []


class StateWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A folded state; written only when `offset` is beyond the stored one, with `again` also when it is the same."""

    job_id: str
    offset: int
    state: bytes
    root: str = ""
    cancelled: bool = False
    crashes: int = 0
    terminal: str = ""
    again: bool = False


class Subscription(Protocol):
    async def message(self) -> Message:
        """Waits for the next message. Raises BusUnavailable when the connection was lost: messages may have been
        missed, so subscribe again and read."""
        ...


class TokenBus(Protocol):
    """A connection to the bus. An async context manager; nothing is acquired before it is entered."""

    async def __aenter__(self) -> TokenBus: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def check(self) -> None:
        """Whether the bus answers and is fit for its work. Raises BusUnavailable, SetupError.

        Entering does not ask: a worker starts without a bus, and its tokens wait.
        """
        ...

    # the owner's calls
    async def open(self, requests: Sequence[OpenRequest]) -> list[Opened]: ...

    async def append(self, requests: Sequence[AppendRequest]) -> list[Appended]: ...

    # the reader's
    async def read(self, job_id: str, position: Position) -> View: ...

    def follow(self, job_id: str) -> AbstractAsyncContextManager[Subscription]:
        """Entered once the bus has confirmed: no message after that is missed while the connection lives."""
        ...

    async def cancel(self, job_id: str) -> None:
        """Raise the flag that the owner's next answer carries. The durable request is the CancelRequested event."""
        ...

    async def states(self, job_ids: Sequence[str]) -> list[bytes | None]:
        """Encoded `JobState`s; None for a job unknown here."""
        ...

    # the projector's
    async def finish(self, requests: Sequence[FinishRequest]) -> list[Finished]: ...

    async def note_queued(self, states: Sequence[tuple[str, bytes]]) -> None:
        """Store the states of jobs that have none yet."""
        ...

    async def put_states(self, writes: Sequence[StateWrite]) -> None: ...

    async def positions(self) -> bytes | None:
        """What the projector stored last; None when the bus has forgotten."""
        ...

    async def put_positions(self, positions: bytes, *, first: bool) -> bool:
        """Store them. Unless `first`, only when older ones are still there; False says that the bus was emptied."""
        ...

    async def forget(self) -> None:
        """Drop the projector's positions, so that it projects again from the log's beginning."""
        ...

    # presence
    async def announce(self, pool: str, worker: str, info: bytes, ttl_s: float) -> None: ...

    async def retire(self, pool: str, worker: str) -> None: ...

    async def pools(self) -> list[str]:
        """Pools that have or lately had a live worker."""
        ...

    async def workers(self, pool: str) -> dict[str, bytes]:
        """Encoded `WorkerInfo`s of the live workers, by name."""
        ...
