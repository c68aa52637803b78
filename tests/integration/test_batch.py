"""Offline generation over a file, over both pairs: each line answered once, whatever cuts the run off."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fleet import POOL, WAIT_S, Fleet, empty

from arriero.producer.batch import LOOK_S, Progress, Summary, run_batch
from arriero.producer.client import Client
from arriero.producer.lines import memory_path
from arriero.schemas.errors import SetupError
from arriero.schemas.event import Duplicate, Started, Terminal
from arriero.transports.bus import TokenBus

SLOW = 0.01


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(namespace=fleet.names.namespace, pool=POOL, log=fleet.log, bus=fleet.bus) as client:
        yield client


def line(number: int, **body: Any) -> str:
    if number % 2:
        body = {"prompt": f"line {number}"} | body
        return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})
    body = {"messages": [{"role": "user", "content": f"line {number}"}]} | body
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def write(folder: Path, count: int) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(line(number) + "\n" for number in range(1, count + 1)))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in path.read_text().splitlines()]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["response"]["body"]["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def assert_each_once(path: Path, numbers: range) -> None:
    answers = read(path)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"c{number}" for number in numbers)
    assert all(text_of(answer) == "line " + answer["custom_id"][1:] for answer in answers)


def assert_decoded_once(fleet: Fleet) -> None:
    assert max(Counter(event.id for event in fleet.events if isinstance(event, Started)).values()) == 1


def open_client(fleet: Fleet) -> Client:
    """One with connections of its own."""
    where = {name: getattr(fleet.endpoints, name) for name in ("data", "kafka", "redis")}
    return Client(namespace=fleet.names.namespace, pool=POOL, **where)


async def until_some_are_done(
    fleet: Fleet, client: Client, source: Path, target: Path, count: int, *, kill: bool, **options: Any
) -> Summary | None:
    """A run that is stopped, or killed, once so many lines are answered."""
    stop = asyncio.Event()

    def progress(now: Progress) -> None:
        if now.done >= count:
            stop.set()

    if not kill:
        return await run_batch(client, source, target, progress=progress, stop=stop, **options)
    async with open_client(fleet) as killed:  # a process takes its unsent records with it
        run = asyncio.create_task(run_batch(killed, source, target, progress=progress, **options))
        await stop.wait()
        run.cancel()
        await asyncio.wait([run])
    return None


async def test_two_thousand_lines_are_answered_once_each(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    source, target = write(tmp_path, 2_000), tmp_path / "out.jsonl"
    told: list[Progress] = []
    async with asyncio.timeout(2 * WAIT_S), fleet.projecting(), fleet.running(fleet.make_worker()):
        summary = await run_batch(client, source, target, window=500, progress=told.append)
    assert (summary.total, summary.done, summary.failed, summary.skipped) == (2_000, 2_000, 0, 0)
    assert not summary.stopped
    assert summary.tokens > 2_000
    assert told[-1].left == 0
    assert max(now.running for now in told) <= 500
    assert_each_once(target, range(1, 2_001))
    assert_decoded_once(fleet)
    assert summary.errors.read_bytes() == b""
    assert not memory_path(target).exists()
    first = read(target)[0]
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["model"] == "echo"
    assert first["error"] is None


async def test_bad_lines_go_to_their_own_file(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line(1),
        "{",
        "",
        line(4, temprature=1),
        line(5, prompt="x" * 900),  # longer than the context: only a worker can tell
        line(6, model="gpt-17"),
        json.dumps({"custom_id": "c7", "method": "POST", "url": "/v1/embeddings", "body": {}}),
        line(8),
    ]
    source.write_text("\n".join(lines))
    worker = fleet.make_worker(n_ctx_sequence=100)
    async with asyncio.timeout(WAIT_S), fleet.projecting(), fleet.running(worker):
        summary = await run_batch(client, source, target, errors=tmp_path / "wrong.jsonl")
        again = await run_batch(client, source, target, errors=tmp_path / "wrong.jsonl")
    assert (summary.total, summary.done, summary.failed) == (7, 2, 5)
    assert {answer["custom_id"] for answer in read(target)} == {"c1", "c8"}
    wrong = {one["line"]: (one["custom_id"], one["error"]["code"]) for one in read(tmp_path / "wrong.jsonl")}
    assert wrong == {
        2: (None, "malformed_json"),
        4: ("c4", "unknown_field"),
        5: ("c5", "prompt_too_long"),
        6: ("c6", "unknown_model"),
        7: ("c7", "bad_value"),
    }
    assert (again.skipped, again.done, again.failed) == (7, 0, 0)


async def run_for_a_look(client: Client, source: Path, target: Path) -> Summary:
    """A run that is stopped after all is published and nothing has come back."""
    stop = asyncio.Event()

    def progress(now: Progress) -> None:
        if now.elapsed_s >= LOOK_S:
            stop.set()

    return await run_batch(client, source, target, stop=stop, progress=progress)


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
async def test_a_run_cut_off_goes_on_where_it_was(fleet: Fleet, client: Client, tmp_path: Path, kill: bool) -> None:
    source, target = write(tmp_path, 600), tmp_path / "out.jsonl"
    async with asyncio.timeout(2 * WAIT_S), fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
        first = await until_some_are_done(fleet, client, source, target, 100, kill=kill, window=300)
        with target.open("ab") as file:
            file.write(b'{"id":"')  # torn off
        summary = await run_batch(client, source, target)
    if first is not None:
        assert first.stopped
        assert summary.skipped == first.done >= 100
    assert (summary.skipped + summary.done, summary.failed) == (600, 0)
    assert_each_once(target, range(1, 601))
    assert_decoded_once(fleet)


async def test_what_ended_in_between_is_taken_from_the_log_even_when_the_bus_has_forgotten(
    fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    source, target = write(tmp_path, 400), tmp_path / "out.jsonl"
    async with asyncio.timeout(2 * WAIT_S):
        async with fleet.projecting(), fleet.running(fleet.make_worker(step_s=SLOW)):
            await until_some_are_done(fleet, client, source, target, 50, kill=True, window=250)
            await fleet.until(lambda: sum(isinstance(event, Terminal) for event in fleet.events) >= 250)
        await empty(fleet.bus, fleet.names)
        async with fleet.running(fleet.make_worker("w2")):  # and no projector: nothing brings the states back
            summary = await run_batch(client, source, target)
    assert summary.skipped + summary.done == 400
    assert_each_once(target, range(1, 401))
    assert_decoded_once(fleet)


async def test_another_output_gets_the_recorded_results(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    source = write(tmp_path, 300)
    async with asyncio.timeout(2 * WAIT_S), fleet.projecting(), fleet.running(fleet.make_worker()):
        await run_batch(client, source, tmp_path / "one.jsonl")
        summary = await run_batch(client, source, tmp_path / "two.jsonl")
    assert (summary.skipped, summary.done) == (0, 300)
    assert_each_once(tmp_path / "two.jsonl", range(1, 301))
    assert_decoded_once(fleet)
    one, two = ({str(answer["id"]): answer for answer in read(tmp_path / name)} for name in ("one.jsonl", "two.jsonl"))
    assert one == two


class ForgetfulBus:
    """Says of each job at first that it does not know it."""

    def __init__(self, bus: TokenBus) -> None:
        self._bus = bus
        self._asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def states(self, job_ids: Sequence[str]) -> list[bytes | None]:
        known = [job_id in self._asked for job_id in job_ids]
        self._asked |= set(job_ids)
        return [state if asked else None for state, asked in zip(await self._bus.states(job_ids), known, strict=True)]


async def test_jobs_published_twice_are_found_by_their_duplicates(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    source = write(tmp_path, 60)
    async with asyncio.timeout(2 * WAIT_S), fleet.projecting(), fleet.running(fleet.make_worker()):
        await run_batch(client, source, tmp_path / "one.jsonl")
        client.bus = ForgetfulBus(fleet.bus)  # type: ignore[assignment]
        await run_batch(client, source, tmp_path / "two.jsonl")
    assert_each_once(tmp_path / "two.jsonl", range(1, 61))
    assert_decoded_once(fleet)
    assert sum(isinstance(event, Duplicate) for event in fleet.events) == 60


async def test_an_output_of_another_input_is_refused(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    source, target = write(tmp_path, 3), tmp_path / "out.jsonl"
    async with asyncio.timeout(WAIT_S), fleet.projecting(), fleet.running(fleet.make_worker()):
        await run_batch(client, source, target)
        write(tmp_path, 4)
        before = target.read_bytes()
        with pytest.raises(SetupError) as caught:
            await run_batch(client, source, target)
        assert caught.value.code == "output_foreign"
        assert target.read_bytes() == before
        summary = await run_batch(client, source, target, force=True)
    assert summary.done == 4
    assert_each_once(target, range(1, 5))


async def test_a_run_without_a_single_answer_still_knows_its_input_and_its_jobs(
    fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    source, target = write(tmp_path, 3), tmp_path / "out.jsonl"
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            summary = await run_for_a_look(client, source, target)
            assert (summary.stopped, summary.left) == (True, 3)
        job_topics = fleet.names.job_topics(POOL)
        assert sum((await fleet.log.ends(job_topics)).values()) == 3  # the log knew them; nobody else did
        write(tmp_path, 4)
        with pytest.raises(SetupError) as caught:
            await run_batch(client, source, target)
    assert caught.value.code == "output_foreign"


async def test_an_empty_input_is_done_at_once(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    summary = await run_batch(client, source, tmp_path / "out.jsonl")
    assert (summary.total, summary.done, summary.stopped) == (0, 0, False)
