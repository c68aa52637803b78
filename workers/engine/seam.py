"""The engine seam: what the worker hands in, what it gets back, and what a model must be able to do.

    worker (event loop)                    engine thread                          backend
    Work ──submit──▶ command queue ──▶ Scheduler.plan ──▶ StepPlan ──▶ Backend.step ──▶ picks
    StepReport ◀── one call_soon_threadsafe a step ◀── text, stop strings, limits ◀──┘

Everything here is plain data, so that the scheduler can be tested without a model, the runner with the echo
backend, and a backend without a runner. Times are seconds of the injected clock's `monotonic()` unless a name
says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from arriero.schemas.event import Stage
from arriero.schemas.job import Job, PriorityClass, Sampling
from arriero.schemas.token import FinishReason, Token


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is and how it was loaded."""

    name: str
    """The name that jobs ask for."""
    digest: str
    """First 16 hex digits of the file's SHA-256; two workers agree on a text only when theirs agree."""
    size_bytes: int
    n_vocab: int
    n_ctx: int
    """Cells of the unified KV cache, in tokens: what all sequences share."""
    n_ctx_sequence: int
    """Longest single sequence, prompt and output together, in tokens."""
    slots: int
    """Sequences that can be in one batch."""
    n_batch: int
    """Tokens that one step may carry."""
    layers: int = 0
    offloaded: int = 0
    device: str = "cpu"
    load_s: float = 0.0
    chat: bool = True
    """Whether the model file carries a chat template."""
    holders: int = 0
    """Sequence ids from `slots` on that can keep the cells of finished sequences; 0 where cells cannot be shared."""
    drafts: int = 0
    """Guessed tokens that one step may carry; 0 where they cannot be taken back."""


class Work(msgspec.Struct, kw_only=True, eq=False):
    """One sequence to generate, prepared: what the scheduler sees of a job.

    `key` is the worker's handle and never reused. `resume` holds what an earlier owner has already decoded
    and streamed: it is prefilled behind the prompt, replayed through penalties, held-back text and stop
    strings, and decoding goes on after it.
    """

    key: int
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    max_tokens: int
    stop: Sequence[str] = ()
    priority: PriorityClass = "standard"
    tenant: str = "default"
    arrived: float = 0.0
    """When the job entered the log, on the monotonic clock."""
    deadline: float | None = None
    resume: Sequence[Token] = ()
    sealed: FinishReason | None = None
    """`resume` is the whole output, and generation ended for this reason: only its tail is wanted."""
    alone: bool = False
    """It may have crashed workers: nothing else is decoded beside it."""
    label: str = ""
    """What names its job in a crash report."""


Prepared = list[int] | Exception
"""A prompt as token ids, or why it can't be."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why a sequence is over. After it nothing more is said of its key."""

    kind: Literal["finished", "cancelled", "expired", "failed"]
    finish_reason: FinishReason | None = None
    tail: str = ""
    """Text still held back; the result's last words. Given for every kind."""
    stage: Stage = "decode"
    """Where the sequence was when it was cut off."""
    code: str = ""
    error: str = ""
    retriable: bool = False


class Update(msgspec.Struct, kw_only=True):
    """What one step did for one sequence."""

    key: int
    admitted: bool = False
    """It holds a slot since this step."""
    preempted: bool = False
    """It lost its slot in this step; its tokens are kept and it waits again."""
    first_token: bool = False
    cached_tokens: int = 0
    """Prompt tokens that in this step turned out to need no prefill."""
    tokens: list[Token] = []
    ending: Ending | None = None


class StepTimings(msgspec.Struct, kw_only=True):
    """One step on the engine thread; `decode_s + sample_s + rest_s` is its whole length."""

    decode_s: float = 0.0
    """Inside the model's forward pass."""
    sample_s: float = 0.0
    rest_s: float = 0.0
    """Python's own share: planning, batch building, detokenising, bookkeeping, hand-over."""
    decode_tokens: int = 0
    prefill_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Of these guesses, the right ones."""
    aborted: bool = False
    """The step was broken off for more urgent work, and did nothing."""
    sequences: int = 0
    """Sequences that hold a slot."""
    waiting: int = 0
    kv_used: int = 0
    """Cells that running sequences hold."""
    kv_retained: int = 0
    """Cells kept of finished ones, for prompts that begin like them."""


class StepReport(msgspec.Struct, kw_only=True):
    updates: list[Update]
    timings: StepTimings


class Feed(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sequence in one step: a chunk of its prompt, or the one token picked last."""

    slot: int
    position: int
    """Position of the first of `tokens` in the sequence."""
    tokens: Sequence[int]
    pick: bool
    """Whether the token after the last of these is wanted."""
    draft: int = 0
    """So many of `tokens`, at their end, are guesses. A guess counts when it is what is picked in its place; with the
    first one that is not, the rest is void."""


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. At most `slots` feeds, `n_batch` tokens and `drafts` guesses; slots are 0..slots-1."""

    feeds: list[Feed]


class Pick(msgspec.Struct, frozen=True, gc=False):
    """The next token of a slot, or why none could be picked."""

    slot: int
    token: int
    error: str = ""


TO_THE_END: Final = -1
"""A move's end: after the last token."""


class Move(NamedTuple):
    """Share the cells of positions [start, end) of sequence `source` with `target`; with no source (-1) remove them
    from `target`. A slot is a sequence, and so is a holder."""

    source: int
    target: int
    start: int
    end: int


class StepOutcome(msgspec.Struct):
    picks: list[Pick]
    """Of a feed with guesses, one for each that was right and one more."""
    decode_s: float = 0.0
    sample_s: float = 0.0
    no_room: bool = False
    """The KV cache had no place for the batch; nothing was changed and nothing picked."""
    aborted: bool = False
    """`abort` was called; nothing was changed and nothing picked."""


class Backend(Protocol):
    """One loaded model. Called from the engine thread only, but `prepare` and `abort`, which any thread may call."""

    @property
    def info(self) -> ModelInfo: ...

    def prepare(self, job: Job) -> list[int]:
        """The prompt as token ids: chat template rendered, tokenised, checked against the context.

        Raises BadJob (prompt_too_long, empty_prompt, bad_template).
        """
        ...

    def begin(self, slot: int, work: Work) -> None:
        """Seat a sequence in a free slot: sampling state is made, and replayed over `work.resume`."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Share and remove KV cells, in this order. Before the next step; slots are cleared by this alone."""
        ...

    def step(self, plan: StepPlan) -> StepOutcome:
        """One forward pass, and a pick for each feed that wants one and each guess that was right.

        Raises EngineError when the pass failed; the runner then fails the sequences in it.
        """
        ...

    def abort(self) -> None:
        """End the step that runs, if the device can; one that does not run, or has just begun, may miss it."""
        ...

    def end(self, slot: int) -> None:
        """Forget the sequence of a slot; its cells are removed by a move."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for control tokens."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether a token ends generation (it has no text and is not streamed)."""
        ...

    def close(self) -> None: ...
