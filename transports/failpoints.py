"""Named places between the steps of the protocols, at which a crash test may end this process.

Nothing happens at them unless `arm` has been called; only `ops/child.py` does, when its environment asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

POINTS: Final = (
    "take.fenced",
    "take.read",
    "take.rebuilt",
    "take.taken",
    "commit.begun",
    "commit.sent",
    "commit.acknowledged",
    "commit.offset",
    "commit.committed",
    "write.done",
    "write.committed",
    "committer.recorded",
    "intake.read",
    "intake.held",
    "intake.opened",
    "intake.submitted",
    "stream.appended",
    "projector.finished",
    "projector.projected",
)
"""`commit` and all but the last of `take` are the Kafka adapter's, `write` is the embedded files'."""

_left: dict[str, int] = {}
_strike: Callable[[str], None] | None = None


def arm(points: Mapping[str, int], strike: Callable[[str], None]) -> None:
    """Have `strike` called when one of these points is reached for the so-manieth time, counted from 1."""
    global _strike
    unknown = set(points) - set(POINTS)
    if unknown:
        raise ValueError(f"no such failpoints: {', '.join(sorted(unknown))}")
    _left.update(points)
    _strike = strike


def reach(point: str) -> None:
    if _strike is not None and point in _left:
        _left[point] -= 1
        if _left[point] <= 0:
            _strike(point)
