"""The two sides of `arriero bench engine --against llama-server`: one run of a workload on each.

Ours runs in this process as in a worker, without brokers; the server is a child process, reached as its clients do,
streaming over HTTP. Neither stops at an end token, so both do the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from arriero.ops.bench import workloads
from arriero.ops.bench.peer import Shape
from arriero.ops.bench.workloads import STARTED_TOKENS, Ask, Workload
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import EngineError, SetupError
from arriero.schemas.job import Job, Sampling
from arriero.workers.engine.llama.backend import LlamaBackend
from arriero.workers.engine.llama.model import LlamaSettings
from arriero.workers.engine.runner import EngineRunner
from arriero.workers.engine.seam import StepReport, StepTimings, Work

WARM_UP: Final = Ask(own_tokens=16, max_tokens=4)
WARM_UP_KEY: Final = 1 << 20
"""Warm-up jobs are numbered from here."""
TOKENISER_CTX: Final = 16_384
"""Cells of the engine that only tokenises: its longest text must fit them."""
POLL_S: Final = 0.01
_now: Final = SystemClock().monotonic


class Trace(msgspec.Struct):
    """What the reader of one job saw."""

    ask: Ask
    sent: float = 0.0
    times: list[float] = []
    """When tokens came; several that came together count once."""
    tokens: int = 0

    def note(self, tokens: int) -> None:
        self.times.append(_now())
        self.tokens += tokens


class Seen(msgspec.Struct, frozen=True):
    """One run of one side."""

    traces: list[Trace]
    began: float
    ended: float
    """When the last job that counts was over."""
    steps: list[StepTimings] = []
    """Ours only."""


Generate = Callable[[int, Trace, list[int]], Awaitable[None]]
"""Runs the job of this number to its end and notes what comes."""


# --- a run -------------------------------------------------------------------------------------------------


async def drive(workload: Workload, prompts: list[list[int]], generate: Generate) -> Seen:
    """Send every job when it is due, until all that count have ended; returns what was seen."""
    traces = [Trace(ask) for ask in workload.asks]
    free = asyncio.Semaphore(workload.in_flight or len(traces))
    tasks: list[asyncio.Task[None]] = []

    def running() -> int:
        pairs = zip(traces, tasks, strict=True)
        return sum(one.ask.background and (one.tokens >= STARTED_TOKENS or task.done()) for one, task in pairs)

    async def send(number: int, trace: Trace) -> None:
        while running() < trace.ask.after_streams:  # noqa: ASYNC110 - one look in 10 ms costs nothing
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(trace.ask.at_s)
        async with free:
            trace.sent = _now()
            await generate(number, trace, prompts[number])

    began = _now()
    tasks += [asyncio.create_task(send(*one), name=f"bench {one[0]}") for one in enumerate(traces)]
    try:
        await asyncio.gather(*(task for task, trace in zip(tasks, traces, strict=True) if not trace.ask.background))
        ended = _now()
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return Seen(traces, began, ended)


async def _warm_up(slots: int, generate: Generate) -> None:
    """A few tokens in every slot: pages touched, threads started; the prompts begin like no other."""
    prompts = [[1_000 + slot, *range(2_000, 1_999 + WARM_UP.own_tokens)] for slot in range(slots)]
    await asyncio.gather(*(generate(WARM_UP_KEY + slot, Trace(WARM_UP), one) for slot, one in enumerate(prompts)))


# --- ours --------------------------------------------------------------------------------------------------


class _Endless(LlamaBackend):
    """As llama-server's `ignore_eos`: a job ends at its longest output only."""

    def is_end(self, token: int) -> bool:
        return False


class _Listener:
    """Hands what the engine says to the jobs' traces."""

    def __init__(self) -> None:
        self.steps: list[StepTimings] = []
        self._jobs: dict[int, tuple[Trace, asyncio.Future[None]]] = {}

    def listen(self, key: int, trace: Trace) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._jobs[key] = trace, done
        return done

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report.timings)
        for update in report.updates:
            trace, done = self._jobs[update.key]
            if update.tokens:
                trace.note(len(update.tokens))
            if update.ending is not None and not done.done():
                if update.ending.kind == "finished":
                    done.set_result(None)
                else:
                    done.set_exception(EngineError(f"a job of the bench ended: {update.ending}"))

    def fail(self, died: asyncio.Future[BaseException]) -> None:
        for _, done in self._jobs.values():
            if not done.done() and not died.cancelled():
                done.set_exception(died.result())


@asynccontextmanager
async def _engine(shape: Shape, listener: _Listener) -> AsyncIterator[EngineRunner]:
    settings = LlamaSettings(
        path=shape.model, name="bench", slots=shape.slots, n_ctx=shape.n_ctx, threads=shape.threads
    )
    clock = SystemClock()
    async with EngineRunner(lambda: _Endless(settings, clock), listener.on_step, clock) as runner:
        runner.died.add_done_callback(listener.fail)
        yield runner


async def run_ours(shape: Shape, workload: Workload, prompts: list[list[int]]) -> Seen:
    listener = _Listener()
    async with _engine(shape, listener) as runner:

        async def generate(number: int, trace: Trace, prompt: list[int]) -> None:
            done = listener.listen(number, trace)
            runner.submit(
                Work(
                    key=number,
                    prompt=prompt,
                    sampling=workload.sampling,
                    seed=number,
                    max_tokens=trace.ask.max_tokens,
                    priority=trace.ask.priority,
                    arrived=_now(),
                )
            )
            await done
            if trace.tokens != trace.ask.max_tokens:
                raise EngineError(f"the engine ended a job after {trace.tokens} tokens")

        await _warm_up(shape.slots, generate)
        listener.steps.clear()
        seen = await drive(workload, prompts, generate)
        return msgspec.structs.replace(seen, steps=listener.steps)


async def make_prompts(model: Path, workload: Workload) -> list[list[int]]:
    """Made by the model's own tokeniser, once for all runs."""
    jobs = [(Job(id=f"prompt-{number}", prompt=text), "") for number, text in enumerate(workloads.texts(workload))]
    async with _engine(Shape(model=model, slots=1, n_ctx=TOKENISER_CTX, threads=1), _Listener()) as runner:
        tokenised: list[list[int]] = []
        for prepared in await runner.prepare_all(jobs):
            if isinstance(prepared, Exception):
                raise prepared
            tokenised.append(prepared)
    return workloads.prompts(workload, tokenised)


# --- llama-server ------------------------------------------------------------------------------------------


class _Event(msgspec.Struct):
    """What counts in an event of the server's stream."""

    tokens: list[int] = []
    stop: bool = False
    tokens_predicted: int = 0


async def run_theirs(url: str, shape: Shape, workload: Workload, prompts: list[list[int]]) -> Seen:
    decode = msgspec.json.Decoder(_Event).decode
    # A connection a job: the server closes those that rest while the next job is being sent on them.
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def generate(number: int, trace: Trace, prompt: list[int]) -> None:
            body = request(workload.sampling, number, prompt, trace.ask.max_tokens)
            try:
                async with session.post("/completion", data=msgspec.json.encode(body)) as response:
                    if response.status != 200:
                        raise SetupError(f"llama-server: {(await response.text())[:500]}", code="child_failed")
                    async for line in response.content:
                        if not line.startswith(b"data: {"):
                            continue
                        event = decode(line[6:])
                        if event.tokens:
                            trace.note(len(event.tokens))
                        if event.stop:  # tokens that end inside a character are not told one by one
                            trace.tokens = event.tokens_predicted
            except aiohttp.ClientError as error:
                raise SetupError(f"llama-server broke a job off: {error}", code="child_failed") from error
            if trace.tokens != trace.ask.max_tokens:
                raise SetupError(f"llama-server ended a job after {trace.tokens} tokens", code="child_failed")

        await _warm_up(shape.slots, generate)
        return await drive(workload, prompts, generate)


def request(sampling: Sampling, seed: int, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The body for the server. Greedy is asked for in the way that costs it least: a top-k of 1."""
    greedy = sampling.temperature == 0
    return {
        "prompt": prompt,
        "n_predict": max_tokens,
        "stream": True,
        "return_tokens": True,
        "ignore_eos": True,
        "cache_prompt": True,
        "seed": seed,
        "samplers": ["top_k", "temperature"] if greedy else ["top_k", "top_p", "temperature"],
        "temperature": sampling.temperature,
        "top_k": 1 if greedy else sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "response_fields": list(_Event.__struct_fields__),
    }
