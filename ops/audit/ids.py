"""A set of millions of ids in little memory: 64-bit hashes under open addressing, 11 to 22 bytes an id."""

from __future__ import annotations

from array import array
from typing import Final

_FULLEST: Final = 0.7
_LEAST: Final = 1 << 10


class IdSet:
    """Holds hashes only: two ids in a set of a million are taken for one with a chance of 3 in 100 million."""

    def __init__(self) -> None:
        self._slots = array("q", bytes(8 * _LEAST))
        self._mask = _LEAST - 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, job_id: str) -> bool:
        return self._slots[self._find(hash(job_id) or 1)] != 0

    def add(self, job_id: str) -> bool:
        """Whether it is new."""
        number = hash(job_id) or 1  # 0 is an empty slot
        at = self._find(number)
        if self._slots[at]:
            return False
        self._slots[at] = number
        self._count += 1
        if self._count > _FULLEST * len(self._slots):
            self._grow()
        return True

    def _find(self, number: int) -> int:
        """The slot that holds this, or the empty one in which it belongs."""
        slots, mask = self._slots, self._mask
        at = number & mask
        while slots[at] != number and slots[at]:
            at = (at + 1) & mask
        return at

    def _grow(self) -> None:
        before = self._slots
        self._slots = array("q", bytes(16 * len(before)))
        self._mask = len(self._slots) - 1
        for number in before:
            if number:
                self._slots[self._find(number)] = number
