"""The command `arriero` as a person types it: real processes, their output in files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

WAIT_S = 40.0
"""For what surely comes, on a busy machine and after a Kafka group has missed a killed member."""
COMMAND = [sys.executable, "-m", "arriero.ops.cli"]


def until(condition: Callable[[], object], what: object = "") -> None:
    """Poll: other processes have no bell for tests."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARRIERO_")}
    return {**kept, **extra}


class Typed:
    """One command that runs, its standard output and error in files."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        stdin: bytes = b"",
        terminal: int | None = None,
        command: list[str] = COMMAND,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        source = folder / "stdin"
        source.write_bytes(stdin)
        with source.open("rb") as given, self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=given,
                stdout=out,
                stderr=err if terminal is None else terminal,
                env=dict(env or environment()),
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def wait_for(self, text: str) -> None:
        """Until it has printed this. Fails when it ends without."""

        def there() -> bool:
            ended = self.process.poll() is not None
            if text in self.out + self.err:
                return True
            assert not ended, f"ended ({self.process.returncode}) without saying {text!r}: {self.out}{self.err}"
            return False

        until(there, lambda: f"{text!r} is not in {self.out}{self.err}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def children(self) -> dict[str, int]:
        """Process ids of the supervised roles."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            if "arriero.ops.child" in command:
                found[command[-1]] = child.pid
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


class Terminal:
    """A person at a terminal, with some flags that each command gets."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.flags = flags
        self._typed: list[Typed] = []

    def start(self, command: str, *arguments: str, stdin: bytes = b"", terminal: int | None = None) -> Typed:
        """`command`: its word, or its words. `terminal`: a pseudo-terminal in place of standard error's file."""
        words = [*command.split(), *self.flags, *arguments]
        typed = Typed(self.folder / f"typed-{len(self._typed)}", *words, stdin=stdin, terminal=terminal)
        self._typed.append(typed)
        return typed

    def run(self, command: str, *arguments: str, stdin: bytes = b"") -> Typed:
        """Until it has ended."""
        typed = self.start(command, *arguments, stdin=stdin)
        typed.wait()
        return typed

    def up(self, *arguments: str) -> Typed:
        """A stack with the echo engine, ready."""
        up = self.start("up", "--engine", "echo", "--port", "0", *arguments)
        up.wait_for("ready: ")
        return up

    def close(self) -> None:
        for typed in self._typed:
            typed.close()
        until(lambda: not left_over(self.folder), lambda: f"processes are left: {left_over(self.folder)}")


def left_over(folder: Path) -> list[int]:
    """Processes of stacks on this folder or below: it stands in the arguments or the settings of each."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and "arriero.ops" in " ".join(process.cmdline()):
                words = " ".join([*process.cmdline(), *process.environ().values()])
                if str(folder) in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@contextmanager
def terminal(folder: Path, *flags: str) -> Iterator[Terminal]:
    """All that was typed is ended; that nothing is left of it is asserted."""
    one = Terminal(folder, "--data", str(folder / "data"), *flags)
    try:
        yield one
    finally:
        one.close()
