"""What the token bus must do, in the plainest form: whose token lies at each index is written out, index by index."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from arriero.schemas.token import End, Frame, Look, Message
from arriero.transports.bus import (
    Appended,
    AppendRequest,
    Finished,
    FinishRequest,
    Opened,
    OpenRequest,
    Position,
    StateWrite,
    View,
)

Segments = list[tuple[str, int]]
What = Literal["stream", "tokens", "tail", "all"]
Forget = Callable[[str, What], Awaitable[None]]
"""Makes a bus forget a job's stream, its tokens alone, the last of them, or all it knows of it."""


def parse(lineage: str) -> Segments:
    pairs = [part.split("@") for part in lineage.split(",")] if lineage else []
    return [(epoch, int(start)) for epoch, start in pairs]


def text(segments: Segments) -> str:
    return ",".join(f"{epoch}@{start}" for epoch, start in segments)


def owners(segments: Segments, count: int) -> list[str]:
    """The epoch of each index."""
    found = [""] * count
    for epoch, start in segments:
        found[start:] = [epoch] * (count - start)
    return found


def shared(one: list[str], other: list[str]) -> int:
    """Length of the common prefix."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count] != "":
        count += 1
    return count


def order(epoch: str) -> tuple[int, ...]:
    return tuple(int(part) for part in epoch.split("."))


@dataclass
class Job:
    cancelled: bool = False
    crashes: int = 0
    terminal: str = ""
    offset: int = -1
    state: bytes | None = None


@dataclass
class Head:
    root: str
    owner: tuple[int, int]
    segments: Segments
    digests: str = ""
    seal: str = ""
    end: str | None = None
    count: int = 0


@dataclass
class BusModel:
    """One job's keys, and every message that was published."""

    job: Job = field(default_factory=Job)
    head: Head | None = None
    tokens: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def open(self, r: OpenRequest) -> Opened:
        answer = Opened(code="none", cancelled=self.job.cancelled, crashes=self.job.crashes)
        head = self.head
        if self.job.terminal or (head and head.end is not None):
            return _with(answer, code="finished")
        if head is None:
            if r.mode == "take":
                return answer
            self.head = Head(r.root, (r.attempt, r.fence), parse(r.lineage), r.digests)
            self.tokens = list(r.tokens)
            self.messages.append(Look())
            return _with(answer, code="fresh", lineage=r.lineage, digests=r.digests)
        if head.root != r.root:
            return _with(answer, code="foreign")
        if (r.attempt, r.fence) < head.owner:
            return _with(answer, code="fenced")
        if r.mode == "take" and len(self.tokens) < r.least:
            return answer
        head.owner = (r.attempt, r.fence)
        theirs, mine = owners(head.segments, len(self.tokens)), owners(parse(r.lineage), len(r.tokens))
        same = shared(theirs, mine)
        shown: list[str] = []
        if r.mode == "restart":
            self._become(head, [(r.epoch, 0)], [], r.digests)
        elif r.mode == "mine":
            if text(head.segments) != r.lineage or len(self.tokens) != len(r.tokens):
                self._become(head, parse(r.lineage), self.tokens[:same] + list(r.tokens[same:]), head.digests)
        elif r.mode == "start" and same == len(self.tokens) < len(r.tokens):
            self._become(head, parse(r.lineage), list(r.tokens), head.digests)
            shown = self.tokens
        else:
            shown = self.tokens
            segments = [segment for segment in head.segments if segment[1] <= len(self.tokens)]
            if not segments or segments[-1][0] != r.epoch:
                head.segments = [*segments, (r.epoch, len(self.tokens))]
                if head.seal and int(head.seal.split("|")[0]) != len(self.tokens):
                    head.seal = ""
                self.messages.append(Look())
        return _with(
            answer,
            code="have",
            lineage=text(head.segments),
            seal=head.seal,
            digests=head.digests,
            tokens=list(shown),
        )

    def _become(self, head: Head, segments: Segments, tokens: list[str], digests: str) -> None:
        head.segments, head.seal, head.digests, self.tokens = segments, "", digests, tokens
        self.messages.append(Look())

    def append(self, r: AppendRequest) -> Appended:
        cancelled, head = self.job.cancelled, self.head
        if head is None:
            return Appended(code="finished" if self.job.terminal else "gone", cancelled=cancelled)
        if head.end is not None:
            return Appended(code="finished", cancelled=cancelled, next=len(self.tokens))
        if head.root != r.root:
            return Appended(code="foreign", cancelled=cancelled)
        if (r.attempt, r.fence) < head.owner:
            return Appended(code="fenced", cancelled=cancelled)
        if (r.attempt, r.fence) > head.owner or head.segments[-1][0] != r.epoch:
            return Appended(code="reopen", cancelled=cancelled)
        if r.first == len(self.tokens):
            sealed = bool(head.seal) and int(head.seal.split("|")[0]) <= len(self.tokens)
            if r.tokens and not sealed:
                self.tokens = [*self.tokens, *r.tokens]
                self.messages.append(Frame(r.root, r.epoch, r.first, list(r.tokens)))
            if r.seal and int(r.seal.split("|")[0]) == len(self.tokens):
                head.seal = r.seal
        return Appended(code="ok", cancelled=cancelled, next=len(self.tokens))

    def finish(self, r: FinishRequest) -> Finished:
        head = self.head
        if head and head.end is not None:
            return Finished("done")
        same = 0
        if head and head.root == r.root:
            same = shared(owners(head.segments, len(self.tokens)), owners(parse(r.lineage), r.count))
        if r.base > same:
            return Finished("need", same)
        plain = head is not None and same == len(self.tokens) == r.base + len(r.tokens)
        self.tokens = self.tokens[:same] + list(r.tokens[same - r.base :])
        self.head = Head(r.root, (0, 0), parse(r.lineage), end=r.end, count=r.count)
        self.messages.append(End(r.root, r.lineage, r.count, r.end) if plain else Look())
        return Finished("ok", same)

    def read(self, p: Position) -> View:
        head, terminal = self.head, self.job.terminal
        if head is None:
            return View(status="none", start=p.count, terminal=terminal)
        epochs = [epoch for epoch, _ in head.segments]
        unknown = p.count and head.end is None and p.root == head.root and p.epoch and p.epoch not in epochs
        if unknown and order(p.epoch) > order(epochs[-1]):
            return View(status="stale", start=p.count, terminal=terminal)
        start = 0
        if p.count and p.root == head.root and p.epoch in epochs:
            # Up to where the reader's last epoch ends, both have decoded the same.
            later = [begin for _, begin in head.segments[epochs.index(p.epoch) + 1 :]]
            start = min([p.count, *later])
        if head.end is not None:
            start = min(start, head.count)
        return View(
            status="open" if head.end is None else "fin",
            root=head.root,
            lineage=text(head.segments),
            start=start,
            end=head.end or "",
            terminal=terminal,
            tokens=self.tokens[start:],
        )

    def put_state(self, w: StateWrite) -> None:
        if w.offset > self.job.offset:
            self.job = replace(
                self.job,
                offset=w.offset,
                state=w.state,
                crashes=w.crashes,
                cancelled=self.job.cancelled or w.cancelled,
                terminal=w.terminal or self.job.terminal,
            )

    def note_queued(self, state: bytes) -> None:
        if self.job.state is None:
            self.job.state = state

    def cancel(self) -> None:
        self.job.cancelled = True

    def forget(self, what: What) -> None:
        if what in ("stream", "all"):
            self.head = None
        if what == "all":
            self.job = Job()
        self.tokens = self.tokens[:-1] if what == "tail" else []


def _with(answer: Opened, **changes: object) -> Opened:
    return Opened(**{name: getattr(answer, name) for name in answer.__struct_fields__} | changes)  # type: ignore[arg-type]
