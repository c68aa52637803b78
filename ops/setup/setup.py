"""Makes .venv: what `make` runs before anything is installed, so it needs nothing but Python's standard library.

    python3 ops/setup/setup.py [--dev]

It checks what is needed before it downloads anything, builds llama-cpp-python from its source distribution with only
what a worker needs, shows that it moves, and leaves a stamp, so that the next run is over at once. Interrupted, it
goes on where pip left off.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
HOOK = ROOT / "ops" / "setup" / "llama.cmake"
LOG = VENV / "setup.log"
HOOK_STAMP = VENV / "llama.stamp"
"""The hook that llama.cpp was built with."""
LEAST = (3, 11)
TELL_EVERY_S = 15.0
STEP = re.compile(r"\[(\d+)/(\d+)\]")
LAST_LINES = 25


class SetupFailed(Exception):
    """What went wrong, for the terminal."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes .venv with Arriero in it.")
    parser.add_argument("--dev", action="store_true", help="with what tests and checks need")
    dev = parser.parse_args().dev
    stamps = [VENV / "arriero-dev.stamp", VENV / "arriero.stamp"]  # what tests need includes the rest
    if PYTHON.exists() and any(there(stamp) == digest() for stamp in (stamps[:1] if dev else stamps)):
        return 0
    lacking = missing()
    if lacking:
        print("\n".join(lacking), file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        make(dev)
        stamps[0 if dev else 1].write_text(digest())
    except KeyboardInterrupt:
        print("\ninterrupted; run it again to go on", file=sys.stderr)
        return 130
    except (SetupFailed, OSError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print("ready: .venv/bin/arriero --help")
    return 0


def interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def there(stamp: Path) -> str | None:
    return stamp.read_text() if stamp.exists() else None


def digest() -> str:
    """Changes with what would make another environment."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), HOOK.read_bytes(), sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def missing() -> list[str]:
    """A sentence for each thing that is not there."""
    lacking = []
    if sys.version_info < LEAST:
        lacking.append(
            f"Python {LEAST[0]}.{LEAST[1]} or later is needed; this is {sys.version.split()[0]} ({sys.executable})"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        lacking.append("Python's venv is missing (Debian: apt-get install python3-venv)")
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers if compiler):
        lacking.append("a C++ compiler is missing (Debian: apt-get install g++)")
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CC", ""), "cc", "gcc", "clang") if compiler):
        lacking.append("a C compiler is missing (Debian: apt-get install gcc)")
    if not shutil.which("make") and not shutil.which("ninja"):
        lacking.append("make is missing (Debian: apt-get install make)")
    return lacking


def make(dev: bool) -> None:
    if not has_pip():
        print(f"making {VENV}", flush=True)
        # A Python that runs keeps what is beside it; one that does not (its own was removed) is made anew.
        clear = [] if PYTHON.exists() else ["--clear"]
        command = [sys.executable, "-m", "venv", *clear, str(VENV)]
        made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if made.returncode:
            raise SetupFailed(f"{shlex.join(command)}\nfailed:\n{last_lines(made.stdout)}")
    LOG.write_text("")
    run("pip", ["install", "--upgrade", "pip"])
    engine, hook = pinned_engine(), hashlib.sha256(HOOK.read_bytes()).hexdigest()
    changed = there(HOOK_STAMP) not in (None, hook)
    if changed or not installed(engine):
        print("building llama.cpp: about ten minutes of one core, five on two. It happens once.", flush=True)
        arguments = cmake_arguments()
        # pip keeps what it has built under the version alone, whatever it was built with.
        anew = ["--force-reinstall", "--no-deps", "--no-cache-dir"] if changed or "-DGGML_CUDA=on" in arguments else []
        run("llama.cpp", ["install", "-v", *anew, engine], CMAKE_ARGS=arguments)
    HOOK_STAMP.write_text(hook)
    run("packages", ["install", "--editable", str(ROOT) + "[all]", *(["--group", "dev"] if dev else [])])


def has_pip() -> bool:
    """Whether pip is there as a whole: an environment whose making was interrupted has less."""
    check = "import importlib.metadata as m; assert m.files('pip')"
    return PYTHON.exists() and subprocess.run([str(PYTHON), "-c", check], capture_output=True).returncode == 0


def pinned_engine() -> str:
    found = re.search(r'"(llama-cpp-python==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml pins llama-cpp-python"
    return found[1]


def installed(requirement: str) -> bool:
    """Whether it is there: it must never be built twice."""
    name, _, version = requirement.partition("==")
    check = f"import importlib.metadata as m; assert m.version({name!r}) == {version!r}"
    return subprocess.run([str(PYTHON), "-c", check], capture_output=True).returncode == 0


def cmake_arguments() -> str:
    hook = shlex.quote(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={HOOK}")
    arguments = [os.environ.get("CMAKE_ARGS", ""), "-DLLAVA_BUILD=OFF", hook]
    if shutil.which("nvcc") and os.environ.get("ARRIERO_CUDA") != "0":
        print("nvcc is here: building for CUDA (ARRIERO_CUDA=0 to leave it out); that takes longer")
        arguments.append("-DGGML_CUDA=on")
    return " ".join(argument for argument in arguments if argument)


def run(what: str, arguments: list[str], **variables: str) -> None:
    """Run pip; its output goes to the log, and a line that moves to the terminal."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    began = told = time.monotonic()
    terminal = sys.stdout.isatty()
    doing: deque[str] = deque(["starting"], maxlen=1)
    with LOG.open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this program alone, which passes it on to all of pip's children
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                doing.append(shown(line) or doing[0])
                now = time.monotonic()
                if now - told > (0.2 if terminal else TELL_EVERY_S):
                    told = now
                    text = f"{what}: {doing[0]}, {now - began:.0f} s"
                    print(f"\r\033[K{text}"[:120] if terminal else text, end="" if terminal else "\n", flush=True)
            code = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # it had ended already
                os.killpg(process.pid, signal.SIGINT)  # pip takes its build folders away
                try:
                    process.communicate(timeout=10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            raise
    how = "failed" if code else "done"
    print(("\r\033[K" if terminal else "") + f"{what}: {how} after {time.monotonic() - began:.0f} s", flush=True)
    if code:
        tail = last_lines(LOG.read_text(errors="replace"))
        raise SetupFailed(f"{shlex.join(command)}\nfailed; its last lines (all of them: {LOG}):\n{tail}")


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])


def shown(line: str) -> str:
    """What a line of pip's says of how far it is; empty when nothing."""
    step = STEP.search(line)
    if step:
        return f"step {step[1]} of {step[2]}"
    words = line.split()
    return " ".join(words[:3]) if words and words[0] in ("Collecting", "Downloading", "Building", "Installing") else ""


if __name__ == "__main__":
    sys.exit(main())
