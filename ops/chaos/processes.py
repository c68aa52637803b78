"""The processes of a fleet under test. They die with whoever started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from arriero.ops import child
from arriero.ops.settings import Settings


class Process:
    """One role of the fleet. It may be started again after its end."""

    def __init__(self, role: str, name: str, settings: Settings, log_file: Path) -> None:
        self.role = role
        self.name = name
        self._settings = settings
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, failpoints: str = "") -> None:
        spec = child.spec(self.role, self._settings, log_folder=False)
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with self._log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *prefix,
                sys.executable,
                *spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment, child.FAILPOINTS_VARIABLE: failpoints},
                start_new_session=True,
            )

    async def died(self) -> int:
        """Waits for its end; its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def limit_files(self, size_bytes: int | None) -> None:
        """Let it write no file beyond this size, as if the disk were full; None lifts that."""
        if self._process is not None and self._process.returncode is None:
            soft = resource.RLIM_INFINITY if size_bytes is None else size_bytes
            _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (soft, hard))
