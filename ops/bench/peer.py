"""The peer of `arriero bench engine --against llama-server`: llama.cpp's own programs, of the same source, built with
the same flags as the library that is measured against them.

llama-cpp-python's source distribution carries the whole of llama.cpp; the one of the installed version is fetched
through pip and built once, into a cache folder that the version names. An interrupted build goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from arriero.ops.testbed.process import ServerProcess, exchange, free_ports
from arriero.schemas.errors import SetupError

PACKAGE: Final = "llama-cpp-python"
SERVER: Final = "llama-server"
BATCHED: Final = "llama-batched-bench"
START_S: Final = 120.0
"""A small model is loaded in seconds; a large one from a slow disk takes longer."""
FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=ON",  # as in the wheel
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",  # so that the folder can be moved to its place
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    *(
        f"-DLLAMA_{part}=OFF"
        for part in "BUILD_TESTS BUILD_EXAMPLES BUILD_APP BUILD_UI USE_PREBUILT_UI OPENSSL".split()
    ),
)
PERCENT: Final = re.compile(r"\[\s*(\d+)%\]")
Tell = Callable[[str, int, int], None]
"""Told what is going on, how far it is and how far it goes (0 while that is unknown)."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides are given alike."""

    model: Path
    slots: int
    n_ctx: int
    threads: int

    @property
    def arguments(self) -> list[str]:
        given = {"-m": self.model, "-c": self.n_ctx, "-t": self.threads, "-tb": self.threads}
        return [str(word) for pair in given.items() for word in pair]


def build(cache: Path, tell: Tell) -> Path:
    """The folder with both programs, built the first time (about ten minutes on two cores). Raises SetupError.

    1. Two runs at once build once.
    2. The source is fetched and unpacked beside the place.
    3. cmake builds the two programs and what they need.
    4. What was built takes its place in one rename; the source goes.
    """
    place = cache / f"llama.cpp-{version(PACKAGE)}"
    work = place.with_name(f"{place.name}.building")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # 1.
        if (place / SERVER).exists():
            return place
        if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name):
            raise SetupError(
                "llama-server is built from source: a C++ compiler is missing (Debian: apt-get install g++)"
            )
        source = _source(work, tell)  # 2.
        _compile(source, work / "build", _cmake(work, tell), tell)  # 3.
        (work / "build" / "bin").rename(place)  # 4.
        shutil.rmtree(work)
    return place


@contextlib.contextmanager
def server(programs: Path, shape: Shape, extra: Sequence[str] = ()) -> Iterator[str]:
    """A running llama-server, by its address; ended on leaving, and by the kernel should this process die."""
    (port,) = free_ports(1)
    arguments = [*shape.arguments, "-np", str(shape.slots), "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
        command = [str(programs / SERVER), *arguments, "--no-webui", "--offline", *extra]
        process = ServerProcess(command, Path(folder) / "server.log")
        try:
            process.launch()
            process.wait_until(lambda: b" 200 " in exchange(port, b"GET /health HTTP/1.0\r\n\r\n")[:20], START_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stop()


def batched(programs: Path, shape: Shape, *, sequences: int, prompt_tokens: int, output_tokens: int) -> float:
    """Output tokens a second of llama-batched-bench, prefill included: the library alone, which picks no tokens."""
    sizes = {"-npp": prompt_tokens, "-ntg": output_tokens, "-npl": sequences, "--output-format": "jsonl"}
    command = [str(programs / BATCHED), *shape.arguments, *(str(word) for pair in sizes.items() for word in pair)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SetupError(f"{BATCHED} ended with status {done.returncode}: {done.stderr[-1_000:]}", code="child_failed")
    found = msgspec.json.decode(lines[-1])
    return sequences * output_tokens / float(found["t_pp"] + found["t_tg"])


# --- building ----------------------------------------------------------------------------------------------


def _source(work: Path, tell: Tell) -> Path:
    source = work / "source"
    if not source.exists():
        wanted = f"{PACKAGE}=={version(PACKAGE)}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        tell(f"fetching the source of {wanted}", 0, 0)
        _run([*_pip("download"), "--no-deps", "--no-binary", ":all:", "--dest", str(work), wanted])
        (archive,) = work.glob("*.tar.gz")
        tell("unpacking", 0, 0)
        with tarfile.open(archive) as packed:
            packed.extractall(work / "unpacked", filter="data")
        archive.unlink()
        (unpacked,) = (work / "unpacked").iterdir()
        unpacked.rename(source)
    return source / "vendor" / "llama.cpp"


def _cmake(work: Path, tell: Tell) -> str:
    """The machine's cmake, else one from PyPI, as the build of llama-cpp-python does it."""
    found = shutil.which("cmake")
    if found:
        return found
    place = work / "tools" / "cmake" / "data" / "bin" / "cmake"
    if not place.exists():
        tell("fetching cmake", 0, 0)
        _run([*_pip("install"), "--target", str(work / "tools"), "cmake"])
    return str(place)


def _compile(source: Path, folder: Path, cmake: str, tell: Tell) -> None:
    flags = [*FLAGS, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    if _library_uses_cuda():
        flags.append("-DGGML_CUDA=on")
    tell("configuring", 0, 0)
    _run([cmake, "-S", str(source), "-B", str(folder), *flags])

    def show(line: str) -> None:
        step = PERCENT.search(line)
        if step:
            tell("building llama-server (once, some ten minutes)", int(step[1]), 100)

    jobs = str(len(os.sched_getaffinity(0)))
    _run([cmake, "--build", str(folder), "--parallel", jobs, "--target", SERVER, BATCHED], show)


def _library_uses_cuda() -> bool:
    import llama_cpp

    return any((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-cuda*"))


def _pip(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", command, "--no-input", "--disable-pip-version-check", "-q"]


def _run(command: list[str], show: Callable[[str], None] = lambda line: None) -> None:
    """Raises SetupError with the command's last words. Whatever interrupts it, its children end with it."""
    said: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said.append(line)
            show(line)
        code = process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        errors = [line for line in said if "error" in line.lower()][:5]
        raise SetupError(f"{shlex.join(command)} failed: {''.join([*errors, *said[-10:]])}", code="build_failed")
