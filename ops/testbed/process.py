"""One server process that never outlives the one that started it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from arriero.schemas.errors import SetupError

STOP_S: Final = 20.0
"""A server that has not ended this long after SIGTERM is killed."""
POLL_S: Final = 0.05


class ServerProcess:
    """A child process whose output goes to a file. Stop it, or let it die with its parent.

    On Linux the kernel kills it when the *thread* that launched it ends: launch from the main thread.
    """

    def __init__(self, command: Sequence[str], log_file: Path) -> None:
        self._command = list(command)
        self._log_file = log_file
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def launch(self) -> None:
        """Starts the process and returns at once."""
        assert self._child is None, "already running"
        setpriv = shutil.which("setpriv")  # of util-linux; elsewhere the callers' own clean-up has to do
        prefix = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with self._log_file.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal must reach the parent first, which then stops it.
            self._child = subprocess.Popen(
                prefix + self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, answers: Callable[[], bool], timeout_s: float) -> None:
        """Returns once it answers. Raises SetupError, with the end of its output, when it ends first or is late."""
        assert self._child is not None
        deadline = time.monotonic() + timeout_s
        while not answers():
            ended = self._child.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else f"did not answer within {timeout_s:.0f} s"
                tail = self._log_file.read_bytes()[-1_500:].decode(errors="replace")
                raise SetupError(f"{self._command[0]} {what}: {tail}", code="testbed_failed")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Asks it to end, then makes it."""
        if self._child is None:
            return
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, as a lost machine would look like."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def exchange(port: int, request: bytes) -> bytes:
    """What a local server answers at first; nothing when it doesn't."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(request)
            return connection.recv(4_096)
    except OSError:
        return b""
