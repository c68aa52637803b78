"""An engine that says what it was told: no model, no dependencies, one token a step like any other.

It stands behind the seam for tests of everything around it and for benchmarks of the queue. A token is up to
three bytes of UTF-8, so characters are split between tokens as real vocabularies split them; its id is its
length and its bytes packed into an integer, so a piece needs no table. The output is the prompt, then the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from arriero.schemas.errors import BadJob
from arriero.schemas.job import Job
from arriero.workers.engine.seam import ModelInfo, Move, Pick, StepOutcome, StepPlan, Work

BYTES_MAX: Final = 3
END: Final = 0
N_VOCAB: Final = (BYTES_MAX + 1) << (8 * BYTES_MAX)


class EchoBackend:
    """`step_s` seconds pass in every step; `bytes_per_token` is 1 to 3; every `fail_every`-th token fails, as if for a
    reason that passes."""

    def __init__(
        self,
        *,
        name: str = "echo",
        slots: int = 64,
        n_ctx: int = 1 << 30,
        n_ctx_sequence: int = 1 << 24,
        n_batch: int = 1 << 16,
        step_s: float = 0.0,
        bytes_per_token: int = BYTES_MAX,
        fail_every: int = 0,
    ) -> None:
        assert 1 <= bytes_per_token <= BYTES_MAX
        self._info = ModelInfo(
            name=name,
            digest="echo",
            size_bytes=0,
            n_vocab=N_VOCAB,
            n_ctx=n_ctx,
            n_ctx_sequence=min(n_ctx, n_ctx_sequence),
            slots=slots,
            n_batch=n_batch,
            device="echo",
        )
        self._step_s = step_s
        self._bytes_per_token = bytes_per_token
        self._fail_every = fail_every
        self._picked = 0
        self._seated: list[list[int]] = [[] for _ in range(slots)]
        """By slot: the tokens still to be said, the next one last."""

    @property
    def info(self) -> ModelInfo:
        return self._info

    def prepare(self, job: Job) -> list[int]:
        """The prompt as tokens; a chat's turns are joined by newlines."""
        text = "\n".join(one.content for one in job.messages) if job.messages is not None else job.prompt or ""
        data = text.encode("utf-8", "replace")
        size = self._bytes_per_token
        tokens = [pack(data[i : i + size]) for i in range(0, len(data), size)]
        if not tokens:
            raise BadJob("the prompt is empty", code="empty_prompt", job_id=job.id)
        if len(tokens) >= self._info.n_ctx_sequence:
            raise BadJob(
                f"the prompt is {len(tokens):,} tokens long; with one token of output at most "
                f"{self._info.n_ctx_sequence:,} fit the context",
                code="prompt_too_long",
                job_id=job.id,
            )
        return tokens

    def begin(self, slot: int, work: Work) -> None:
        self._seated[slot] = list(work.prompt[len(work.resume) :])[::-1]

    def move(self, moves: Sequence[Move]) -> None:
        pass

    def step(self, plan: StepPlan) -> StepOutcome:
        if self._step_s:
            time.sleep(self._step_s)
        picks = []
        for feed in plan.feeds:
            if feed.pick:
                self._picked += 1
                if self._fail_every and self._picked % self._fail_every == 0:
                    picks.append(Pick(feed.slot, END, error="a failure that was asked for"))
                    continue
                left = self._seated[feed.slot]
                picks.append(Pick(feed.slot, left.pop() if left else END))
        return StepOutcome(picks, decode_s=self._step_s)

    def abort(self) -> None:
        pass

    def end(self, slot: int) -> None:
        self._seated[slot] = []

    def piece(self, token: int) -> bytes:
        return unpack(token)

    def is_end(self, token: int) -> bool:
        return token == END

    def close(self) -> None:
        pass


def pack(data: bytes) -> int:
    """One to three bytes as a token id."""
    return len(data) << (8 * BYTES_MAX) | int.from_bytes(data, "big")


def unpack(token: int) -> bytes:
    return (token & ((1 << 8 * BYTES_MAX) - 1)).to_bytes(BYTES_MAX, "big")[BYTES_MAX - (token >> 8 * BYTES_MAX) :]
