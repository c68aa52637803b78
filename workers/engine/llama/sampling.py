"""From logits to the next token.

The order is llama.cpp's: penalties, top_k, top_p, min_p, temperature, draw; so is the meaning of each. What differs
is the work: nothing sorts the vocabulary. Each filter keeps a set of the likeliest tokens, so a threshold that all
of them must pass is found first, and only the few above it are sorted.

The draw of the token at index i is a hash of the seed and i, not the next number of a generator: whoever resumes a
sequence draws as its first owner would have.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from arriero.schemas.job import Sampling

Row = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.intp]]

BLOCK: Final = 64
"""Logits whose maximum stands for them when a threshold is looked for: about the square root of a vocabulary."""
COLDEST: Final = 1e-6
"""Temperatures up to this one are greedy: in 32 bits nothing else could come out."""
REACHES: Final = (2.0, 4.0, 7.0, 12.0)
"""How far below the highest logit a nucleus is looked for, near first: few tokens lie near, and only they are sorted.
A look costs a pass over the vocabulary, and most end with the second."""


class NotFinite(ArithmeticError):
    """The logits hold a NaN, an infinity, or no number at all."""


def draw(seed: int, index: int) -> float:
    """A number in [0, 1), a function of its arguments and nothing else (53 bits of BLAKE2b)."""
    digest = hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SequenceSampler:
    """Picks the tokens of one sequence. `history` is its prompt and all that follows it so far."""

    __slots__ = ("_counts", "_index", "_sampling", "_seed", "_window")

    def __init__(self, sampling: Sampling, seed: int, index: int, history: Iterable[int]) -> None:
        self._sampling = sampling
        self._seed = seed
        self._index = index
        self._window: deque[int] | None = None
        self._counts: dict[int, int] = {}
        last_n = sampling.penalty_last_n
        penalised = (
            sampling.repeat_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        )
        if penalised and last_n > 0:
            self._window = deque()
            for token in deque(history, maxlen=last_n):
                self._remember(token)

    def pick(self, logits: Row) -> int:
        """The next token. `logits` may be changed. Raises NotFinite."""
        sampling = self._sampling
        if self._counts:
            self._penalise(logits)
        best = int(logits.argmax())  # a NaN, if there is one: numpy counts it as the largest
        top = float(logits[best])
        if not math.isfinite(top):
            raise NotFinite("the model's output is not finite")
        token = best
        if sampling.temperature > COLDEST:
            token = choose(logits, top, sampling, draw(self._seed, self._index))
        self._index += 1
        if self._window is not None:
            self._remember(token)
        return token

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
