"""The reader: whatever happens to messages and streams, each index is shown once and the end is the recorded one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from bus_model import BusModel

from arriero.producer.follow import Item, Reader, Reset, Tokens, format_position, parse_position
from arriero.schemas.codec import encode
from arriero.schemas.event import Completed, Origin, Output
from arriero.schemas.token import End, Frame, Look, StreamEnd, Token
from arriero.transports.bus import AppendRequest, FinishRequest, OpenRequest, Position, StateWrite, View

ORIGIN = Origin("t", 0, 1, 5)
ROOT = str(ORIGIN)


class Screen:
    """What a person sees."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.end: StreamEnd | None = None
        self.resets = 0

    def show(self, items: list[Item]) -> None:
        for item in items:
            assert self.end is None, "nothing comes after the end"
            if isinstance(item, Tokens):
                assert item.first == len(self.shown), "an index is missing or comes twice"
                self.shown += [token.on_bus() for token in item.tokens]
            elif isinstance(item, Reset):
                assert item.count < len(self.shown)
                del self.shown[item.count :]
                self.resets += 1
            else:
                self.end = item.end


def completed(lineage: str, tokens: list[str]) -> Completed:
    output = Output([Token.from_bus(token) for token in tokens], "!", lineage)
    base: dict[str, Any] = {"id": "j", "time_ms": 9, "attempt": 1, "worker": "w", "fence": 9, "root": ROOT}
    return Completed(**base, origin=ORIGIN, output=output, finish_reason="stop")


class Life:
    """A stream's life: owners that take over, lose the bus, and decode other tokens for the same indices."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bus = BusModel()
        self.fence = 0
        self.texts: set[tuple[str, ...]] = {()}
        """Every text that some owner has had."""
        self.lineage = ""
        self.tokens: list[str] = []

    def begin(self) -> None:
        """A new owner: goes on with what the bus has, or from nothing when it has forgotten."""
        self.fence += 1
        epoch = f"1.{self.fence}"
        request = OpenRequest(
            job_id="j",
            root=ROOT,
            attempt=1,
            fence=self.fence,
            epoch=epoch,
            mode=self.rng.choice(["start", "start", "restart"]),
            lineage=f"{epoch}@0",
        )
        answer = self.bus.open(request)
        assert answer.code in ("fresh", "have")
        self.epoch, self.lineage = epoch, answer.lineage
        self.tokens = list(answer.tokens) if request.mode == "start" else []
        self.texts.add(tuple(self.tokens))

    def decode(self) -> None:
        first = len(self.tokens)
        for _ in range(self.rng.randint(1, 3)):
            self.tokens.append(f"{len(self.tokens)}|{self.epoch} ")
            self.texts.add(tuple(self.tokens))
        self.bus.append(
            AppendRequest(
                job_id="j",
                root=ROOT,
                attempt=1,
                fence=self.fence,
                epoch=self.epoch,
                first=first,
                tokens=self.tokens[first:],
            )
        )

    def finish(self) -> Completed:
        event = completed(self.lineage, self.tokens)
        end = encode(StreamEnd("completed", len(self.tokens), "!", "stop")).decode()
        request = FinishRequest(
            job_id="j", root=ROOT, lineage=self.lineage, count=len(self.tokens), end=end, base=len(self.tokens)
        )
        answer = self.bus.finish(request)
        if answer.code == "need":
            tokens = self.tokens[answer.base :]
            self.bus.finish(
                FinishRequest(
                    job_id="j",
                    root=ROOT,
                    lineage=self.lineage,
                    count=len(self.tokens),
                    end=end,
                    base=answer.base,
                    tokens=tokens,
                )
            )
        self.bus.put_state(StateWrite(job_id="j", offset=0, state=b"s", terminal="0/0"))
        return event


@pytest.mark.parametrize("seed", range(400))
def test_a_reader_shows_a_text_that_was_and_ends_with_the_one_that_is(seed: int) -> None:
    rng = random.Random(seed)
    life, screen = Life(rng), Screen()
    reader = Reader()
    inbox: list[Frame | End | Look] = []
    heard = 0
    event: Completed | None = None

    def read() -> None:
        items = reader.take_view(life.bus.read(reader.position))
        if items is None and event is not None:
            items = reader.take_result(event)
        screen.show(items or [])

    life.begin()
    read()
    for _ in range(60):
        act = rng.random()
        if event is None:
            if act < 0.30:
                life.decode()
            elif act < 0.36:
                life.begin()
            elif act < 0.40:
                life.bus.head, life.bus.tokens = None, []
                life.begin()
            elif act < 0.42:
                event = life.finish()
        new = life.bus.messages[heard:]
        heard = len(life.bus.messages)
        inbox += [message for message in new if rng.random() > 0.1]  # some are lost
        if rng.random() < 0.1:
            rng.shuffle(inbox)
        while inbox and rng.random() < 0.6 and screen.end is None:
            items = reader.take_message(inbox.pop(0))
            if items is None:
                read()
            else:
                screen.show(items)
        assert tuple(screen.shown) in life.texts, "a mixture that nobody has decoded"
        if screen.end is not None:
            break
        if rng.random() < 0.05:  # the connection was lost, and with it what was not read
            inbox.clear()
            read()
        if screen.end is not None:
            break
    if event is None:
        event = life.finish()
    if screen.end is None:
        read()  # the silence
    assert screen.end is not None
    assert screen.shown == life.tokens
    assert (screen.end.count, screen.end.tail) == (len(life.tokens), "!")


def test_a_bare_index_shows_what_comes_behind_it_and_nothing_twice() -> None:
    reader, screen = Reader(Position(count=2)), Screen()
    screen.shown = ["0|a", "1|b"]
    view = View(status="open", root=ROOT, lineage="1.1@0", tokens=["0|a", "1|b", "2|c"])
    screen.show(reader.take_view(view) or [])
    screen.show(reader.take_message(Frame(ROOT, "1.1", 2, ["2|c", "3|d"])) or [])
    assert screen.shown == ["0|a", "1|b", "2|c", "3|d"]


def test_a_bare_index_beyond_the_stream_waits_for_it() -> None:
    reader = Reader(Position(count=3))
    assert reader.take_view(View(status="open", root=ROOT, lineage="1.1@0", tokens=["0|a"])) == []
    items = reader.take_message(Frame(ROOT, "1.1", 1, ["1|b", "2|c", "3|d"]))
    assert items == [Tokens(3, [Token(3, "d")])]


def test_tokens_that_were_lost_from_an_ended_stream_come_from_the_log() -> None:
    reader = Reader()
    end = encode(StreamEnd("completed", count=2)).decode()
    view = View(status="fin", root=ROOT, lineage="1.1@0", end=end, terminal="0/7", tokens=[])
    assert reader.take_view(view) is None
    assert reader.take_result(completed("1.1@0", ["0|a", "1|b"]))[0] == Tokens(0, [Token(0, "a"), Token(1, "b")])


def test_a_stale_copy_of_the_bus_changes_nothing() -> None:
    reader = Reader(Position(ROOT, "1.5", 4))
    assert reader.take_view(View(status="stale", start=4)) == []
    assert reader.take_message(Frame(ROOT, "1.4", 4, ["4|x"])) is None
    assert reader.position == Position(ROOT, "1.5", 4)


def test_positions_survive_the_way_through_http() -> None:
    position = Position("ns.jobs.default.standard/3/17", "1.1796122983887", 42)
    assert parse_position(format_position(position)) == position
    assert parse_position("7") == Position(count=7)


@pytest.mark.parametrize(
    "text", ["", "-1", "x", "a:b", "a:1:2", "a:1.x:2", ":1.2:3", "a:1.2:", "\u0661", "1e3", "a:1.2:-3"]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|not a position"):
        parse_position(text)
