"""What the owner's side of streams says to the bus, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import BusUnavailable
from arriero.schemas.token import Token
from arriero.transports.bus import APPEND_MAX_TOKENS, Appended, AppendRequest, Opened, OpenRequest
from arriero.workers.metrics import WorkerMetrics
from arriero.workers.stream import Stream, Streams


class ScriptedBus:
    """Answers as told, in order; else as a bus that has nothing against it. Notes every call."""

    def __init__(self) -> None:
        self.opens: list[list[OpenRequest]] = []
        self.appends: list[list[AppendRequest]] = []
        self.open_answers: dict[str, list[Opened]] = {}
        self.append_answers: dict[str, list[Appended]] = {}
        self.away = False
        self.tried = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._news = asyncio.Condition()

    async def open(self, requests: Sequence[OpenRequest]) -> list[Opened]:
        await self._call(self.opens, requests)
        return [
            self.open_answers[request.job_id].pop(0)
            if self.open_answers.get(request.job_id)
            else Opened(code="fresh", lineage=request.lineage)
            for request in requests
        ]

    async def append(self, requests: Sequence[AppendRequest]) -> list[Appended]:
        await self._call(self.appends, requests)
        return [
            self.append_answers[request.job_id].pop(0)
            if self.append_answers.get(request.job_id)
            else Appended(code="ok", next=request.first + len(request.tokens))
            for request in requests
        ]

    async def _call(self, calls: list[Any], requests: Sequence[Any]) -> None:
        self.tried += 1
        async with self._news:
            if not self.away:
                calls.append(list(requests))
            self._news.notify_all()
        if self.away:
            raise BusUnavailable("unplugged")
        await self.gate.wait()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5), self._news:
            await self._news.wait_for(condition)

    def shown(self, job_id: str) -> list[str]:
        """All tokens appended to a job's stream."""
        return [
            token
            for requests in self.appends
            for request in requests
            if request.job_id == job_id
            for token in request.tokens
        ]


class Setup:
    def __init__(self, bus: ScriptedBus) -> None:
        self.bus = bus
        self.cancelled: list[int] = []
        self.saved: list[int] = []
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.streams = Streams(
            bus,  # type: ignore[arg-type]
            digests="m",
            clock=SystemClock(),
            rng=random.Random(1),
            metrics=WorkerMetrics(CollectorRegistry()),
            on_cancel=self.cancelled.append,
            save=self.save,
        )

    async def save(self, key: int) -> None:
        self.saved.append(key)
        await self.may_save.wait()

    def stream(self, key: int) -> Stream:
        return Stream.begin(key=key, job_id=f"j{key}", root=f"t/0/{key}", attempt=1, fence=9, tokens=[])

    async def opened(self, *keys: int) -> list[Stream]:
        streams = [self.stream(key) for key in keys]
        await self.streams.open(streams)
        return streams

    def decode(self, *streams: Stream, count: int = 1) -> None:
        for stream in streams:
            stream.tokens += [Token(len(stream.tokens) + i, "x") for i in range(count)]
            self.streams.feed(stream)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    setup = Setup(ScriptedBus())
    task = asyncio.create_task(setup.streams.run())
    yield setup
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), task.exception()


async def test_new_streams_are_opened_in_one_call(setup: Setup) -> None:
    streams = [setup.stream(key) for key in range(5)]
    answers = await setup.streams.open(streams)
    assert [answer.code for answer in answers if answer] == ["fresh"] * 5
    ((*requests,),) = setup.bus.opens
    assert {request.mode for request in requests} == {"start"}
    assert requests[0].epoch == "1.9"
    assert requests[0].lineage == "1.9@0"


async def test_all_tokens_of_a_step_go_out_in_one_call(setup: Setup) -> None:
    streams = await setup.opened(1, 2, 3)
    setup.decode(*streams, count=2)
    await setup.bus.until(lambda: setup.bus.appends)
    (requests,) = setup.bus.appends
    assert [(request.job_id, request.first, list(request.tokens)) for request in requests] == [
        (f"j{key}", 0, ["0|x", "1|x"]) for key in (1, 2, 3)
    ]


async def test_what_comes_during_a_call_goes_with_the_next_and_never_beside_it(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.bus.gate.clear()
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    for _ in range(10):
        setup.decode(stream)
        await asyncio.sleep(0)
    assert len(setup.bus.appends) == 1
    setup.bus.gate.set()
    await setup.bus.until(lambda: len(setup.bus.shown("j1")) == 11)
    assert [requests[0].first for requests in setup.bus.appends] == [0, 1]


async def test_many_tokens_go_in_bounded_calls(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.decode(stream, count=2 * APPEND_MAX_TOKENS + 1)
    await setup.bus.until(lambda: len(setup.bus.shown("j1")) == 2 * APPEND_MAX_TOKENS + 1)
    assert [len(requests[0].tokens) for requests in setup.bus.appends] == [APPEND_MAX_TOKENS, APPEND_MAX_TOKENS, 1]


async def test_the_seal_comes_with_the_last_tokens(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.decode(stream, count=APPEND_MAX_TOKENS + 1)
    setup.streams.close(stream, f"{APPEND_MAX_TOKENS + 1}|stop")
    await setup.bus.until(lambda: len(setup.bus.appends) == 2)
    assert [requests[0].seal for requests in setup.bus.appends] == ["", f"{APPEND_MAX_TOKENS + 1}|stop"]


async def test_a_seal_without_new_tokens_is_still_said(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    setup.streams.close(stream, "1|stop")
    await setup.bus.until(lambda: len(setup.bus.appends) == 2)
    (request,) = setup.bus.appends[1]
    assert (request.first, list(request.tokens), request.seal) == (1, [], "1|stop")


async def test_decoding_goes_on_after_another_owners_tokens(setup: Setup) -> None:
    tokens = ["7|a", "8|b"]
    setup.bus.open_answers["j1"] = [Opened(code="have", lineage="1.3@0,1.9@2", tokens=tokens, digests="m")]
    (stream,) = await setup.opened(1)
    assert stream.tokens == [Token(7, "a"), Token(8, "b")]
    assert stream.lineage == "1.3@0,1.9@2"
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    assert (setup.bus.appends[0][0].first, list(setup.bus.appends[0][0].tokens)) == (2, ["2|x"])


@pytest.mark.parametrize(("digests", "token"), [("another", "7|a"), ("m", "no token"), ("m", "x|a")])
async def test_tokens_of_another_model_or_damaged_ones_are_cut_away(setup: Setup, digests: str, token: str) -> None:
    setup.bus.open_answers["j1"] = [
        Opened(code="have", lineage="1.3@0,1.9@1", tokens=[token], digests=digests),
        Opened(code="have", lineage="1.9@0", digests="m"),
    ]
    (stream,) = await setup.opened(1)
    assert [requests[0].mode for requests in setup.bus.opens] == ["start", "restart"]
    assert (stream.tokens, stream.lineage) == ([], "1.9@0")
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    assert setup.bus.appends[0][0].first == 0


@pytest.mark.parametrize(("seal", "kept"), [("1|stop", "1|stop"), ("2|stop", "")])
async def test_a_seal_counts_only_with_all_its_tokens(setup: Setup, seal: str, kept: str) -> None:
    setup.bus.open_answers["j1"] = [Opened(code="have", lineage="1.3@0,1.9@1", tokens=["7|a"], digests="m", seal=seal)]
    (answer,) = await setup.streams.open([setup.stream(1)])
    assert answer is not None
    assert answer.seal == kept


async def test_what_the_bus_has_forgotten_is_opened_again_with_what_the_log_has(setup: Setup) -> None:
    setup.bus.open_answers["j1"] = [Opened(code="none")]
    stream = setup.stream(1)
    stream.taken, stream.least = True, 3
    (answer,) = await setup.streams.open([stream])
    assert answer is not None
    assert answer.code == "none"
    stream.go_on("1.3@0", [Token(7, "a")])
    await setup.streams.open([stream])
    take, start = (requests[0] for requests in setup.bus.opens)
    assert (take.mode, take.least, list(take.tokens)) == ("take", 3, [])
    assert (start.mode, start.least, list(start.tokens), start.lineage) == ("start", 0, ["7|a"], "1.3@0,1.9@1")
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    assert setup.bus.appends[0][0].first == 1


async def test_a_taken_stream_is_not_opened_empty_while_nobody_has_asked_the_log(setup: Setup) -> None:
    setup.bus.away = True
    stream = setup.stream(1)
    stream.taken = True
    assert await setup.streams.open([stream]) == [None]
    setup.bus.away = False
    (other,) = await setup.opened(2)
    setup.decode(other)
    await setup.bus.until(lambda: setup.bus.appends)
    assert all(request.job_id == "j2" for requests in setup.bus.opens for request in requests)
    stream.go_on("1.3@0", [Token(7, "a")])
    await setup.streams.open([stream])
    assert list(setup.bus.opens[-1][0].tokens) == ["7|a"]


async def test_what_may_have_been_begun_waits_for_a_bus_that_is_away_for_a_moment(setup: Setup) -> None:
    setup.bus.away = True
    setup.bus.open_answers["j1"] = [Opened(code="have", lineage="1.3@0,1.9@1", tokens=["7|a"], digests="m")]
    stream = setup.stream(1)
    stream.patient = True
    opening = asyncio.create_task(setup.streams.open([stream]))
    await setup.bus.until(lambda: setup.bus.tried >= 3)
    assert not opening.done()
    setup.bus.away = False
    (answer,) = await opening
    assert answer is not None
    assert (answer.code, stream.tokens) == ("have", [Token(7, "a")])


async def test_a_stream_that_begins_anew_resets_its_readers(setup: Setup) -> None:
    setup.bus.open_answers["j1"] = [Opened(code="have", lineage="1.3@0,1.9@1", tokens=["7|a"], digests="m")]
    (stream,) = await setup.opened(1)
    setup.streams.restart(stream)
    await setup.bus.until(lambda: len(setup.bus.opens) == 2)
    request = setup.bus.opens[1][0]
    assert (request.mode, request.lineage, list(request.tokens)) == ("mine", "1.9@0", [])


async def test_a_lost_reply_costs_nothing(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.bus.append_answers["j1"] = [Appended(code="ok", next=0), Appended(code="ok", next=2)]
    setup.decode(stream, count=2)
    await setup.bus.until(lambda: len(setup.bus.appends) == 2)
    setup.decode(stream)
    await setup.bus.until(lambda: len(setup.bus.appends) == 3)
    assert [requests[0].first for requests in setup.bus.appends] == [0, 0, 2]


async def test_a_cancel_in_any_answer_is_told(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.bus.append_answers["j1"] = [Appended(code="ok", next=1, cancelled=True)]
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    await asyncio.sleep(0)
    assert setup.cancelled == [1]


async def test_a_forgotten_stream_is_recorded_before_it_is_made_anew(setup: Setup) -> None:
    (stream, other) = await setup.opened(1, 2)
    setup.decode(stream, count=3)
    await setup.bus.until(lambda: setup.bus.appends)
    setup.may_save.clear()
    setup.bus.append_answers["j1"] = [Appended(code="gone")]
    setup.decode(stream)
    await setup.bus.until(lambda: len(setup.bus.appends) == 2)
    setup.decode(stream, other)
    await setup.bus.until(lambda: setup.bus.shown("j2"))  # others go on
    assert setup.saved == [1]
    assert len(setup.bus.opens) == 1
    setup.may_save.set()
    await setup.bus.until(lambda: len(setup.bus.opens) == 2)
    ((request,),) = setup.bus.opens[1:]
    assert (request.mode, len(request.tokens), request.lineage) == ("mine", 5, "1.9@0")
    setup.decode(stream)
    await setup.bus.until(lambda: any(one.first == 5 for requests in setup.bus.appends for one in requests))


async def test_after_a_new_fence_streams_are_opened_as_ours(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.decode(stream, count=2)
    await setup.bus.until(lambda: setup.bus.appends)
    setup.streams.adopt(stream, 11)
    await setup.bus.until(lambda: len(setup.bus.opens) == 2)
    ((request,),) = setup.bus.opens[1:]
    assert (request.mode, request.fence, request.epoch, len(request.tokens)) == ("mine", 11, "1.9", 2)


@pytest.mark.parametrize("code", ["foreign", "fenced", "finished"])
async def test_a_stream_that_is_not_ours_is_left_alone(setup: Setup, code: Any) -> None:
    (stream, other) = await setup.opened(1, 2)
    setup.bus.append_answers["j1"] = [Appended(code=code)]
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.appends)
    await asyncio.sleep(0)
    setup.decode(stream, other)
    await setup.bus.until(lambda: setup.bus.shown("j2"))
    assert setup.bus.shown("j1") == ["0|x"]


async def test_without_a_bus_tokens_wait_and_are_shown_when_it_is_back(setup: Setup) -> None:
    setup.bus.away = True
    stream = setup.stream(1)
    assert await setup.streams.open([stream]) == [None]
    setup.decode(stream, count=3)
    await setup.bus.until(lambda: setup.bus.tried >= 3)
    setup.bus.away = False
    await setup.bus.until(lambda: setup.bus.opens)
    ((request,),) = setup.bus.opens
    assert (request.mode, len(request.tokens)) == ("mine", 3)
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.shown("j1") == ["3|x"])


async def test_a_stream_that_was_open_goes_on_where_it_was_when_the_bus_is_back(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.decode(stream, count=2)
    await setup.bus.until(lambda: setup.bus.appends)
    setup.bus.away = True
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.tried >= 4)
    setup.bus.away = False
    await setup.bus.until(lambda: setup.bus.shown("j1") == ["0|x", "1|x", "2|x"])
    assert len(setup.bus.opens) == 1


async def test_streams_that_are_complete_are_left_to_the_projector_while_the_bus_is_away(setup: Setup) -> None:
    (stream,) = await setup.opened(1)
    setup.bus.away = True
    setup.decode(stream)
    await setup.bus.until(lambda: setup.bus.tried >= 3)
    setup.streams.close(stream, "1|stop")
    assert not setup.streams._streams
    assert not setup.streams._dirty


async def test_a_slow_bus_does_not_hold_a_new_job_up_for_long(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.workers.stream.OPEN_PATIENCE_S", 0.01)
    setup.bus.gate.clear()
    stream = setup.stream(1)
    assert await setup.streams.open([stream]) == [None]
    setup.decode(stream)
    setup.bus.gate.set()
    await setup.bus.until(lambda: len(setup.bus.opens) == 2)
    assert setup.bus.opens[1][0].mode == "mine"
