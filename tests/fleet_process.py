"""A worker in a process of its own, to be killed:

    fleet_process.py NAMESPACE NAME STEP_S MODEL|echo DATA|KAFKA [REDIS]

MODEL is the path of a GGUF file, decoded one sequence at a time and in full precision.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from fleet import Fleet

from arriero.schemas.clock import SystemClock
from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints
from arriero.workers.engine.seam import Backend, StepOutcome, StepPlan


async def main(namespace: str, name: str, step_s: str, model: str, *where: str) -> None:
    endpoints = Endpoints(data=Path(where[0])) if len(where) == 1 else Endpoints(kafka=where[0], redis=where[1])
    async with AsyncExitStack() as stack:
        fleet = Fleet(endpoints, Names(namespace), stack)
        fleet.log, fleet.bus = await fleet.open_log(), await fleet.open_bus()
        load = None if model == "echo" else lambda: slow_llama(Path(model), float(step_s))
        worker = await stack.enter_async_context(fleet.make_worker(name, load=load, step_s=float(step_s)))
        await worker.run()


def slow_llama(path: Path, step_s: float) -> Backend:
    """A model whose steps take long enough to be killed between two of them."""
    from arriero.workers.engine.llama.backend import LlamaBackend
    from arriero.workers.engine.llama.model import LlamaSettings

    class Slow(LlamaBackend):
        def step(self, plan: StepPlan) -> StepOutcome:
            time.sleep(step_s)
            return super().step(plan)

    settings = LlamaSettings(
        path=path, name="echo", slots=1, n_ctx=512, threads=1, flash_attn="off", type_k="f32", type_v="f32"
    )
    return Slow(settings, SystemClock())


asyncio.run(main(*sys.argv[1:]))
