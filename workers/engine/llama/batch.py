"""The batch: one step's tokens in the arrays that llama.cpp reads.

The arrays are made once and filled in place through numpy views; nothing is copied or allocated in a step but
Python's own lists. Everything that llama.cpp would answer with an abort is refused here first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from arriero.schemas.errors import EngineError
from arriero.workers.engine.seam import StepPlan


class Batch:
    """Room for `n_batch` tokens of `slots` sequences, `drafts` of them guesses; slot and sequence id are the same
    number."""

    def __init__(self, n_batch: int, slots: int, drafts: int, n_vocab: int) -> None:
        self._n_batch = n_batch
        self._slots = slots
        self._outputs_max = slots + drafts
        self._n_vocab = n_vocab
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._count = np.ones(n_batch, np.int32)
        self._logits = np.zeros(n_batch, np.int8)
        self._ids = np.arange(slots, dtype=np.int32)
        self._id_addresses = self._ids.ctypes.data + np.arange(slots, dtype=np.uint64) * self._ids.itemsize
        self._seq = np.zeros(n_batch, np.uint64)
        """For each token the address of its list of sequence ids."""
        self.native = llama.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._count, ctypes.c_int32),
            seq_id=ctypes.cast(self._seq.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=_pointer(self._logits, ctypes.c_int8),
        )

    def fill(self, plan: StepPlan, positions: list[int]) -> int:
        """Lay the plan's tokens out; returns the number of outputs: in the plan's order one for each feed that wants a
        pick, and one more for each guess.

        `positions` has, by slot, the cells already filled. Raises EngineError for a plan that llama.cpp must not
        see.
        """
        tokens: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        for feed in plan.feeds:
            slot, start, count = feed.slot, feed.position, len(feed.tokens)
            if not 0 <= slot < self._slots or not 0 <= feed.draft < count or start != positions[slot]:
                raise EngineError(f"a step does not fit slot {slot} at position {start}")
            tokens.extend(feed.tokens)
            if count == 1:
                places.append(start)
                slots.append(slot)
            else:
                places.extend(range(start, start + count))
                slots.extend([slot] * count)
            if feed.pick:
                outputs.extend(range(len(tokens) - 1 - feed.draft, len(tokens)))
        total = len(tokens)
        if not 0 < total <= self._n_batch or len(plan.feeds) > self._slots or len(outputs) > self._outputs_max:
            raise EngineError(f"a step of {total:,} tokens does not fit the batch of {self._n_batch:,}")
        if min(tokens) < 0 or max(tokens) >= self._n_vocab:
            raise EngineError("a token is outside the model's vocabulary")
        self._token[:total] = tokens
        self._pos[:total] = places
        self._seq[:total] = self._id_addresses[slots]
        self._logits[:total] = 0
        self._logits[outputs] = 1
        self.native.n_tokens = total
        return len(outputs)


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
