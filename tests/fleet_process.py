"""A worker in a process of its own, to be killed: `fleet_process.py NAMESPACE NAME STEP_S DATA|KAFKA [REDIS]`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from fleet import Fleet

from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints


async def main(namespace: str, name: str, step_s: str, *where: str) -> None:
    endpoints = Endpoints(data=Path(where[0])) if len(where) == 1 else Endpoints(kafka=where[0], redis=where[1])
    async with AsyncExitStack() as stack:
        fleet = Fleet(endpoints, Names(namespace), stack)
        fleet.log, fleet.bus = await fleet.open_log(), await fleet.open_bus()
        worker = await stack.enter_async_context(fleet.make_worker(name, step_s=float(step_s)))
        await worker.run()


asyncio.run(main(*sys.argv[1:]))
