"""What a supervisor makes of a dead child: whether something in its hands may have killed it, and the report of that.

died by      SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL · the kernel's out-of-memory killer · the watchdog · an
             exception in the engine's thread                    ──▶ a report of the jobs that the recorder names
             anything else (SIGKILL, SIGTERM, exit statuses)     ──▶ nobody is to blame
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import re
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec
import structlog

from arriero.ops import wiring
from arriero.ops.settings import Settings
from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.codec import encode
from arriero.schemas.errors import ArrieroError
from arriero.schemas.event import Crashed
from arriero.schemas.state import JobState, fold
from arriero.transports.log import Outgoing, Placed
from arriero.workers.flight import Flight, Named, Operation, lanes_of, read_flight

log = structlog.get_logger(__name__)

ENGINE_DIED: Final = 70
"""Exit status of a worker whose engine's thread has died of an exception."""
FAULTS: Final = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
CRASHES_KEPT: Final = 200
"""Jobs that a supervisor remembers; a report names as many as a batch holds."""
_FRAME: Final = re.compile(rb'^  File "[^"\n]*?([^"/\n]+)", line \d+ in (\w+)', re.MULTILINE)
_DOING: Final[dict[tuple[bytes, bytes], tuple[Operation, ...]]] = {
    (b"turns.py", b"turn"): ("prefill", "decode"),
    (b"runner.py", b"prepare_one"): ("tokenise",),
    (b"intake.py", b"_admit"): ("read",),
}
"""What a thread is doing, by the function through which each operation goes."""
AGAIN_S: Final = 1.0
"""Between two tries to publish a report while the log is away."""


class CrashReport(msgspec.Struct, frozen=True):
    """A child's end and what it had in hand. `signal`: what it died of, for people."""

    signal: str
    operation: Operation
    jobs: list[Named]
    time_ms: int

    @property
    def alone(self) -> bool:
        return len(self.jobs) == 1

    def events(self, worker: str) -> list[Crashed]:
        return [
            Crashed(
                id=job.id,
                time_ms=self.time_ms,
                origin=job.origin,
                worker=worker,
                operation=self.operation,
                signal=self.signal,
                alone=self.alone,
            )
            for job in self.jobs
        ]


def crash_report(
    status: int, path: Path, *, stuck: Collection[int], out_of_memory: bool, clock: Clock
) -> CrashReport | None:
    """Of a child that ended with this status (negative: a signal's number); None when nobody is to blame.

    stuck: the recorder's lanes for which the watchdog killed it: what went on in the others is not to blame.
    out_of_memory: the kernel killed something of this machine's or container's just now. Of a fault only what its
    thread was doing is to blame, where it was at something and left word of itself (`tell_faults`).
    """
    cause = _cause(status, stuck=bool(stuck), out_of_memory=out_of_memory)
    lanes = stuck or (_fault_lanes(path) if -status in FAULTS else ())
    flight: Flight | None = read_flight(path, lanes or None) if cause else None
    if flight is None or not flight.jobs:
        return None
    return CrashReport(cause, flight.operation, flight.jobs, now_ms(clock))


@contextlib.contextmanager
def tell_faults(path: Path | None) -> Iterator[None]:
    """This process writes beside its recorder in what code it dies of a fault; not without one, nor without room."""
    try:
        file = fault_file(path).open("wb", buffering=0) if path is not None else None
    except OSError:
        file = None
    if file is None:
        yield
        return
    with file:
        # Its own thread only: the others run on, and to walk their frames meanwhile is a fault of its own.
        faulthandler.enable(file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.disable()


def fault_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.fault")


def _fault_lanes(path: Path) -> Collection[int]:
    """Empty where nothing tells: a thread without Python's frames, one whose stack has run out, a fault elsewhere."""
    try:
        words = fault_file(path).read_bytes()
    except OSError:
        return ()
    for frame in _FRAME.finditer(words):  # the innermost first
        doing = _DOING.get((frame[1], frame[2]))
        if doing is not None:
            return lanes_of(path, doing)
    return ()


def _cause(status: int, *, stuck: bool, out_of_memory: bool) -> str:
    if stuck:
        return "watchdog"
    if status == ENGINE_DIED:
        return "exception"
    if status == -signal.SIGKILL and out_of_memory:
        return "out_of_memory"
    return signal.Signals(-status).name if status < 0 and -status in FAULTS else ""


class CrashLog:
    """What this supervisor's children have crashed with, by the job's id: for the next one, which may have no bus to
    ask. Forgets the oldest."""

    def __init__(self) -> None:
        self._states: dict[str, JobState] = {}

    def add(self, report: CrashReport) -> None:
        for number, event in enumerate(report.events("")):
            state = self._states.pop(event.id, None)
            self._states[event.id] = fold(state, event, -1, (state.offset if state else -1) + 1 + number)
        while len(self._states) > CRASHES_KEPT:
            del self._states[next(iter(self._states))]

    def to_json(self) -> str:
        return msgspec.json.encode(list(self._states.values())).decode()


async def publish(settings: Settings, worker: str, report: CrashReport) -> None:
    """Record the report. Tries until the log takes it."""
    names = settings.names
    records = [Outgoing(names.events, event.id.encode(), encode(event)) for event in report.events(worker)]
    while True:
        try:
            async with wiring.open_log(settings, "supervisor") as job_log:
                answers = await job_log.publish(records)
            done = {number for number, answer in enumerate(answers) if isinstance(answer, Placed)}
            records = [record for number, record in enumerate(records) if number not in done]
            if not records:
                log.warning("crash_reported", worker=worker, jobs=len(report.jobs), operation=report.operation)
                return
        except ArrieroError as error:
            log.info("crash_report_waits", code=error.code, error=error.message)
        await asyncio.sleep(AGAIN_S)


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this control group the kernel has killed for want of memory; 0 where nothing tells."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return 0
    candidates = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if number == "0":
            candidates += [root / inside / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates += [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
    for file in candidates:
        try:
            found = dict(pair.split() for pair in file.read_text().splitlines())
            return int(found["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0
