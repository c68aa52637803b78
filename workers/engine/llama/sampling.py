"""From logits to the next token.

The order is llama.cpp's: bias, penalties, top_k, top_p, min_p, temperature, draw; so is the meaning of each. What
differs is the work: nothing sorts the vocabulary. Each filter keeps a set of the likeliest tokens, so a threshold that
all of them must pass is found first, and only the few above it are sorted.

The draw of the token at index i is a hash of the seed and i, not the next number of a generator: whoever resumes a
sequence draws as its first owner would have.

With a grammar the pick is made first and then looked up. One that does not fit is drawn anew among what does.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from arriero.schemas.errors import EngineError
from arriero.schemas.job import Sampling
from arriero.workers.engine.llama.grammar import Grammar

Row = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.intp]]

BLOCK: Final = 64
"""Logits whose maximum stands for them when a threshold is looked for: about the square root of a vocabulary."""
COLDEST: Final = 1e-6
"""Temperatures up to this one are greedy: in 32 bits nothing else could come out."""
REACHES: Final = (2.0, 4.0, 7.0, 12.0)
"""How far below the highest logit a nucleus is looked for, near first: few tokens lie near, and only they are sorted.
A look costs a pass over the vocabulary, and most end with the second."""


LOOKED_AT: Final = 256
"""The likeliest tokens, which a grammar is asked about before all others."""
REDRAWS: Final = 16
"""Draws, each without what was refused before, until the whole vocabulary is looked at instead."""


class NotFinite(ArithmeticError):
    """The logits hold a NaN, an infinity, or no number at all."""


class NothingAllowed(ArithmeticError):
    """The grammar allows no token."""


def draw(seed: int, index: int, attempt: int = 0) -> float:
    """A number in [0, 1), a function of its arguments and nothing else (53 bits of BLAKE2b)."""
    of = b"%d/%d" % (seed, index) if attempt == 0 else b"%d/%d/%d" % (seed, index, attempt)
    digest = hashlib.blake2b(of, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SequenceSampler:
    """Picks the tokens of one sequence, whose tokens so far are `prompt` and `resumed`. Owns its grammar."""

    __slots__ = ("_bias", "_counts", "_grammar", "_index", "_sampling", "_seed", "_window")

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Sequence[int],
        resumed: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Raises EngineError(resume_mismatch) for resumed tokens that the grammar does not allow."""
        self._sampling = sampling
        self._seed = seed
        self._index = len(resumed)
        self._grammar = grammar
        self._window: deque[int] | None = None
        self._counts: dict[int, int] = {}
        self._bias: tuple[Ids, Row] | None = None
        if sampling.logit_bias:
            ids = np.fromiter(map(int, sampling.logit_bias), np.intp, len(sampling.logit_bias))
            self._bias = ids, np.fromiter(sampling.logit_bias.values(), np.float32, ids.size)
        last_n = sampling.penalty_last_n
        penalised = (
            sampling.repeat_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        )
        if penalised and last_n > 0:
            self._window = deque()
            for token in deque(chain(prompt, resumed), maxlen=last_n):
                self._remember(token)
        if grammar is not None:
            for token in resumed:
                if not grammar.allows(token):
                    raise EngineError("the resumed tokens break the job's grammar", code="resume_mismatch")
                grammar.accept(token)

    def close(self) -> None:
        if self._grammar is not None:
            self._grammar.free()
            self._grammar = None

    def pick(self, logits: Row) -> int:
        """The next token. `logits` may be changed. Raises NotFinite, NothingAllowed."""
        if self._bias is not None:
            ids, values = self._bias
            logits[ids] += values
        if self._counts:
            self._penalise(logits)
        token = self._pick(logits, 0)
        if self._grammar is not None:
            if not self._grammar.allows(token):
                token = self._pick_allowed(logits, token, self._grammar)
            self._grammar.accept(token)
        self._index += 1
        if self._window is not None:
            self._remember(token)
        return token

    def _pick(self, logits: Row, attempt: int) -> int:
        best = int(logits.argmax())  # a NaN, if there is one: numpy counts it as the largest
        top = float(logits[best])
        if not math.isfinite(top):
            raise NotFinite("the model's output is not finite")
        if self._sampling.temperature <= COLDEST:
            return best
        return choose(logits, top, self._sampling, draw(self._seed, self._index, attempt))

    def _pick_allowed(self, logits: Row, refused: int, grammar: Grammar) -> int:
        """A pick among the tokens that the grammar allows, when it has refused one.

        1. Where no filter cuts the distribution, drawing on without what was refused is the same as drawing from what
           is allowed.
        2. Else greedy and top_k need only the likeliest that are allowed, which are mostly near the top.
        3. Else every token is looked at.
        """
        sampling = self._sampling
        greedy = sampling.temperature <= COLDEST
        if not greedy and sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:  # 1.
            for attempt in range(1, REDRAWS):
                logits[refused] = -np.inf
                if not np.isfinite(logits.max()):
                    raise NothingAllowed("the grammar allows no token here")
                refused = self._pick(logits, attempt)
                if grammar.allows(refused):
                    return refused
        needed = 1 if greedy else sampling.top_k or logits.size
        kept: Ids = np.empty(0, np.intp)
        if needed < LOOKED_AT < logits.size:  # 2.
            near = np.argpartition(logits, logits.size - LOOKED_AT)[-LOOKED_AT:]
            kept = near[grammar.allowed(near)]
        if kept.size < needed:  # 3.
            kept = np.flatnonzero(grammar.allowed(np.arange(logits.size)))
        kept = kept[np.isfinite(logits[kept])]
        if not kept.size:
            raise NothingAllowed("the grammar allows no token here")
        values = logits[kept]
        logits[:] = -np.inf
        logits[kept] = values
        return self._pick(logits, REDRAWS)

    def _penalise(self, logits: Row) -> None:
        sampling = self._sampling
        ids = np.fromiter(self._counts.keys(), np.intp, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        values = logits[ids]
        repeat = np.float32(sampling.repeat_penalty)
        values = np.where(values <= 0, values * repeat, values / repeat)
        logits[ids] = values - counts * np.float32(sampling.frequency_penalty) - np.float32(sampling.presence_penalty)

    def _remember(self, token: int) -> None:
        assert self._window is not None
        counts, window = self._counts, self._window
        window.append(token)
        counts[token] = counts.get(token, 0) + 1
        if len(window) > self._sampling.penalty_last_n:
            oldest = window.popleft()
            if counts[oldest] == 1:
                del counts[oldest]
            else:
                counts[oldest] -= 1


def choose(logits: Row, top: float, sampling: Sampling, u: float) -> int:
    """One token by `sampling` (temperature above 0); `top` is the highest logit, `u` a number in [0, 1)."""
    kept = keep(logits, top, sampling)
    values = logits if kept is None else logits[kept]
    weights = np.exp((values - np.float32(top)) / np.float32(sampling.temperature))
    place = _draw_from(weights, u)
    return place if kept is None else int(kept[place])


def keep(logits: Row, top: float, sampling: Sampling) -> Ids | None:
    """The tokens that top_k, top_p and min_p leave; None for all of them."""
    kept: Ids | None = None
    if 0 < sampling.top_k < logits.size:
        kept = _top_k(logits, sampling.top_k)
    if sampling.top_p < 1.0:
        kept = _top_p(logits, top, kept, sampling.top_p)
    if sampling.min_p > 0.0:
        floor = np.float32(top + math.log(sampling.min_p))
        kept = np.flatnonzero(logits >= floor) if kept is None else kept[logits[kept] >= floor]
    return kept


def _top_k(logits: Row, k: int) -> Ids:
    """The k likeliest, likeliest first; of equals the lower id."""
    candidates = None
    blocks = logits.size // BLOCK
    if 4 * k <= blocks:
        # The k-th highest of the blocks' maxima: at least k logits reach it, so the k likeliest all do.
        whole = blocks * BLOCK
        maxima = logits[:whole].reshape(blocks, BLOCK).max(axis=1)
        floor = np.partition(maxima, blocks - k)[blocks - k]
        candidates = np.flatnonzero(logits >= floor)
    elif k <= logits.size // 2:
        floor = np.partition(logits, logits.size - k)[logits.size - k]
        candidates = np.flatnonzero(logits >= floor)
    if candidates is None:
        candidates = np.arange(logits.size)
    return _sorted(logits, candidates)[:k]


def _top_p(logits: Row, top: float, kept: Ids | None, p: float) -> Ids:
    """The fewest likeliest of `kept` (sorted; None for all) whose likelihoods, at temperature 1, reach `p`."""
    if kept is None:
        weights = np.exp(logits - np.float32(top))
        needed = p * float(weights.sum())
        for reach in REACHES:
            kept = np.flatnonzero(weights >= np.float32(math.exp(-reach)))
            if float(weights[kept].sum()) > needed:
                break
        else:
            kept = np.arange(logits.size)
        kept = _sorted(logits, kept)
        shares = np.cumsum(weights[kept], dtype=np.float64)
    else:
        shares = np.cumsum(np.exp(logits[kept] - np.float32(top)), dtype=np.float64)
        needed = p * float(shares[-1])
    return kept[: int(np.searchsorted(shares, needed)) + 1]


def _sorted(logits: Row, ids: Ids) -> Ids:
    return ids[np.argsort(-logits[ids], kind="stable")]


def _draw_from(weights: Row, u: float) -> int:
    """The place at which the running sum of `weights` passes the share `u` of the whole."""
    place = 0
    if weights.size > 16 * BLOCK:
        # Find the block first, then the place in it.
        blocks = weights.size // BLOCK
        sums = weights[: blocks * BLOCK].reshape(blocks, BLOCK).sum(axis=1)
        ends = np.append(sums, weights[blocks * BLOCK :].sum()).cumsum(dtype=np.float64)
        target = u * float(ends[-1])
        block = min(int(np.searchsorted(ends, target, side="right")), blocks)
        target -= float(ends[block - 1]) if block else 0.0
        place = block * BLOCK
        ends = np.cumsum(weights[place : place + BLOCK], dtype=np.float64)
    else:
        ends = np.cumsum(weights, dtype=np.float64)
        target = u * float(ends[-1])
    place += int(np.searchsorted(ends, target, side="right"))
    if place >= weights.size or weights[place] == 0.0:
        return int(weights.argmax())  # rounding has pointed past the last token that can be drawn
    return place
