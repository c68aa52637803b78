"""A generation whose worker dies goes on in another one, over both pairs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet import Fleet, empty, process
from tiny_gguf import write_tiny_gguf

from arriero.producer.follow import Ended, Item, Reset, Tokens, follow
from arriero.schemas.event import Completed, Progressed, Started, Terminal
from arriero.schemas.job import Job, Sampling
from arriero.schemas.token import FinishReason, Token
from arriero.transports.bus import AppendRequest, OpenRequest, Position
from arriero.workers.engine.echo import EchoBackend, pack
from arriero.workers.worker import WorkerSettings

LONG = "all work and no play makes Jack a dull boy " * 10
SLOW = 0.02


class Watcher:
    """A reader that never stops, and notes what it is shown."""

    def __init__(self, fleet: Fleet, job_id: str) -> None:
        self.fleet = fleet
        self.job_id = job_id
        self.shown: list[Token] = []
        self.resets: list[int] = []
        self.end: Ended | None = None
        self._news = asyncio.Condition()

    async def run(self) -> None:
        async def fetch(terminal: str) -> Terminal | None:
            return await self.fleet.wait_end(self.job_id)

        async with aclosing(follow(self.fleet.bus, self.job_id, Position(), fetch)) as items:
            async for item in items:
                async with self._news:
                    self._take(item)
                    self._news.notify_all()

    def _take(self, item: Item) -> None:
        match item:
            case Tokens():
                assert item.first == len(self.shown), "an index was shown twice, or left out"
                self.shown += item.tokens
            case Reset():
                self.resets.append(item.count)
                del self.shown[item.count :]
            case Ended():
                self.end = item

    async def until(self, count: int) -> None:
        async with asyncio.timeout(40), self._news:
            await self._news.wait_for(lambda: len(self.shown) >= count)

    async def ended(self) -> Ended:
        async with asyncio.timeout(40), self._news:
            await self._news.wait_for(lambda: self.end is not None)
        assert self.end is not None
        return self.end


@asynccontextmanager
async def watching(fleet: Fleet, job_id: str) -> AsyncIterator[Watcher]:
    watcher = Watcher(fleet, job_id)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def started_by(fleet: Fleet, worker: str) -> Started:
    await fleet.until(lambda: any(isinstance(event, Started) and event.worker == worker for event in fleet.events))
    return next(event for event in fleet.events if isinstance(event, Started) and event.worker == worker)


async def test_a_reader_sees_one_text_although_two_workers_have_written_it(fleet: Fleet) -> None:
    async with fleet.projecting(), watching(fleet, "a") as watcher:
        await fleet.submit(Job(id="a", prompt=LONG))
        async with process(fleet, "w1", step_s=SLOW):
            await watcher.until(5)
            await started_by(fleet, "w1")
        shown = len(watcher.shown)
        async with fleet.running(fleet.make_worker("w2")):
            await watcher.ended()
            end = await fleet.wait_end("a")
    assert isinstance(end, Completed)
    assert "".join(token.piece for token in watcher.shown) == end.output.text == LONG
    assert watcher.resets == []
    assert (await started_by(fleet, "w2")).from_token >= shown
    assert end.output.lineage.count("@") == 2


async def test_with_the_bus_lost_too_it_goes_on_from_the_last_checkpoint(fleet: Fleet) -> None:
    async with fleet.projecting(), watching(fleet, "a") as watcher:
        await fleet.submit(Job(id="a", prompt=LONG))
        worker = fleet.make_worker("w1", step_s=SLOW, settings=WorkerSettings(checkpoint_s=0.2))
        async with worker:
            task = asyncio.create_task(worker.run())
            await fleet.wait_events("a", Progressed)
            await worker.drain(0.0)
            await task
        recorded = sum(len(event.tokens) for event in fleet.of("a") if isinstance(event, Progressed))
        await empty(fleet.bus, fleet.names)
        async with fleet.running(fleet.make_worker("w2")):
            await watcher.ended()
            end = await fleet.wait_end("a")
    assert isinstance(end, Completed)
    assert "".join(token.piece for token in watcher.shown) == end.output.text == LONG
    assert (await started_by(fleet, "w2")).from_token == recorded > 0
    assert watcher.resets == []


async def test_after_a_kill_and_a_lost_bus_readers_are_reset_to_the_last_checkpoint(fleet: Fleet) -> None:
    async with watching(fleet, "a") as watcher:
        await fleet.submit(Job(id="a", prompt=LONG * 3))
        async with process(fleet, "w1", step_s=SLOW):
            await fleet.wait_events("a", Progressed)  # five seconds of tokens
            recorded = sum(len(event.tokens) for event in fleet.of("a") if isinstance(event, Progressed))
            await watcher.until(recorded + 3)
        await empty(fleet.bus, fleet.names)
        async with fleet.projecting(), fleet.running(fleet.make_worker("w2")):
            await watcher.ended()
            end = await fleet.wait_end("a")
    assert isinstance(end, Completed)
    assert "".join(token.piece for token in watcher.shown) == end.output.text == LONG * 3
    assert (await started_by(fleet, "w2")).from_token >= recorded > 0
    assert all(count >= recorded for count in watcher.resets)


async def left_by_another(
    fleet: Fleet, job: Job, tokens: list[Token], *, seal: str = "", digests: str = EchoBackend().info.digest
) -> None:
    """The stream of an owner that has died without recording anything."""
    (placed,) = await fleet.submit(job)
    stream: dict[str, Any] = {
        "job_id": job.id,
        "root": f"{placed.topic}/{placed.partition}/{placed.offset}",
        "attempt": 1,
        "fence": 1,
        "epoch": "1.1",
    }
    await fleet.bus.open([OpenRequest(**stream, mode="start", lineage="1.1@0", digests=digests)])
    await fleet.bus.append(
        [AppendRequest(**stream, first=0, tokens=[token.on_bus() for token in tokens], seal=seal)],
    )


def echo(*pieces: str) -> list[Token]:
    return [Token(pack(piece.encode()), piece) for piece in pieces]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_a_generation_that_was_complete_is_recorded_without_decoding(fleet: Fleet, reason: FinishReason) -> None:
    await left_by_another(fleet, Job(id="a", prompt="abcdef"), echo("abc"), seal=f"1|{reason}")
    async with fleet.projecting(), fleet.running(fleet.make_worker()):
        end = await fleet.wait_end("a")
        view = await fleet.wait_view("a", lambda view: view.status == "fin")
    assert isinstance(end, Completed)
    assert (end.output.text, end.finish_reason) == ("abc", reason)
    assert Started not in {type(event) for event in fleet.of("a")}
    assert view.tokens == [token.on_bus() for token in echo("abc")]


async def test_text_held_back_when_the_worker_died_is_not_lost(fleet: Fleet) -> None:
    job = Job(id="a", prompt="abcdef", stop=["cdX"])
    await left_by_another(fleet, job, [Token(pack(b"abc"), "ab")])
    async with fleet.running(fleet.make_worker()):
        end = await fleet.wait_end("a")
    assert end.output.text == "abcdef"
    assert [token.piece for token in end.output.tokens] == ["ab", "cdef"]


@pytest.mark.parametrize(
    ("tokens", "digests"),
    [
        pytest.param(echo("xyz"), "another", id="of another model"),
        pytest.param([Token(pack(b"abc"), "edited")], "echo", id="whose text was edited"),
        pytest.param([Token(1 << 40, "abc")], "echo", id="beyond the vocabulary"),
        pytest.param([Token(0, "abc")], "echo", id="that ends nowhere"),
    ],
)
async def test_tokens_that_cannot_be_gone_on_with_are_decoded_anew(
    fleet: Fleet, tokens: list[Token], digests: str
) -> None:
    await left_by_another(fleet, Job(id="a", prompt="abcdef"), tokens, digests=digests)
    async with fleet.projecting(), watching(fleet, "a") as watcher:
        await watcher.until(1)
        async with fleet.running(fleet.make_worker()):
            end = await fleet.wait_end("a")
            await watcher.ended()
    assert isinstance(end, Completed)
    assert end.output.tokens == watcher.shown == echo("abc", "def")
    assert watcher.resets == [0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, repeat_penalty=1.3, frequency_penalty=0.5, penalty_last_n=256),
        Sampling(temperature=1.2, top_k=40, top_p=0.95, seed=11),
    ],
    ids=["greedy", "penalties", "seeded"],
)
@pytest.mark.parametrize("pair", ["embedded"], indirect=True)
@pytest.mark.model
async def test_five_kills_do_not_change_a_text(fleet: Fleet, tmp_path: Path, sampling: Sampling) -> None:
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    job = Job(id="killed", prompt="once upon a time", sampling=sampling, max_tokens=150, stop=["\x00\x01"])
    async with watching(fleet, "killed") as watcher, fleet.projecting():
        await fleet.submit(job)
        for kill in range(5):
            async with process(fleet, f"w{kill}", step_s=0.01, model=model):
                await watcher.until((kill + 1) * 20)
        async with process(fleet, "w5", step_s=0.0, model=model):
            killed = await fleet.wait_end("killed")
            await watcher.ended()
            await fleet.submit(msgspec.structs.replace(job, id="whole"))
            whole = await fleet.wait_end("whole")
    assert isinstance(killed, Completed)
    assert killed.output.lineage.count("@") == 6
    assert killed.output.tokens == whole.output.tokens == watcher.shown
    assert killed.output.text == whole.output.text
    assert watcher.resets == []
