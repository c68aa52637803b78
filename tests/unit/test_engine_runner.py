"""The engine thread, on the echo backend and on backends that misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from engine_listener import Listener

from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import BadJob, EngineError, ModelError
from arriero.schemas.job import Job, Sampling
from arriero.schemas.token import Token
from arriero.workers.engine.echo import EchoBackend, pack
from arriero.workers.engine.runner import EngineRunner
from arriero.workers.engine.seam import Backend, StepOutcome, StepPlan, Work


@asynccontextmanager
async def running(backend: Callable[[], Backend]) -> AsyncIterator[tuple[EngineRunner, Listener]]:
    listener = Listener()
    async with EngineRunner(backend, listener, SystemClock(), prepare_threads=0) as runner:
        yield runner, listener


async def work(runner: EngineRunner, key: int, prompt: str, **changes: object) -> Work:
    tokens = await runner.prepare(Job(id=f"job-{key}", prompt=prompt))
    fields: dict[str, object] = {"sampling": Sampling(), "seed": 0, "max_tokens": 1000, **changes}
    return Work(key=key, prompt=tokens, **fields)  # type: ignore[arg-type]


async def test_a_sequence_is_generated_to_its_end() -> None:
    async with running(EchoBackend) as (runner, seen):
        runner.submit(await work(runner, 1, "¿Qué tal, señor? 🫏"))
        await seen.end_of(1)
    assert seen.text(1) == "¿Qué tal, señor? 🫏"
    assert seen.endings[1].finish_reason == "stop"
    assert seen.flags[1] == ["admitted", "first_token"]


async def test_reports_arrive_in_the_event_loop_one_a_step() -> None:
    async with running(EchoBackend) as (runner, seen):
        for key in (1, 2, 3):
            runner.submit(await work(runner, key, "one two three"))
        await seen.end_of(1, 2, 3)
    assert seen.threads == {threading.current_thread().name}
    assert max(len(report.updates) for report in seen.reports) >= 2
    assert all(len({update.key for update in report.updates}) == len(report.updates) for report in seen.reports)


async def test_max_tokens_ends_with_length_and_streams_the_last_token() -> None:
    async with running(EchoBackend) as (runner, seen):
        runner.submit(await work(runner, 1, "abcdefghi", max_tokens=2))
        await seen.end_of(1)
    assert seen.endings[1].finish_reason == "length"
    assert [token.piece for token in seen.tokens[1]] == ["abc", "def"]


async def test_a_character_cut_by_the_limit_shows_in_the_tail() -> None:
    async with running(lambda: EchoBackend(bytes_per_token=1)) as (runner, seen):
        runner.submit(await work(runner, 1, "é", max_tokens=1))
        await seen.end_of(1)
    assert (seen.tokens[1][0].piece, seen.endings[1].tail) == ("", "�")


async def test_a_stop_string_across_tokens_ends_with_stop() -> None:
    async with running(lambda: EchoBackend(bytes_per_token=1)) as (runner, seen):
        runner.submit(await work(runner, 1, "say END now", stop=["END"]))
        await seen.end_of(1)
    assert (seen.text(1), seen.endings[1].finish_reason, seen.endings[1].tail) == ("say ", "stop", "")
    assert len(seen.tokens[1]) == len("say END")


async def test_the_context_ends_a_sequence_with_length() -> None:
    async with running(lambda: EchoBackend(n_ctx=8, bytes_per_token=1)) as (runner, seen):
        runner.submit(await work(runner, 1, "abcde"))
        await seen.end_of(1)
    assert (seen.text(1), seen.endings[1].finish_reason) == ("abc", "length")


async def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    async with running(EchoBackend) as (runner, seen):
        resume = [Token(pack(b"abc"), "abc"), Token(pack(b"def"), "def")]
        runner.submit(await work(runner, 1, "abcdefghi", resume=resume))
        await seen.end_of(1)
    assert [token.piece for token in seen.tokens[1]] == ["ghi"]


async def test_resumed_text_that_was_held_back_still_meets_its_stop_string() -> None:
    async with running(lambda: EchoBackend(bytes_per_token=1)) as (runner, seen):
        resume = [Token(pack(b"x"), "x"), Token(pack(b"E"), "")]
        runner.submit(await work(runner, 1, "xENDy", resume=resume, stop=["END"]))
        await seen.end_of(1)
    assert [token.piece for token in seen.tokens[1]] == ["", ""]
    assert (seen.endings[1].finish_reason, seen.endings[1].tail) == ("stop", "")


async def test_a_resumed_sequence_that_was_complete_ends_without_a_step() -> None:
    async with running(EchoBackend) as (runner, seen):
        resume = [Token(pack(b"abc"), "abc")]
        runner.submit(await work(runner, 1, "abcdef", resume=resume, max_tokens=1))
        await seen.end_of(1)
    assert seen.endings[1].finish_reason == "length"
    assert seen.tokens[1] == []


class Gate(EchoBackend):
    """Steps only when the test says so."""

    def __init__(self, **options: int) -> None:
        super().__init__(bytes_per_token=1, **options)
        self.go = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.steps = 0
        self.plans: list[StepPlan] = []
        self.closed = False

    def step(self, plan: StepPlan) -> StepOutcome:
        self.entered.release()
        assert self.go.acquire(timeout=20)
        self.steps += 1
        self.plans.append(plan)
        return super().step(plan)

    def close(self) -> None:
        self.closed = True


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.acquire, True, 20)


async def test_cancel_takes_effect_within_one_step() -> None:
    gate = Gate()
    async with running(lambda: gate) as (runner, seen):
        runner.submit(await work(runner, 1, "abcdefgh"))
        await entered(gate)
        runner.cancel(1)
        gate.go.release()
        await seen.end_of(1)
        assert gate.steps == 1
    assert (seen.endings[1].kind, seen.endings[1].stage) == ("cancelled", "decode")
    assert len(seen.tokens[1]) == 1


async def test_a_prefill_can_be_cancelled_between_its_chunks() -> None:
    gate = Gate(n_batch=4)
    async with running(lambda: gate) as (runner, seen):
        runner.submit(await work(runner, 1, "a prompt of many chunks"))
        await entered(gate)
        runner.cancel(1)
        gate.go.release()
        await seen.end_of(1)
    assert (seen.endings[1].kind, seen.endings[1].stage) == ("cancelled", "prefill")


async def test_a_sequence_past_its_deadline_expires_with_the_text_so_far() -> None:
    gate = Gate()
    clock = ManualClock()
    listener = Listener()
    async with EngineRunner(lambda: gate, listener, clock, prepare_threads=0) as runner:
        runner.submit(await work(runner, 1, "abcdefgh", deadline=10.0))
        await entered(gate)
        gate.go.release()
        await entered(gate)
        clock.now = 11.0
        gate.go.release()
        await listener.end_of(1)
    assert (listener.endings[1].kind, listener.endings[1].stage) == ("expired", "decode")
    assert listener.text(1) == "ab"


class ManualClock:
    now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


async def test_urgent_work_preempts_and_the_preempted_goes_on_later() -> None:
    gate = Gate(slots=1)
    async with running(lambda: gate) as (runner, seen):
        runner.submit(await work(runner, 1, "batch", priority="batch"))
        await entered(gate)
        runner.submit(await work(runner, 2, "now", priority="interactive"))
        for _ in range(40):
            gate.go.release()
        await seen.end_of(1, 2)
    assert (seen.text(1), seen.text(2)) == ("batch", "now")
    assert seen.flags[1] == ["admitted", "first_token", "preempted", "admitted"]
    assert list(seen.endings) == [2, 1]


async def test_a_prompt_too_long_fails_without_retry() -> None:
    async with running(lambda: EchoBackend(n_ctx=8)) as (runner, seen):
        runner.submit(Work(key=1, prompt=[1] * 8, sampling=Sampling(), seed=0, max_tokens=5))
        await seen.end_of(1)
        with pytest.raises(BadJob) as caught:
            await runner.prepare(Job(id="long", prompt="x" * 100))
    assert (seen.endings[1].kind, seen.endings[1].code) == ("failed", "prompt_too_long")
    assert not seen.endings[1].retriable
    assert caught.value.code == "prompt_too_long"


class Faulty(EchoBackend):
    """Fails in ways that a prompt's first letter chooses."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(bytes_per_token=1)
        self.fault = fault

    def begin(self, slot: int, work: Work) -> None:
        if work.key == 13:
            raise EngineError("no sampler for this one")
        super().begin(slot, work)

    def step(self, plan: StepPlan) -> StepOutcome:
        if self.fault == "step":
            self.fault = ""
            raise EngineError("the pass failed")
        if self.fault == "bug":
            raise ZeroDivisionError("a bug")
        return super().step(plan)

    def piece(self, token: int) -> bytes:
        data = super().piece(token)
        if data == b"!":
            raise KeyError(token)
        return data


async def test_a_failed_step_fails_its_sequences_and_the_engine_goes_on() -> None:
    async with running(lambda: Faulty("step")) as (runner, seen):
        runner.submit(await work(runner, 1, "abc"))
        await seen.end_of(1)
        runner.submit(await work(runner, 2, "abc"))
        await seen.end_of(2)
    assert (seen.endings[1].kind, seen.endings[1].code, seen.endings[1].retriable) == ("failed", "engine_error", True)
    assert seen.text(2) == "abc"


async def test_one_sequence_that_fails_leaves_the_others_alone() -> None:
    async with running(Faulty) as (runner, seen):
        runner.submit(await work(runner, 1, "ab!"))
        runner.submit(await work(runner, 2, "abcd"))
        runner.submit(await work(runner, 13, "abcd"))
        await seen.end_of(1, 2, 13)
    assert (seen.endings[1].kind, seen.endings[13].kind) == ("failed", "failed")
    assert seen.text(1) == "ab"
    assert seen.text(2) == "abcd"


async def test_a_bug_in_the_backend_is_told_as_the_death_of_the_thread() -> None:
    async with running(lambda: Faulty("bug")) as (runner, _):
        runner.submit(await work(runner, 1, "abc"))
        async with asyncio.timeout(20):
            error = await runner.died
    assert isinstance(error, ZeroDivisionError)


class Full(EchoBackend):
    """A cache that takes one sequence at a time, whatever was reserved."""

    def step(self, plan: StepPlan) -> StepOutcome:
        return StepOutcome([], no_room=True) if len(plan.feeds) > 1 else super().step(plan)


async def test_a_cache_without_room_preempts_until_it_fits() -> None:
    async with running(Full) as (runner, seen):
        for key in (1, 2, 3):
            runner.submit(await work(runner, key, f"text {key}"))
        await seen.end_of(1, 2, 3)
    assert [seen.text(key) for key in (1, 2, 3)] == ["text 1", "text 2", "text 3"]
    assert any("preempted" in flags for flags in seen.flags.values())


async def test_a_model_that_does_not_load_is_a_model_error() -> None:
    def load() -> Backend:
        raise OSError("no such file")

    runner = EngineRunner(load, Listener(), SystemClock())
    with pytest.raises(ModelError, match="no such file"):
        await runner.start()


async def test_close_in_mid_generation_stops_the_thread_and_frees_the_model() -> None:
    gate = Gate()
    async with running(lambda: gate) as (runner, seen):
        runner.submit(await work(runner, 1, "abcdefgh"))
        await entered(gate)
        closing = asyncio.create_task(runner.close())
        await asyncio.sleep(0)  # it has asked the thread to stop
        gate.go.release()
        await closing
    assert gate.closed
    assert not any(thread.name == "engine" for thread in threading.enumerate())
    assert 1 not in seen.endings


async def test_preparing_runs_on_threads_of_its_own() -> None:
    names: list[str] = []

    class Slow(EchoBackend):
        def prepare(self, job: Job) -> list[int]:
            names.append(threading.current_thread().name)
            return super().prepare(job)

    async with EngineRunner(Slow, Listener(), SystemClock(), prepare_threads=2) as runner:
        assert await runner.prepare(Job(id="a", prompt="abc")) == [pack(b"abc")]
    assert names[0].startswith("prepare")


async def test_the_parts_of_a_step_add_up() -> None:
    async with running(lambda: EchoBackend(step_s=0.002)) as (runner, seen):
        runner.submit(await work(runner, 1, "abcdef"))
        await seen.end_of(1)
    timings = seen.reports[0].timings
    assert timings.decode_s == 0.002
    assert timings.rest_s > 0
    assert (timings.sequences, timings.prefill_tokens, timings.kv_used) == (1, 2, 2)
