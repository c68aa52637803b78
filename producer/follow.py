"""The reader: from the token bus to each token index exactly once, then the recorded end.

`Reader` is the pure part: it is shown views and messages and says what to show. `follow` does the waiting. The rules
are those of docs/token-bus.md.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

import msgspec
import structlog

from arriero.schemas.codec import decode_end
from arriero.schemas.errors import BusUnavailable, JobNotFound
from arriero.schemas.event import Terminal
from arriero.schemas.state import stream_end
from arriero.schemas.token import End, Frame, Message, StreamEnd, Token
from arriero.transports import lineage as lineages
from arriero.transports.bus import Position, Subscription, TokenBus, View

SILENCE_S: Final = 3.0
"""After so long without a message the stream is read: a lost message, or a bus emptied unnoticed, costs no more."""
STALE_S: Final = 0.25
log = structlog.get_logger(__name__)

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
START: Final = Position()

_POSITION: Final = re.compile(r"(?:(.{1,400}):(\d{1,9}\.\d{1,15}):)?(\d{1,9})\Z", re.ASCII)
"""Strangers say positions: no number in one is larger than SQLite's integers and Lua's doubles can hold."""


class Tokens(msgspec.Struct, frozen=True):
    """New tokens; `first` is the index of the first of them."""

    first: int
    tokens: list[Token]


class Reset(msgspec.Struct, frozen=True):
    """What was shown from index `count` on is not the result: worker and bus were lost together. Go on from there."""

    count: int


class Ended(msgspec.Struct, frozen=True):
    """The end, recorded. Nothing follows."""

    end: StreamEnd


Item = Tokens | Reset | Ended
FetchTerminal = Callable[[str], Awaitable[Terminal | None]]
"""From `<partition>/<offset>` to the terminal event in the log; None when it is gone."""


def format_position(position: Position) -> str:
    """`root:epoch:count`, as it travels through HTTP."""
    return f"{position.root}:{position.epoch}:{position.count}"


def parse_position(text: str) -> Position:
    """From `root:epoch:count`, or a bare count. Raises ValueError."""
    found = _POSITION.match(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is neither a count of tokens nor a position root:epoch:count")
    root, epoch, count = found.groups(default="")
    return Position(root, epoch, int(count))


class Reader:
    """What one reader has shown, and what each view or message adds to it.

    A position without a root is a bare index: everything before it counts as shown, and a reset is noticed only
    from now on.
    """

    def __init__(self, position: Position = START) -> None:
        bare = not position.root
        self._root = position.root
        self._epoch = position.epoch
        self._count = 0 if bare else position.count
        self._hidden = position.count if bare else 0
        """Indices below it are not shown: the caller has them."""
        self._lineage = ""
        self._known = False
        """Whether the stream's lineage is known to be the last read one, so that a frame can be judged."""

    @property
    def position(self) -> Position:
        return Position(self._root, self._epoch, self._count)

    def take_message(self, message: Message) -> list[Item] | None:
        """What a message adds; None when only reading the stream can tell."""
        if not self._known:
            return None
        if isinstance(message, Frame):
            fits = message.root == self._root and message.epoch == lineages.last_epoch(self._lineage)
            if not fits or message.first > self._count:
                return None
            tokens = _tokens(message.tokens[self._count - message.first :])
            return None if tokens is None else self._show(tokens)
        if isinstance(message, End):
            if (message.root, message.lineage, message.count) != (self._root, self._lineage, self._count):
                return None
            return [Ended(decode_end(message.end))]
        return None

    def take_view(self, view: View) -> list[Item] | None:
        """What a view of the stream adds; None when the recorded output must be taken from the log."""
        if view.status in ("none", "stale"):
            self._known = False
            return None if view.status == "none" and view.terminal else []
        end = decode_end(view.end) if view.status == "fin" else None
        if end is None and view.terminal:
            return None  # it has ended, and this stream is another run's, or a torso
        if end is not None and view.start + len(view.tokens) < end.count:
            return None  # its tokens were lost
        tokens = _tokens(view.tokens)
        if tokens is None:
            self._known = False
            return None if view.terminal else []
        items = self._cut(view.start)
        self._root, self._lineage, self._known = view.root, view.lineage, True
        items += self._show(tokens)
        return items if end is None else [*items, Ended(end)]

    def take_result(self, event: Terminal) -> list[Item]:
        """The recorded output, by the same rule."""
        output = event.output
        kept = lineages.kept(output.lineage, event.root, self._root, self._epoch, self._count)
        items = self._cut(min(kept, output.count))
        self._root, self._lineage = event.root, output.lineage
        return [*items, *self._show(output.tokens[self._count :]), Ended(stream_end(event))]

    def _cut(self, count: int) -> list[Item]:
        if count >= self._count:
            return []
        self._count = count
        self._hidden = min(self._hidden, count)
        return [Reset(count)]

    def _show(self, tokens: Sequence[Token]) -> list[Item]:
        first = self._count
        self._count += len(tokens)
        if self._count:
            self._epoch = lineages.epoch_at(self._lineage, self._count - 1)
        shown = tokens[max(0, self._hidden - first) :]
        return [Tokens(self._count - len(shown), list(shown))] if shown else []


def _tokens(elements: Sequence[str]) -> list[Token] | None:
    """None where somebody has written into the stream: the result is waited for."""
    try:
        return [Token.from_bus(element) for element in elements]
    except ValueError:
        log.warning("stream_damaged", count=len(elements))
        return None


async def follow(
    bus: TokenBus,
    job_id: str,
    position: Position,
    fetch_terminal: FetchTerminal,
    *,
    moved: Callable[[Position], None] = lambda position: None,
) -> AsyncGenerator[Item, None]:
    """A stream from `position` on, until its end. `moved` is told each new position before its item is given.

    1. Subscribe, and wait for the confirmation. 2. Read from the position. 3. Take messages that fit; read when one
    does not, or after a silence. 4. A lost connection: from 1, with growing pauses. A bus that stays away is waited
    for: bound it with a timeout.
    """
    reader = Reader(position)
    pause_s = BACKOFF_FIRST_S
    while True:
        try:
            async with bus.follow(job_id) as subscription:  # 1
                items: list[Item] | None = None
                while True:
                    if items is None:  # 2
                        items = await _read(bus, job_id, reader, fetch_terminal)
                    pause_s = BACKOFF_FIRST_S
                    moved(reader.position)
                    for item in items:
                        yield item
                        if isinstance(item, Ended):
                            return
                    items = await _next(subscription, reader)  # 3
        except BusUnavailable:  # 4
            await asyncio.sleep(pause_s)
            pause_s = min(BACKOFF_MAX_S, pause_s * 2)


async def _read(bus: TokenBus, job_id: str, reader: Reader, fetch_terminal: FetchTerminal) -> list[Item]:
    while True:
        view = await bus.read(job_id, reader.position)
        items = reader.take_view(view)
        if items is None:
            if not view.terminal:
                return []  # the projector writes it next; the silence brings us back
            event = await fetch_terminal(view.terminal)
            if event is None:
                raise JobNotFound(f"job {job_id} has ended and its result has expired")
            return reader.take_result(event)
        if view.status != "stale":
            return items
        await asyncio.sleep(STALE_S)


async def _next(subscription: Subscription, reader: Reader) -> list[Item] | None:
    try:
        async with asyncio.timeout(SILENCE_S):
            return reader.take_message(await subscription.message())
    except TimeoutError:
        return None
