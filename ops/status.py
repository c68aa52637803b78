"""What a running stack looks like from outside, in one line."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from typing import Final

from arriero.ops import wiring
from arriero.ops.settings import Settings
from arriero.schemas.codec import decode_worker
from arriero.schemas.errors import ArrieroError
from arriero.schemas.names import parse_job_topic

DISK_LOW_BYTES: Final = 16 << 20
"""Less is as good as none: a transaction and its write-ahead log take a few."""


class Pulse:
    """Reads backlog and presence; both cost a few reads and no subscription."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def __aenter__(self) -> Pulse:
        async with AsyncExitStack() as stack:
            self._log = await stack.enter_async_context(wiring.open_log(self._settings, "status"))
            self._bus = await stack.enter_async_context(wiring.open_bus(self._settings))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def line(self) -> str:
        """`2 running, 5 waiting | queued: interactive 0, standard 3, batch 120`."""
        names, pool = self._settings.names, self._settings.pool
        try:
            workers = [decode_worker(info) for info in (await self._bus.workers(pool)).values()]
            backlog = await self._log.backlog(names.workers_group(pool), names.job_topics(pool))
        except ArrieroError as error:
            return error.message
        full = self._settings.kafka is None and shutil.disk_usage(self._settings.data).free < DISK_LOW_BYTES
        warning = "the disk is full: nothing is accepted or recorded until there is room | " if full else ""
        running = sum(worker.running for worker in workers)
        counts = ", ".join(f"{parse_job_topic(topic).priority} {entry.count}" for topic, entry in backlog.items())
        return f"{warning}{running} running | unsettled: {counts}"
