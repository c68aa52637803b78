"""Puts the parts together: the only place where the machine's clock and randomness enter.

Each role is a coroutine that says when it is ready and returns when a stop is requested. What only some roles need
(llama.cpp, numpy, aiohttp) is imported by those alone, so that a client's installation stays small.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import structlog

from arriero.ops.settings import PARTITIONS_DEFAULT, EngineSettings, Settings
from arriero.ops.signals import StopRequest
from arriero.producer.client import Client
from arriero.schemas.clock import SystemClock, now_ms, system_random
from arriero.schemas.errors import SetupError, TopicFault
from arriero.schemas.state import JobState
from arriero.transports.bus import TokenBus
from arriero.transports.connect import make_bus, make_log
from arriero.transports.log import JobLog

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from arriero.workers.engine.runner import EngineRunner
    from arriero.workers.engine.seam import Backend, StepReport
    from arriero.workers.flight import FlightRecorder
    from arriero.workers.worker import Worker

log = structlog.get_logger(__name__)

Ready = Callable[..., None]
"""Called once with what the role has to say of itself."""


def need(extra: str, module: str, *, load: bool = True) -> Any:
    """Import a module of an optional extra, or only see that it is there. Raises SetupError(missing_extra)."""
    try:
        if load:
            return importlib.import_module(module)
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"no module {module}", name=module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("arriero"):
            raise
        raise SetupError(
            f"this needs the package {error.name}: pip install 'arriero[{extra}]'", code="missing_extra"
        ) from error


@asynccontextmanager
async def open_log(settings: Settings, client: str) -> AsyncIterator[JobLog]:
    job_log = make_log(
        settings.endpoints, names=settings.names, clock=SystemClock(), rng=system_random(), client=f"arriero-{client}"
    )
    async with job_log:
        yield job_log


@asynccontextmanager
async def open_bus(settings: Settings) -> AsyncIterator[TokenBus]:
    async with make_bus(settings.endpoints, names=settings.names, clock=SystemClock()) as bus:
        yield bus


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[Client]:
    """A client whose topics exist and whose bus answers. Raises LogUnavailable, BusUnavailable, TopicFault."""
    async with open_log(settings, "client") as job_log, open_bus(settings) as bus:
        await bus.check()
        await ensure_topics(job_log, settings)
        async with Client(namespace=settings.namespace, pool=settings.pool, log=job_log, bus=bus) as client:
            yield client


async def ensure_topics(job_log: JobLog, settings: Settings) -> None:
    """Make what is missing; topics that are there keep their partition counts unless one is asked for."""

    async def count(topic: str) -> int:
        if settings.partitions is not None:
            return settings.partitions
        try:
            return await job_log.partitions(topic)
        except TopicFault:
            return PARTITIONS_DEFAULT

    names = settings.names
    jobs = await count(names.job_topics(settings.pool)[0])
    events = await count(names.events)
    await job_log.ensure(settings.topics(jobs, events))


async def prepare(settings: Settings) -> None:
    """See that log and bus answer, and make the topics that are missing.

    Raises LogUnavailable, BusUnavailable, TopicFault, SetupError.
    """
    async with open_log(settings, "setup") as job_log, open_bus(settings) as bus:
        await bus.check()
        await ensure_topics(job_log, settings)


# --- roles -------------------------------------------------------------------------------------------------


async def run_worker(settings: Settings, ready: Ready, request: StopRequest, *, bare: bool = False) -> None:
    """bare: without what recovery costs, for a benchmark.

    Raises ModelError, SetupError, LogUnavailable, EngineError.
    """
    need("worker", "prometheus_client")
    from arriero.workers.flight import FlightRecorder

    with FlightRecorder(settings.flight) as recorder:
        async with open_log(settings, "worker") as job_log, open_bus(settings) as bus:
            await ensure_topics(job_log, settings)
            if bare:
                from arriero.ops.bench.bare import SilentBus, TerseLog

                job_log, bus = cast(JobLog, TerseLog(job_log)), cast(TokenBus, SilentBus(bus))
            worker = make_worker(settings, job_log, bus, recorder)
            async with worker:
                info = worker.info
                ready(model=info.models[0], slots=info.slots, device=info.device)
                stopping = asyncio.create_task(_drain_when_asked(worker, settings.grace_s, request), name="drain")
                try:
                    await worker.run()
                finally:
                    stopping.cancel()
                    await asyncio.wait([stopping])


def make_worker(settings: Settings, job_log: JobLog, bus: TokenBus, recorder: FlightRecorder) -> Worker:
    """Raises ModelError, SetupError."""
    from arriero.workers.worker import Worker, WorkerSettings

    name, load = engine_loader(settings)
    return Worker(
        job_log,
        bus,
        lambda on_step: make_runner(settings.engine, load, on_step, recorder),
        names=settings.names,
        pool=settings.pool,
        name=settings.worker or worker_name(),
        model_names=[name],
        clock=SystemClock(),
        rng=system_random(),
        settings=WorkerSettings(max_attempts=settings.max_attempts),
        recorder=recorder,
        crashes=msgspec.json.decode(settings.crashes, type=list[JobState]),
        registry=serve_metrics(settings),
    )


async def _drain_when_asked(worker: Worker, grace_s: float, request: StopRequest) -> None:
    await request.asked.wait()
    drain = asyncio.create_task(worker.drain(grace_s), name="drain by grace")
    pressed = asyncio.create_task(request.pressed.wait(), name="second stop request")
    try:
        await asyncio.wait([drain, pressed], return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            await worker.drain(0.0)
    finally:
        for task in (drain, pressed):
            task.cancel()
        await asyncio.wait([drain, pressed])


async def run_projector(settings: Settings, ready: Ready, request: StopRequest) -> None:
    need("worker", "prometheus_client")
    from arriero.workers.projector import Projector

    registry = serve_metrics(settings)
    async with open_log(settings, "projector") as job_log, open_bus(settings) as bus:
        await ensure_topics(job_log, settings)
        projector = Projector(
            job_log,
            bus,
            names=settings.names,
            pools=[settings.pool],
            clock=SystemClock(),
            rng=system_random(),
            registry=registry,
        )
        ready()
        await _until_asked(projector.run(), request)


async def run_relay(settings: Settings, ready: Ready, request: StopRequest) -> None:
    """Raises LogUnavailable, TopicFault."""
    need("worker", "prometheus_client")
    from arriero.workers.relay import Relay

    registry = serve_metrics(settings)
    async with open_log(settings, "relay") as job_log:
        await ensure_topics(job_log, settings)
        relay = Relay(
            job_log,
            names=settings.names,
            pool=settings.pool,
            name=f"relay-{worker_name()}",
            clock=SystemClock(),
            registry=registry,
        )
        ready()
        await _until_asked(relay.run(), request)


async def run_gateway(settings: Settings, ready: Ready, request: StopRequest) -> None:
    """Raises SetupError(port_in_use)."""
    gateway = need("gateway", "arriero.producer.gateway")
    async with open_log(settings, "gateway") as job_log, open_bus(settings) as bus:
        await ensure_topics(job_log, settings)
        client = Client(namespace=settings.namespace, pool=settings.pool, log=job_log, bus=bus)
        async with client, gateway.serve(gateway.make_app(client), settings.host, settings.port) as port:
            ready(url=f"http://{settings.host}:{port}")
            await request.asked.wait()


async def _until_asked(work: Any, request: StopRequest) -> None:
    """Run `work`, which never ends by itself, until a stop is requested; raises what it died of."""
    task = asyncio.create_task(work, name="work")
    asked = asyncio.create_task(request.asked.wait(), name="stop request")
    try:
        await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for one in (task, asked):
            one.cancel()
        await asyncio.wait([task, asked])


# --- parts -------------------------------------------------------------------------------------------------


def worker_name(supervisor: int | None = None) -> str:
    """Names one worker of this host: its supervisor outlives its children, so they keep the name."""
    return f"{socket.gethostname()}-{supervisor or os.getppid()}"


def engine_loader(settings: Settings) -> tuple[str, Callable[[], Backend]]:
    """The model's name, and what loads it in the engine's thread. Raises ModelError, SetupError."""
    engine = settings.engine
    if engine.engine == "echo":
        from arriero.workers.engine.echo import EchoBackend

        name = engine.model_name or "echo"
        slots = engine.slots or 64
        return name, lambda: EchoBackend(
            name=name, slots=slots, step_s=engine.echo_step_s, fail_every=engine.echo_fail_every
        )
    need("worker", "numpy")
    need("worker", "jinja2")
    need("worker", "llama_cpp")
    from arriero.ops import models
    from arriero.workers.engine.llama.backend import LlamaBackend
    from arriero.workers.engine.llama.model import LlamaSettings

    known = models.find(engine.model)
    if known is not None:
        models.fetch(known, settings.cache, _log_progress())
    resolved = models.resolve(engine.model, settings.cache, name=engine.model_name)
    llama = LlamaSettings(
        path=resolved.path,
        name=resolved.name,
        slots=engine.slots,
        n_ctx=engine.ctx,
        n_batch=engine.batch,
        threads=engine.threads,
        gpu_layers=engine.gpu_layers,
        main_gpu=engine.main_gpu,
        split_mode=engine.split_mode,
        tensor_split=engine.tensor_split,
        flash_attn=engine.flash_attn,
        draft_tokens=engine.draft_tokens,
        prefix_cache=engine.prefix_cache,
        type_k=engine.kv_type,
        type_v=engine.kv_type,
    )
    return resolved.name, lambda: LlamaBackend(llama, SystemClock())


def make_runner(
    engine: EngineSettings,
    load: Callable[[], Backend],
    on_step: Callable[[StepReport], None],
    recorder: FlightRecorder,
) -> EngineRunner:
    from arriero.workers.engine.runner import EngineRunner

    threads = 0 if engine.engine == "echo" else 2
    return EngineRunner(
        load, on_step, SystemClock(), chunk_tokens=engine.chunk, prepare_threads=threads, recorder=recorder
    )


def serve_metrics(settings: Settings) -> CollectorRegistry:
    """A registry, served over HTTP where a port is given. Raises SetupError(port_in_use)."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    if settings.metrics_port is not None:
        try:
            start_http_server(settings.metrics_port, addr=settings.metrics_host, registry=registry)
        except OSError as error:
            raise SetupError(
                f"metrics cannot be served on {settings.metrics_host}:{settings.metrics_port}: {error.strerror}; "
                "give another --metrics-port",
                code="port_in_use",
            ) from error
    return registry


def _log_progress() -> Callable[[str, int, int], None]:
    """Progress of a download as log entries, one a step and every ten seconds."""
    clock = SystemClock()
    last = ("", 0)

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        moment = now_ms(clock)
        if what != last[0] or moment - last[1] > 10_000:
            last = (what, moment)
            log.info("model_fetch", step=what, done_bytes=done, total_bytes=total)

    return tell
