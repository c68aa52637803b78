"""The bench against llama-server: its workloads, its bookkeeping and its table; no model, no server."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from arriero.ops.bench import peer
from arriero.ops.bench.against import Compared, Measured, measure, print_against
from arriero.ops.bench.sides import Seen, Trace, drive, request
from arriero.ops.bench.workloads import (
    GREEDY,
    SAMPLED,
    SYSTEM_TOKENS,
    WORKLOADS,
    Ask,
    Workload,
    named,
    prompts,
    texts,
)
from arriero.schemas.errors import SetupError
from arriero.workers.engine.seam import StepTimings

BOS = -1


def tokenise(text: str) -> list[int]:
    """A token a word, behind one that begins every text."""
    return [BOS, *(hash(word) % 1_000_000 for word in text.split())]


def made(name: str) -> tuple[Workload, list[list[int]]]:
    (workload,) = named(name)
    return workload, prompts(workload, [tokenise(text) for text in texts(workload)])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.name)
def test_every_prompt_has_the_length_that_its_job_asks_for(workload: Workload) -> None:
    _, ids = made(workload.name)
    assert [len(one) for one in ids] == [ask.prompt_tokens for ask in workload.asks]
    assert all(one[0] == BOS and BOS not in one[1:] for one in ids)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.name)
def test_every_slot_has_room_for_the_longest_job(workload: Workload) -> None:
    for slots in (1, 16):
        cells = workload.n_ctx(slots) / slots
        assert cells % 256 == 0
        assert all(ask.prompt_tokens + ask.max_tokens <= cells for ask in workload.asks)


def test_the_texts_of_a_workload_are_always_the_same_and_differ_from_their_beginning_on() -> None:
    (workload,) = named("a")
    assert texts(workload) == texts(workload)
    beginnings = {text[:60] for text in texts(workload)}
    assert len(beginnings) == len(workload.asks)


@pytest.mark.parametrize(("name", "jobs", "systems"), [("c", 32, 1), ("c2", 128, 4)])
def test_jobs_behind_a_system_prompt_share_it_and_nothing_more(name: str, jobs: int, systems: int) -> None:
    workload, ids = made(name)
    assert len(ids) == jobs
    heads = {ask.system: tuple(one[:SYSTEM_TOKENS]) for ask, one in zip(workload.asks, ids, strict=True)}
    assert len(heads) == len(set(heads.values())) == systems
    assert all(tuple(one[:SYSTEM_TOKENS]) == heads[ask.system] for ask, one in zip(workload.asks, ids, strict=True))
    assert len({tuple(one) for one in ids}) == jobs


def test_mixed_lengths_span_their_range_and_arrive_one_after_the_other() -> None:
    (workload,) = named("d")
    own, out = [ask.own_tokens for ask in workload.asks], [ask.max_tokens for ask in workload.asks]
    assert 16 <= min(own) < 32
    assert 512 < max(own) <= 1_024
    assert 8 <= min(out) < 16
    assert 128 < max(out) <= 256
    arrivals = [ask.at_s for ask in workload.asks]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0


def test_workloads_are_chosen_by_name() -> None:
    assert [workload.name for workload in named("c2, a")] == ["c2", "a"]
    with pytest.raises(SetupError, match="needs speculation"):
        named("f")
    with pytest.raises(SetupError, match="no workload z"):
        named("a,z")


def test_the_server_is_asked_for_the_same_sampling() -> None:
    greedy, sampled = (request(sampling, 3, [1, 2], 5) for sampling in (GREEDY, SAMPLED))
    assert (greedy["top_k"], greedy["temperature"]) == (1, 0.0)
    assert sampled["samplers"] == ["top_k", "top_p", "temperature"]
    assert (sampled["top_k"], sampled["top_p"], sampled["temperature"], sampled["min_p"]) == (40, 0.95, 0.8, 0.0)
    assert all(body["ignore_eos"] and body["prompt"] == [1, 2] and body["n_predict"] == 5 for body in (greedy, sampled))


# --- the run -----------------------------------------------------------------------------------------------


async def test_no_more_jobs_are_under_way_than_the_client_may_have() -> None:
    running, most = 0, 0

    async def generate(number: int, trace: Trace, prompt: list[int]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    asks = (Ask(own_tokens=1, max_tokens=1),) * 6
    await drive(Workload(name="x", about="", asks=asks, in_flight=2), [[1]] * 6, generate)
    assert most == 2


async def test_a_job_that_waits_for_running_streams_is_sent_when_they_run_and_ends_the_run() -> None:
    sent: list[int] = []

    async def generate(number: int, trace: Trace, prompt: list[int]) -> None:
        sent.append(number)
        if trace.ask.background:
            trace.note(8)
            await asyncio.Event().wait()
        trace.note(1)

    running = Ask(own_tokens=1, max_tokens=100, background=True)
    joining = Ask(own_tokens=1, max_tokens=1, after_streams=2)
    workload = Workload(name="x", about="", asks=(joining, running, running))
    async with asyncio.timeout(5):
        seen = await drive(workload, [[1]] * 3, generate)
    assert sent == [1, 2, 0]
    assert [trace.tokens for trace in seen.traces] == [1, 8, 8]


@pytest.mark.parametrize("background", [True, False])
async def test_a_job_that_fails_fails_the_run(background: bool) -> None:
    async def generate(number: int, trace: Trace, prompt: list[int]) -> None:
        if number == 0:
            raise SetupError("gone")

    asks = (Ask(own_tokens=1, max_tokens=1, background=background), Ask(own_tokens=1, max_tokens=1, after_streams=0))
    asks = (asks[0], msgspec.structs.replace(asks[1], after_streams=int(background)))
    with pytest.raises(SetupError, match="gone"):
        async with asyncio.timeout(5):
            await drive(Workload(name="x", about="", asks=asks), [[1]] * 2, generate)


# --- what is made of it ------------------------------------------------------------------------------------


def test_tokens_and_first_tokens_are_counted_from_sending() -> None:
    ask = Ask(own_tokens=1, max_tokens=3)
    traces = [Trace(ask, 10.0, [10.5, 10.6, 10.9], 3), Trace(ask, 10.0, [11.0, 11.1, 11.2], 3)]
    measured = measure(Seen(traces, 10.0, 12.0))
    assert (measured.tokens, measured.wall_s, measured.tokens_per_s) == (6, 2.0, 3.0)
    assert (measured.ttft_p50_s, measured.ttft_p95_s) == (1.0, 1.0)
    assert measured.gap_worst_s == pytest.approx(0.3)
    assert measured.steps is None


def test_gaps_are_those_of_the_disturbed_jobs_from_the_disturbance_on() -> None:
    running, joining = Ask(own_tokens=1, max_tokens=9, background=True), Ask(own_tokens=1, max_tokens=2)
    traces = [Trace(running, 0.0, [1.0, 6.0, 6.1, 7.1, 7.2], 5), Trace(joining, 6.5, [9.0, 12.0], 2)]
    measured = measure(Seen(traces, 0.0, 12.0))
    assert measured.gap_worst_s == pytest.approx(1.0)
    assert measured.gap_p50_s == pytest.approx(1.0)
    assert measured.ttft_p50_s == 2.5


def measured(tokens_per_s: float) -> Measured:
    steps = [StepTimings(decode_s=0.9, sample_s=0.06, rest_s=0.04)]
    seen = Seen([Trace(Ask(own_tokens=1, max_tokens=1), 0.0, [1.0], 1)], 0.0, 1.0, steps)
    return msgspec.structs.replace(measure(seen), tokens_per_s=tokens_per_s)


def test_ratios_are_of_pairs_and_the_table_shows_their_median_and_spread() -> None:
    compared = Compared(
        workload="a",
        about="a test's",
        ours=[measured(30.0), measured(80.0), measured(50.0)],
        theirs=[measured(10.0), measured(40.0), measured(50.0)],
        limit=[60.0, 80.0, 100.0],
    )
    assert compared.ratios("tokens_per_s") == [3.0, 2.0, 1.0]
    assert compared.of_limit == [0.5, 1.0, 0.5]
    console = Console(width=120, record=True, file=io.StringIO())
    print_against([compared], console)
    shown = console.export_text()
    assert "2.00 (1.00 to 3.00)" in shown
    assert "50.0 (30.0 to 80.0)" in shown
    assert "0.50 (0.50 to 1.00)" in shown
    assert "90.0% in llama_decode, 6.0% picking, 4.0% the rest" in shown


# --- the peer ----------------------------------------------------------------------------------------------


def test_a_peer_that_is_there_is_not_built(tmp_path: Path) -> None:
    told: list[str] = []
    place = tmp_path / f"llama.cpp-{peer.version(peer.PACKAGE)}"
    place.mkdir()
    (place / peer.SERVER).touch()
    assert peer.build(tmp_path, lambda what, done, total: told.append(what)) == place
    assert told == []


def test_without_a_compiler_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"C\+\+ compiler"):
        peer.build(tmp_path / "peer", lambda *what: None)
    assert [one.name for one in (tmp_path / "peer").iterdir()] == ["lock"]
