"""Supervised child processes: one that dies is restarted, with backoff.

A child reports on a pipe, one JSON line each: `{"ready": {...}}` once it works, `{"error": "sentence", "fatal": BOOL}`
as its last words; fatal is what no restart can mend (a broken model file, a port in use). It ends when it gets SIGTERM,
at once on a second one, and when the pipe's other end closes: its supervisor is gone then, however it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog

from arriero.ops.crashes import CrashLog, CrashReport, crash_report, fault_file
from arriero.ops.signals import StopRequest
from arriero.ops.watchdog import Watch
from arriero.schemas.clock import Clock
from arriero.schemas.errors import SetupError

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
HEALTHY_S: Final = 60.0
"""A child that has worked so long starts again at the first backoff when it dies."""
KILL_AFTER_S: Final = 10.0
"""Beyond its grace period; then a stopping child is killed."""
ABORT_S: Final = 2.5
"""How long a child may take to stop at once. Then it is killed."""
REPORT_MAX_S: Final = 5.0
"""How long a crash report may hold the next life up. While the log is away longer it is tried on beside it."""
STATUS_FD_VARIABLE: Final = "ARRIERO_STATUS_FD"
FLIGHT_VARIABLE: Final = "ARRIERO_FLIGHT"
CRASHES_VARIABLE: Final = "ARRIERO_CRASHES"

log = structlog.get_logger(__name__)


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    arguments: Sequence[str]
    """Behind the Python interpreter."""
    environment: Mapping[str, str] = {}
    """Added to the supervisor's own. Unlike arguments it is hidden from other users, so passwords may be in it."""
    log_file: Path | None = None
    """None: the supervisor's own standard error."""
    grace_s: float = 0.0
    watchdog_s: float = 0.0
    """Whether it keeps a flight recorder, and how long an operation in it may take; 0 for one that keeps none."""


class Child:
    """One supervised role: what is known of it now."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.state: Literal["starting", "ready", "restarting", "stopping", "stopped"] = "starting"
        self.restarts = 0
        self.info: dict[str, Any] = {}
        """What the child said when it became ready."""
        self.became_ready = asyncio.Event()
        self.watch: Watch | None = None
        """Over its present or last life, when it keeps a recorder."""
        self.why = ""
        """How its last life ended, while it is restarting: its own last words where it had any."""


class Supervisor:
    """Starts children in order, keeps them running, stops them in reverse order."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        clock: Clock,
        rng: random.Random,
        changed: Callable[[Child], None] = lambda child: None,
        crashed: Callable[[CrashReport], Awaitable[None]] | None = None,
        crashes: CrashLog | None = None,
    ) -> None:
        """crashed: makes a report known, and returns when that is done. It is waited for, but not for long."""
        self.children = [Child(spec) for spec in specs]
        self._crashed = crashed
        self._crashes = crashes or CrashLog()
        self._folder = Path()
        self._reports: set[asyncio.Task[None]] = set()
        self._clock = clock
        self._rng = rng
        self._changed = changed
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False

    async def run(self, request: StopRequest) -> None:
        """Until a stop is requested. Raises SetupError with a child's own sentence when restarting cannot help it."""
        with tempfile.TemporaryDirectory(prefix="arriero-") as folder:
            self._folder = Path(folder)
            await self._run(request)

    async def _run(self, request: StopRequest) -> None:
        keepers = [asyncio.create_task(self._keep(child), name=f"keep {child.spec.role}") for child in self.children]
        asked = asyncio.create_task(request.asked.wait(), name="stop request")
        try:
            done, _ = await asyncio.wait([asked, *keepers], return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task is not asked), None)
            if failed is not None:
                failed.result()
        finally:
            asked.cancel()
            await self._stop(request, keepers)
            for report in self._reports:
                report.cancel()

    async def _keep(self, child: Child) -> None:
        failures = 0
        while not self._stopping:
            began = self._clock.monotonic()
            code, words = await self._run_once(child)
            if self._stopping:
                break
            if child.watch is not None:
                await self._blame(child, code, child.watch)
            if words is not None and words.fatal:
                raise SetupError(words.error, code="child_failed")
            failures = 0 if self._clock.monotonic() - began >= HEALTHY_S else failures + 1
            delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** max(0, failures - 1)) * self._rng.uniform(0.8, 1.2)
            child.restarts += 1
            child.why = words.error if words is not None else _ending(code)
            log.warning("child_died", role=child.spec.role, status=code, why=child.why, restart_in_s=round(delay_s, 2))
            self._set(child, "restarting")
            await asyncio.sleep(delay_s)

    async def _blame(self, child: Child, code: int, watch: Watch) -> None:
        """Report a crash, and let that be known before the next life begins, within reason."""
        path = self._flight(child)
        report = crash_report(code, path, stuck=watch.stuck, out_of_memory=watch.out_of_memory(), clock=self._clock)
        path.unlink(missing_ok=True)
        fault_file(path).unlink(missing_ok=True)
        if report is None or self._crashed is None:
            return
        self._crashes.add(report)
        task = asyncio.create_task(self._tell(report), name="crash report")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        await asyncio.wait([task], timeout=REPORT_MAX_S)

    async def _tell(self, report: CrashReport) -> None:
        assert self._crashed is not None
        await self._crashed(report)

    def _flight(self, child: Child) -> Path:
        return self._folder / f"{child.spec.role}.flight"

    async def _watch(self, child: Child, watch: Watch, process: asyncio.subprocess.Process) -> None:
        """Kill a child of which one operation does not end."""
        for_s = await watch.until_stuck(process.pid)
        log.error("child_stuck", role=child.spec.role, pid=process.pid, for_s=round(for_s, 1))
        _signal(process, signal.SIGKILL)

    async def _run_once(self, child: Child) -> tuple[int, _Words | None]:
        """One life of the child: its exit status (negative: a signal's number), and its last words."""
        self._set(child, "starting")
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb", 0) as pipe:
            try:
                process = await self._spawn(child, writing)
            except OSError as error:
                raise SetupError(f"the {child.spec.role} cannot be started: {error}", code="child_failed") from error
            finally:
                os.close(writing)
            child.pid = process.pid
            self._processes[child.spec.role] = process
            watching: asyncio.Task[None] | None = None
            if child.spec.watchdog_s:
                child.watch = Watch(self._flight(child), child.spec.watchdog_s, self._clock)
                watching = asyncio.create_task(
                    self._watch(child, child.watch, process), name=f"watch {child.spec.role}"
                )
            try:
                words = await self._listen(child, pipe)
                return await process.wait(), words
            finally:
                if watching is not None:
                    watching.cancel()
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
                self._processes.pop(child.spec.role, None)
                child.pid = None

    async def _spawn(self, child: Child, status_fd: int) -> asyncio.subprocess.Process:
        spec = child.spec
        recording = {}
        if spec.watchdog_s:
            recording = {FLIGHT_VARIABLE: str(self._flight(child)), CRASHES_VARIABLE: self._crashes.to_json()}
        output = contextlib.nullcontext(None) if spec.log_file is None else spec.log_file.open("ab")
        with output as stream:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream if stream is not None else sys.stderr,
                stderr=stream,
                pass_fds=[status_fd],
                env={**os.environ, **spec.environment, **recording, STATUS_FD_VARIABLE: str(status_fd)},
                # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which then stops all
                # in order.
                start_new_session=True,
            )

    async def _listen(self, child: Child, pipe: io.FileIO) -> _Words | None:
        """Read what the child reports until it has ended."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        words: _Words | None = None
        try:
            async for line in reader:
                with contextlib.suppress(ValueError, TypeError, msgspec.MsgspecError):
                    report = json.loads(line)
                    if "error" in report:
                        words = msgspec.convert(report, _Words)
                    if "ready" in report:
                        child.info = report["ready"]
                        child.why = ""
                        child.became_ready.set()
                        if child.state == "starting":
                            self._set(child, "ready")
        finally:
            transport.close()
        return words

    async def _stop(self, request: StopRequest, keepers: Sequence[asyncio.Task[None]]) -> None:
        """One child after the other, so that what the earlier ones leave is still served by the later ones."""
        self._stopping = True
        for child, keeper in reversed(list(zip(self.children, keepers, strict=True))):
            process = self._processes.get(child.spec.role)
            if process is None:
                keeper.cancel()
            else:
                self._set(child, "stopping")
                await self._end(process, keeper, request, child.spec.grace_s + KILL_AFTER_S)
            await asyncio.gather(keeper, return_exceptions=True)
            self._set(child, "stopped")

    async def _end(
        self, process: asyncio.subprocess.Process, keeper: asyncio.Task[None], request: StopRequest, patience_s: float
    ) -> None:
        pressed = asyncio.create_task(request.pressed.wait(), name="second stop request")
        try:
            _signal(process, signal.SIGTERM)
            await asyncio.wait([keeper, pressed], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not keeper.done():
                _signal(process, signal.SIGTERM)  # its second: what it runs is abandoned, claims are let go
                await asyncio.wait([keeper], timeout=ABORT_S)
            if not keeper.done():
                _signal(process, signal.SIGKILL)
        finally:
            pressed.cancel()

    def _set(self, child: Child, state: Literal["starting", "ready", "restarting", "stopping", "stopped"]) -> None:
        child.state = state
        self._changed(child)


class _Words(msgspec.Struct, frozen=True):
    """A child's last words."""

    error: str
    fatal: bool


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


# --- the child's end ---------------------------------------------------------------------------------------


class Report:
    """The child's pipe to its supervisor; without one it says nothing."""

    def __init__(self) -> None:
        number = os.environ.pop(STATUS_FD_VARIABLE, "")
        self._fd = int(number) if number else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost` once when the supervisor is gone, also when that was before this call."""
        if self._fd is None:
            return
        fd, loop = self._fd, asyncio.get_running_loop()

        def hung_up() -> None:
            # Nobody writes to the end that we hold for writing: it becomes readable only by an error, when the last
            # reader is gone.
            loop.remove_reader(fd)
            lost()

        loop.add_reader(fd, hung_up)

    def ready(self, **info: object) -> None:
        self._say({"ready": info})

    def error(self, sentence: str, *, fatal: bool) -> None:
        self._say({"error": sentence, "fatal": fatal})

    def _say(self, report: dict[str, object]) -> None:
        if self._fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._fd, json.dumps(report).encode() + b"\n")
