"""Which text is whose. Pure.

A stream's lineage `epoch@from,epoch@from...` says which epoch decoded its tokens from which index on; an epoch
`<attempt>.<fence>` is one ownership. Two texts of one root agree exactly as far as their lineages do, so nobody
has to compare tokens. The same arithmetic stands in `redis/bus.lua`; a test holds the two together.
"""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """One epoch's tokens: from this index to the next segment's."""

    epoch: str
    start: int


def parse(lineage: str) -> list[Segment]:
    """Raises ValueError for what is no lineage."""
    segments: list[Segment] = []
    for part in lineage.split(",") if lineage else ():
        epoch, _, start = part.partition("@")
        segments.append(Segment(epoch, int(start)))
    return segments


def dump(segments: list[Segment]) -> str:
    return ",".join(f"{epoch}@{start}" for epoch, start in segments)


def extended(lineage: str, epoch: str, start: int) -> str:
    """The lineage of a text whose tokens from `start` on are decoded by `epoch`; what it said beyond is dropped."""
    return dump([segment for segment in parse(lineage) if segment.start < start] + [Segment(epoch, start)])


def epoch_of(attempt: int, fence: int) -> str:
    return f"{attempt}.{fence}"


def order(epoch: str) -> tuple[int, int]:
    """Epochs of one root compare by attempt, then by fence."""
    attempt, _, fence = epoch.partition(".")
    return int(attempt), int(fence)


def last_epoch(lineage: str) -> str:
    return lineage.rpartition(",")[2].partition("@")[0]


def epoch_at(lineage: str, index: int) -> str:
    """Who decoded the token at `index`; empty for none."""
    epoch = ""
    for segment in parse(lineage):
        if segment.start <= index:
            epoch = segment.epoch
    return epoch


def kept(lineage: str, root: str, shown_root: str, shown_epoch: str, shown: int) -> int:
    """How many of the `shown` tokens of a reader, the last of which `shown_epoch` decoded, are on this lineage."""
    if shown == 0 or root != shown_root:
        return 0
    segments = parse(lineage)
    for position, segment in enumerate(segments):
        if segment.epoch == shown_epoch:
            return min([shown, *(later.start for later in segments[position + 1 :])])
    return 0


def common(one: str, one_count: int, other: str, other_count: int) -> int:
    """Length of the prefix that two texts of one root share."""
    a, b = parse(one), parse(other)
    limit = min(one_count, other_count)
    at, i, j = 0, 0, 0
    while at < limit:
        while i + 1 < len(a) and a[i + 1].start <= at:
            i += 1
        while j + 1 < len(b) and b[j + 1].start <= at:
            j += 1
        if i >= len(a) or j >= len(b) or a[i].epoch != b[j].epoch:
            return at
        at = min(
            a[i + 1].start if i + 1 < len(a) else limit,
            b[j + 1].start if j + 1 < len(b) else limit,
            limit,
        )
    return limit
