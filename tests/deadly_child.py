"""A supervised worker whose engine ends its own process on marked prompts: `deadly_child.py worker`.

KILL read       while the record is decoded       KILL token      at the tenth token
KILL tokenise   while the prompt is prepared      KILL loop       by a step that never ends
KILL prefill    at prefill                        KILL memory     as the kernel does that has none left
KILL raise      by an exception in the engine     KILL hunger     by memory that a limit refuses, as C++ does
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from arriero.ops import child, wiring
from arriero.schemas.job import Job
from arriero.transports.log import Record
from arriero.workers import intake
from arriero.workers.engine.echo import EchoBackend
from arriero.workers.engine.seam import StepOutcome, StepPlan, Work

OOM_VARIABLE = "TEST_OOM_COUNTER"
"""The file in which the kernel would count the processes that it kills for want of memory."""


def crash() -> None:
    """A fault of this very thread."""
    ctypes.string_at(0)


def starve() -> None:
    """Ask for more memory than the process may have, and abort: what an uncaught `std::bad_alloc` comes to. Only this
    one request is refused: with nothing left at all any other thread might die first, and of something else."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    if libc.malloc(ctypes.c_size_t(1 << 30)) is None:
        libc.abort()


class DeadlyEcho(EchoBackend):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._work: dict[int, Work] = {}

    def prepare(self, job: Job) -> list[int]:
        if "KILL tokenise" in (job.prompt or ""):
            crash()
        return super().prepare(job)

    def begin(self, slot: int, work: Work) -> None:
        super().begin(slot, work)
        self._work[slot] = work

    def step(self, plan: StepPlan) -> StepOutcome:
        for feed in plan.feeds:
            work = self._work[feed.slot]
            prompt = b"".join(map(self.piece, work.prompt)).decode()
            position = feed.position + len(feed.tokens) - len(work.prompt)
            if "KILL prefill" in prompt and position <= 0:
                crash()
            if "KILL token" in prompt and position >= 9:
                crash()
            if "KILL memory" in prompt and position >= 2:
                counter = Path(os.environ[OOM_VARIABLE])
                counter.write_text(f"oom_kill {int(counter.read_text().split()[1]) + 1}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            if "KILL hunger" in prompt and position >= 2:
                starve()
            if "KILL raise" in prompt and position >= 2:
                raise RuntimeError("out of the engine")
            while "KILL loop" in prompt and position >= 2:
                pass
        return super().step(plan)


def main() -> int:
    real_check, real_loader = intake.check_record, wiring.engine_loader

    def check(record: Record, *rest: Any) -> Any:
        if b"KILL read" in (record.value or b""):
            crash()
        return real_check(record, *rest)

    def load(settings: Any) -> Any:
        name, _ = real_loader(settings)
        return name, lambda: DeadlyEcho(name=name, slots=8, step_s=settings.engine.echo_step_s)

    intake.check_record = check
    wiring.engine_loader = load
    return child.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
