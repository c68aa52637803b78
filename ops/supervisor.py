"""Supervised child processes: one that dies is restarted, with backoff.

A child reports on a pipe, one JSON line each: `{"ready": {...}}` once it works, `{"fatal": "sentence"}` when no
restart can help (a broken model file, a folder that cannot be written). It ends when it gets SIGTERM, at once on a
second one, and dies with its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog

from arriero.ops.signals import StopRequest
from arriero.schemas.clock import Clock
from arriero.schemas.errors import SetupError

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
HEALTHY_S: Final = 60.0
"""A child that has worked so long starts again at the first backoff when it dies."""
KILL_AFTER_S: Final = 10.0
"""Beyond its grace period; then a stopping child is killed."""
STATUS_FD_VARIABLE: Final = "ARRIERO_STATUS_FD"

log = structlog.get_logger(__name__)


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    arguments: Sequence[str]
    """Behind the Python interpreter."""
    log_file: Path | None = None
    """None: the supervisor's own standard error."""
    grace_s: float = 0.0


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


class Supervisor:
    """Starts children in order, keeps them running, stops them in reverse order."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        clock: Clock,
        rng: random.Random,
        changed: Callable[[Child], None] = lambda child: None,
    ) -> None:
        self.children = [Child(spec) for spec in specs]
        self._clock = clock
        self._rng = rng
        self._changed = changed
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False

    async def run(self, request: StopRequest) -> None:
        """Until a stop is requested. Raises SetupError with a child's own sentence when restarting cannot help it."""
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

    async def _keep(self, child: Child) -> None:
        failures = 0
        while not self._stopping:
            began = self._clock.monotonic()
            code, fatal = await self._run_once(child)
            if self._stopping:
                break
            if fatal is not None:
                raise SetupError(fatal, code="child_failed")
            failures = 0 if self._clock.monotonic() - began >= HEALTHY_S else failures + 1
            delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** max(0, failures - 1)) * self._rng.uniform(0.8, 1.2)
            child.restarts += 1
            self._set(child, "restarting")
            log.warning("child_died", role=child.spec.role, **_exit(code), restart_in_s=round(delay_s, 2))
            await asyncio.sleep(delay_s)
        self._set(child, "stopped")

    async def _run_once(self, child: Child) -> tuple[int, str | None]:
        """One life of the child: its exit status, and its last words when they were fatal."""
        self._set(child, "starting")
        reading, writing = os.pipe()
        try:
            process = await self._spawn(child.spec, writing)
        finally:
            os.close(writing)
        child.pid = process.pid
        self._processes[child.spec.role] = process
        try:
            fatal = await self._listen(child, reading)
            return await process.wait(), fatal
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._processes.pop(child.spec.role, None)
            child.pid = None

    async def _spawn(self, spec: ChildSpec, status_fd: int) -> asyncio.subprocess.Process:
        output = contextlib.nullcontext(None) if spec.log_file is None else spec.log_file.open("ab")
        with output as stream:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream if stream is not None else sys.stderr,
                stderr=stream,
                pass_fds=[status_fd],
                env={**os.environ, STATUS_FD_VARIABLE: str(status_fd)},
                # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which then stops all
                # in order.
                start_new_session=True,
            )

    async def _listen(self, child: Child, fd: int) -> str | None:
        """Read what the child reports until it has ended."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        fatal: str | None = None
        try:
            async for line in reader:
                with contextlib.suppress(ValueError):
                    report = json.loads(line)
                    fatal = report.get("fatal", fatal)
                    if "ready" in report:
                        child.info = report["ready"]
                        child.became_ready.set()
                        if child.state == "starting":
                            self._set(child, "ready")
        finally:
            transport.close()
        return fatal

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
            with contextlib.suppress(asyncio.CancelledError, SetupError):
                await keeper

    async def _end(
        self, process: asyncio.subprocess.Process, keeper: asyncio.Task[None], request: StopRequest, patience_s: float
    ) -> None:
        pressed = asyncio.create_task(request.pressed.wait(), name="second stop request")
        try:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await asyncio.wait([keeper, pressed], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not keeper.done():
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # its second: what it runs is abandoned, claims are let go
                await asyncio.wait([keeper], timeout=KILL_AFTER_S / 4)
            if not keeper.done():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        finally:
            pressed.cancel()

    def _set(self, child: Child, state: Literal["starting", "ready", "restarting", "stopping", "stopped"]) -> None:
        child.state = state
        self._changed(child)


def _exit(code: int) -> dict[str, object]:
    if code < 0:
        return {"signal": signal.Signals(-code).name}
    return {"exit_status": code}


# --- the child's end ---------------------------------------------------------------------------------------


class Report:
    """The child's pipe to its supervisor; without one it says nothing."""

    def __init__(self) -> None:
        number = os.environ.pop(STATUS_FD_VARIABLE, "")
        self._fd = int(number) if number else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    @property
    def supervised(self) -> bool:
        return self._fd is not None

    def ready(self, **info: object) -> None:
        self._say({"ready": info})

    def fatal(self, sentence: str) -> None:
        self._say({"fatal": sentence})

    def _say(self, report: dict[str, object]) -> None:
        if self._fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._fd, json.dumps(report).encode() + b"\n")


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies. Linux; elsewhere it does nothing.

    Raises SystemExit when the parent has died already.
    """
    parent = os.getppid()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit(1)
