"""The ledger: what of a partition is settled. Pure.

A claim commits one string beside its offset. It lists what is settled beyond the offset, so that jobs may
finish in any order, and the fence and owner, so that a former owner's commits can be told from one's own.

Its text has at most 4,096 characters, the most that a Kafka broker keeps beside an offset:

    1;<fence>;<owner>;<oldest start, ms>;<stamp offset>:<stamp ms>;<gap>,<length>,<gap>,<length>...

Gaps and lengths are base 36, the first gap counted from the offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

LEDGER_VERSION: Final = 1
LEDGER_MAX_CHARS: Final = 4_096
PENDING_MAX: Final = 512
"""Records a claim may hold unsettled. Each can cost one gap in the text; more would not always fit."""

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


class LedgerError(ValueError):
    """A ledger text that no release has written, or of a later version (`later`)."""

    def __init__(self, message: str, *, later: bool = False) -> None:
        super().__init__(message)
        self.later = later


class Stamp(msgspec.Struct, frozen=True):
    """The furthest record that an owner has read, by offset and time: on a topic that was made anew it does not match,
    and nothing behind it has ever been started."""

    offset: int
    time_ms: int


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """All records before `offset` are settled, and those in `settled` (half-open ranges, ascending, beyond it)."""

    offset: int
    fence: int = 0
    owner: str = ""
    """Worker and incarnation, `<worker>/<incarnation>`."""
    settled: tuple[tuple[int, int], ...] = ()
    oldest_start_ms: int = 0
    """Earliest start among what is running, in the time of the events topic; 0 when nothing runs."""
    stamp: Stamp | None = None
    fault: str = ""
    """Why the text beside the offset cannot be read, for who only looks; nothing is known of the ledger then."""

    def is_settled(self, offset: int) -> bool:
        return offset < self.offset or any(start <= offset < stop for start, stop in self.settled)

    def unsettled(self, start: int) -> Iterator[tuple[int, int | None]]:
        """What a claim still has to read from offset `start` on: half-open ranges, the last one without end."""
        at = max(start, self.offset)
        for first, stop in self.settled:
            if at < first:
                yield at, first
            at = max(at, stop)
        yield at, None

    def pending(self, position: int) -> int:
        """How many offsets before `position` are not settled."""
        return sum(
            (position if stop is None else min(stop, position)) - start
            for start, stop in self.unsettled(0)
            if start < position
        )

    def settle(self, offsets: Iterable[int]) -> Ledger:
        """The ledger with these records settled too."""
        return self.cover((offset, offset + 1) for offset in offsets)

    def cover(self, ranges: Iterable[tuple[int, int]]) -> Ledger:
        """The ledger with every offset of these half-open ranges settled: records, or offsets that hold none
        (transaction markers, aborted records, what retention removed)."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([(0, self.offset), *self.settled, *ranges]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            elif start < stop:
                merged.append((start, stop))
        offset = merged.pop(0)[1] if merged and merged[0][0] == 0 else self.offset
        return msgspec.structs.replace(self, offset=offset, settled=tuple(merged))

    def raised(self, clock_ms: int, owner: str, seen_fence: int = 0) -> Ledger:
        """The ledger under a new owner: its fence exceeds every fence before it, on any machine's clock."""
        return msgspec.structs.replace(self, fence=max(self.fence + 1, seen_fence + 1, clock_ms), owner=owner)

    def with_start(self, oldest_start_ms: int) -> Ledger:
        return msgspec.structs.replace(self, oldest_start_ms=oldest_start_ms)

    def with_stamp(self, stamp: Stamp) -> Ledger:
        """The ledger with the stamp of the furthest record read: a new owner begins again before it."""
        if self.stamp is not None and self.stamp.offset >= stamp.offset:
            return self
        return msgspec.structs.replace(self, stamp=stamp)

    def encode(self) -> str:
        """Raises LedgerError when the text would be too long, or the owner unreadable; nothing may be committed
        then."""
        if ";" in self.owner:
            raise LedgerError(f"the owner {self.owner!r} contains a semicolon")
        stamp = f"{_base36(self.stamp.offset)}:{_base36(self.stamp.time_ms)}" if self.stamp else ""
        parts: list[str] = []
        at = self.offset
        for start, stop in self.settled:
            parts += (_base36(start - at), _base36(stop - start))
            at = stop
        text = ";".join(
            (str(LEDGER_VERSION), str(self.fence), self.owner, str(self.oldest_start_ms), stamp, ",".join(parts))
        )
        if len(text) > LEDGER_MAX_CHARS:
            raise LedgerError(f"a ledger of {len(self.settled)} ranges takes {len(text)} characters")
        return text

    @staticmethod
    def decode(offset: int, text: str) -> Ledger:
        """The ledger committed with `offset`. Raises LedgerError."""
        fields = text.split(";")
        if fields[0].isascii() and fields[0].isdigit() and len(fields[0]) < 10 and int(fields[0]) > LEDGER_VERSION:
            raise LedgerError(
                f"a ledger of version {fields[0]}, and this release reads version {LEDGER_VERSION}: {text[:60]!r}",
                later=True,
            )
        if fields[0] != str(LEDGER_VERSION) or len(fields) != 6:
            raise LedgerError(f"not a ledger of version {LEDGER_VERSION}: {text[:60]!r}")
        try:
            stamp = None
            if fields[4]:
                stamp_offset, stamp_ms = fields[4].split(":")
                stamp = Stamp(int(stamp_offset, 36), int(stamp_ms, 36))
            numbers = [int(digits, 36) for digits in fields[5].split(",")] if fields[5] else []
            settled: list[tuple[int, int]] = []
            at = offset
            for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
                if gap < 1 or length < 1:
                    raise ValueError("a gap or range that is empty")
                settled.append((at + gap, at + gap + length))
                at += gap + length
            return Ledger(
                offset=offset,
                fence=int(fields[1]),
                owner=fields[2],
                oldest_start_ms=int(fields[3]),
                stamp=stamp,
                settled=tuple(settled),
            )
        except ValueError as error:
            raise LedgerError(f"a damaged ledger: {text[:60]!r}") from error


def _base36(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits
