"""The engine thread: it owns the backend, and nobody else touches it.

    submit, cancel ──▶ commands ──▶ [ drain ▸ plan ▸ seat ▸ step ▸ text and limits ] ──▶ on_step (event loop)

One turn of the thread is one step, and one `call_soon_threadsafe` hands over all that it did. With nothing to do
the thread sleeps on its queue. `prepare` runs beside it on threads of its own, because a long prompt takes long to
tokenise and must not hold up what is decoding.

What a turn does is in turns.py; here are the thread, its queue and its end. An error that is neither a sequence's nor
a step's ends the thread, and `died` says so: the process should then go.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Final

import structlog

from arriero.schemas.clock import Clock
from arriero.schemas.errors import ModelError
from arriero.schemas.job import CLASSES, Job
from arriero.workers.engine.seam import Backend, ModelInfo, Prepared, StepReport, Work
from arriero.workers.engine.turns import Turns
from arriero.workers.flight import FlightRecorder
from arriero.workers.schedule import CHUNK_TOKENS

log = structlog.get_logger(__name__)

REPORTS_AHEAD: Final = 16
"""Steps that the thread may be ahead of the event loop. A loop that stalls longer holds decoding up, rather than
letting reports pile up without bound."""
PREPARE_STACK_BYTES: Final = 512 << 20
"""Stack of a preparing thread, of which only what is touched takes memory. Some tokenisers recurse over a run of one
kind of character, about 320 bytes for each: with the usual 8 MiB a prompt of 26,000 letters ends the process; this
holds the longest that a job can carry."""


class EngineRunner:
    """One loaded model behind a thread.

    `load` makes the backend, in the thread. `on_step` is called in the event loop, in order, never after `close`.
    `prepare_threads=0` prepares in the event loop: for backends whose `prepare` is cheap.
    """

    def __init__(
        self,
        load: Callable[[], Backend],
        on_step: Callable[[StepReport], None],
        clock: Clock,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        prepare_threads: int = 2,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._load = load
        self._on_step = on_step
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._prepare_threads = prepare_threads
        self._recorder = recorder or FlightRecorder(None)
        self._commands: queue.SimpleQueue[Work | int | None] = queue.SimpleQueue()
        """A Work to submit, a key to cancel, None to stop."""
        self._ahead = threading.Semaphore(REPORTS_AHEAD)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._backend: Backend | None = None
        self._info: ModelInfo | None = None
        self._turns: Turns | None = None

    async def __aenter__(self) -> EngineRunner:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> ModelInfo:
        """Start the thread and load the model in it. Raises ModelError."""
        self._loop = asyncio.get_running_loop()
        self.died: asyncio.Future[BaseException] = self._loop.create_future()
        """Done when the thread has ended without being asked to; its result is why."""
        loaded: asyncio.Future[Backend] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loaded,), name="engine", daemon=True)
        self._thread.start()
        try:
            self._backend = await loaded
            if self._prepare_threads:
                self._pool = _start_pool(self._prepare_threads)
        except BaseException:
            await self.close()
            raise
        self._info = self._backend.info
        return self._info

    @property
    def info(self) -> ModelInfo:
        """The loaded model; only after `start`."""
        assert self._info is not None, "the engine has not been started"
        return self._info

    async def prepare(self, job: Job) -> list[int]:
        """The job's prompt as token ids. Raises BadJob (prompt_too_long, empty_prompt, bad_template)."""
        (prepared,) = await self.prepare_all([(job, "")])
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    async def prepare_all(self, jobs: Sequence[tuple[Job, str]]) -> list[Prepared]:
        """The same for many, with their labels; each gets its token ids or its error."""
        assert self._backend is not None, "the engine has not been started"
        if self._pool is None:
            return [prepare_one(self._backend, self._recorder, job, label) for job, label in jobs]
        work = partial(prepare_one, self._backend, self._recorder)
        return await asyncio.gather(*(self._loop.run_in_executor(self._pool, work, *one) for one in jobs))

    def submit(self, work: Work) -> None:
        """Queue a sequence; it ends with exactly one Update that carries an Ending, unless the runner closes.

        A prefill of less urgent work is broken off for it.
        """
        self._commands.put(work)
        turns, backend = self._turns, self._backend
        if turns is not None and backend is not None and CLASSES.index(work.priority) < turns.yields_to:
            backend.abort()

    def cancel(self, key: int) -> None:
        """End a sequence before the next step. Unknown and ended keys are ignored."""
        self._commands.put(key)

    async def close(self) -> None:
        """Stop after the running step and free the model. Sequences that still run get no Ending."""
        if self._thread is None:
            return
        if self._pool is not None:
            # First, for a prompt in the tokeniser still needs the model.
            stopping = partial(self._pool.shutdown, wait=True, cancel_futures=True)
            await asyncio.shield(self._loop.run_in_executor(None, stopping))
        self._closing = True
        self._commands.put(None)
        await asyncio.shield(self._loop.run_in_executor(None, self._thread.join))
        self._thread = None

    # --- the event loop's end ------------------------------------------------------------------------------

    def _deliver(self, report: StepReport) -> None:
        self._ahead.release()
        if not self._closing:
            self._on_step(report)

    # --- the thread ----------------------------------------------------------------------------------------

    def _main(self, loaded: asyncio.Future[Backend]) -> None:
        try:
            self._recorder.step("load")
            backend = self._load()
            self._recorder.step("idle")
        except BaseException as error:
            failure = error if isinstance(error, ModelError) else _model_error(error)
            self._call(_reject, loaded, failure)
            return
        try:
            turns = self._turns = Turns(backend, self._clock, self._chunk_tokens, self._recorder)
            self._call(_resolve, loaded, backend)
            while self._drain(turns):
                report = turns.turn()
                if report is not None:
                    self._hand_over(report)
            backend.close()
        except BaseException as error:  # told to the loop, which ends the process; nothing is worth freeing any more
            log.error("engine_thread_died", error=str(error), kind=type(error).__name__, exc_info=True)
            self._call(_resolve, self.died, error)

    def _drain(self, turns: Turns) -> bool:
        """Take in what is queued, and wait for it when there is nothing else to do; False to stop."""
        block = turns.idle
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                break
            if block:
                turns.wake()
                block = False
            if command is None:
                return False
            if isinstance(command, int):
                turns.cancel(command)
            else:
                turns.submit(command)
        return not self._closing

    def _hand_over(self, report: StepReport) -> None:
        while not self._ahead.acquire(timeout=1.0):
            if self._closing:
                return
        self._call(self._deliver, report)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._closing = True  # the loop is closed; nobody is left to tell


def prepare_one(backend: Backend, recorder: FlightRecorder, job: Job, label: str) -> Prepared:
    """Whatever a prompt does to the tokeniser, the others of its batch go on."""
    try:
        with recorder.tokenising(label):
            return backend.prepare(job)
    except Exception as error:
        return error


def _model_error(error: BaseException) -> ModelError:
    failure = ModelError(f"the model could not be loaded: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _start_pool(threads: int) -> ThreadPoolExecutor:
    """Threads with a large stack; the size is a setting of the process, so they are all made here and now."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
    all_there = threading.Barrier(threads + 1)
    previous = threading.stack_size(PREPARE_STACK_BYTES)
    try:
        for _ in range(threads):
            pool.submit(all_there.wait)
    finally:
        threading.stack_size(previous)
    all_there.wait()
    return pool
