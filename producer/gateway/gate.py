"""What the handlers share, and the checks that come before a job is published."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from arriero.producer.client import Client
from arriero.producer.gateway.metrics import GatewayMetrics
from arriero.schemas.clock import Clock
from arriero.schemas.errors import ArrieroError, BadJob, JobNotFound, NoLiveWorker
from arriero.schemas.job import CLASSES, ID_PATTERN, PriorityClass

CLASS_HEADER: Final = "x-arriero-class"
JOB_HEADER: Final = "x-arriero-job"
DEADLINE_HEADER: Final = "x-arriero-deadline"
KEY_HEADER: Final = "Idempotency-Key"
ABANDON_S: Final = 5.0
"""How long the cancel of an abandoned job is tried."""

log = structlog.get_logger(__name__)


class Gate:
    """The client and what hangs on it. One an app."""

    def __init__(self, client: Client, clock: Clock, registry: CollectorRegistry) -> None:
        self.client = client
        self.clock = clock
        self.registry = registry
        self.metrics = GatewayMetrics(registry)
        self.stopping = False
        """Connections that end now are ended by us."""
        self._abandoning: set[asyncio.Task[None]] = set()

    async def serving_model(self, model: str | None) -> str:
        """The name under which a live worker serves the model. Raises NoLiveWorker, BadJob(unknown_model)."""
        try:
            await self.client.require_worker()
        except NoLiveWorker as error:
            raise NoLiveWorker(f"no worker of the pool {self.client.pool} is alive; try again later") from error
        names = await self.models()
        if model is None:
            return next(iter(names), "")
        if names and model not in names:
            served = ", ".join(f"`{name}`" for name in names)
            raise BadJob(
                f"model `{model[:100]}` is not served here; there are {served}", code="unknown_model", field="model"
            )
        return model

    async def models(self) -> dict[str, int]:
        """The models that live workers serve, and since when (Unix milliseconds)."""
        since: dict[str, int] = {}
        for worker in await self.client.workers():
            for name in worker.models:
                since[name] = min(worker.started_ms, since.get(name, worker.started_ms))
        return since

    def abandon(self, job_id: str) -> None:
        """Cancel a job whose caller has hung up; unless it is us who hang up, for then the caller may come back."""
        if self.stopping:
            return
        task = asyncio.create_task(self._cancel(job_id), name=f"abandon {job_id}")
        self._abandoning.add(task)
        task.add_done_callback(self._abandoning.discard)

    async def _cancel(self, job_id: str) -> None:
        try:
            async with asyncio.timeout(ABANDON_S):
                await self.client.cancel(job_id, reason="the caller hung up")
            self.metrics.abandoned.inc()
            log.info("job_abandoned", job_id=job_id)
        except (ArrieroError, TimeoutError) as error:
            log.warning("abandoned_job_runs_on", job_id=job_id, error=str(error))

    async def close(self) -> None:
        if self._abandoning:
            await asyncio.wait(self._abandoning)


GATE: Final = web.AppKey("gate", Gate)


def job_id_of(request: web.Request) -> str:
    """The job a path names. Raises JobNotFound for what can be no job's id."""
    job_id = request.match_info["job_id"]
    if not ID_PATTERN.match(job_id):
        raise JobNotFound("a job's id is 1 to 200 of the characters A-Z a-z 0-9 . _ : ~ -")
    return job_id


def idempotency_key(request: web.Request) -> str | None:
    key = request.headers.get(KEY_HEADER)
    if key is not None and not ID_PATTERN.match(key):
        raise BadJob(
            f"the header {KEY_HEADER} must be 1 to 200 of the characters A-Z a-z 0-9 . _ : ~ -",
            code="bad_id",
            field=KEY_HEADER,
        )
    return key


def priority_of(request: web.Request) -> PriorityClass:
    asked = request.headers.get(CLASS_HEADER, "interactive")
    for priority in CLASSES:
        if asked == priority:
            return priority
    raise BadJob(f"the header {CLASS_HEADER} must be one of {', '.join(CLASSES)}", field=CLASS_HEADER)


def deadline_of(request: web.Request) -> float | None:
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise BadJob(f"the header {DEADLINE_HEADER} must be a time in Unix seconds", field=DEADLINE_HEADER) from error
