"""up, worker, projector, gateway."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from arriero.ops import stack
from arriero.ops.cli import options
from arriero.ops.logging import configure
from arriero.ops.settings import Settings
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import Supervisor
from arriero.ops.wiring import need

STATUS_EVERY_S = 1.0


@click.command()
@options.connection
@options.engine
@options.server
@options.worker
@options.gateway
def up(**flags: Any) -> None:
    """Start worker, projector and gateway on this machine, and keep them running until Ctrl-C.

    Without --kafka and --redis, queue and token bus live in the data folder, and no other program is needed. Other
    terminals reach the stack through the same folder. Logs go to files in it.

    \b
        arriero up                            the demo's model, on the default folder
        arriero up --model mine.gguf --slots 8
        arriero up --data /srv/llm --port 9000
        arriero up --kafka host:9092 --redis redis://host:6379
    """
    settings = options.make_settings(flags)
    _check_parts(settings)
    with stack.only_one(settings.data):
        _fetch_model(settings)
        asyncio.run(_up(msgspec.structs.replace(settings, log_json=settings.log_json is not False)))


@click.command()
@options.connection
@options.engine
@options.server
@options.worker
@options.metrics
def worker(**flags: Any) -> None:
    """Run one worker: a supervisor and its child, restarted when it dies.

    A pool grows by starting more of these, up to the partitions of its topics. SIGTERM or Ctrl-C: no more jobs are
    taken, those that run get --grace seconds to end, the rest is left to other workers.

    \b
        arriero worker --kafka host:9092 --redis redis://host:6379 --model mine.gguf
    """
    _run_one("worker", flags)


@click.command()
@options.connection
@options.server
@options.metrics
def projector(**flags: Any) -> None:
    """Run the projector: it keeps job states and ends token streams. One is enough; a second takes over at once."""
    _run_one("projector", flags)


@click.command()
@options.connection
@options.server
@options.gateway
def gateway(**flags: Any) -> None:
    """Run the HTTP gateway: an OpenAI-compatible door to the queue.

    \b
        curl localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
             -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'
    """
    _run_one("gateway", flags)


def _run_one(role: str, flags: dict[str, Any]) -> None:
    settings = options.make_settings(flags)
    configure(as_json=settings.log_json, debug=settings.debug)
    asyncio.run(stack.run_roles(settings, [role], log_folder=False))


def _check_parts(settings: Settings) -> None:
    """What would make a child fail at once is said before anything starts."""
    need("gateway", "aiohttp")
    need("worker", "prometheus_client")
    if settings.engine.engine == "llama":
        need("worker", "llama_cpp")


def _fetch_model(settings: Settings) -> None:
    """Fetch the model here, where its progress can be seen; raises ModelError for a file that cannot be used."""
    if settings.engine.engine == "echo":
        return
    from arriero.ops import models
    from arriero.ops.cli.models import fetch_with_progress

    known = models.find(settings.engine.model)
    if known is not None:
        fetch_with_progress(known, settings.cache)
    else:
        models.inspect(models.resolve(settings.engine.model, settings.cache).path)


async def _up(settings: Settings) -> None:
    console = Console(stderr=True)
    line = _StatusLine(settings, console)
    await stack.run_roles(settings, stack.UP_ROLES, log_folder=True, beside=line.start)
    console.print("stopped; what was not finished stays queued")


class _StatusLine:
    """One line at the bottom of the terminal; elsewhere a sentence when something changes."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console

    def start(self, supervisor: Supervisor, request: StopRequest) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(supervisor, request), name="status line")

    async def _run(self, supervisor: Supervisor, request: StopRequest) -> None:
        from arriero.ops.status import Pulse

        settings = self._settings
        starting = [asyncio.create_task(child.became_ready.wait()) for child in supervisor.children]
        self._console.print(f"starting on {settings.data if settings.kafka is None else settings.kafka} ...")
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        info = {key: value for child in supervisor.children for key, value in child.info.items()}
        self._console.print(f"ready: {info['model']} on {info['device']}, {info['slots']} slots; gateway {info['url']}")
        self._console.print(f"logs in {settings.data / 'logs'}; in another terminal:")
        self._console.print(f'    arriero submit {settings.address} "Why do mules follow a mare?"', highlight=False)
        self._console.print("Ctrl-C stops all", style="dim")
        live = Live(Text(), console=self._console, refresh_per_second=2, transient=True)
        terminal = self._console.is_terminal
        async with Pulse(settings) as pulse:
            with live if terminal else contextlib.nullcontext():
                asked = asyncio.create_task(request.asked.wait(), name="stop asked")
                told = ""
                try:
                    while not request.asked.is_set():
                        parts = [f"{child.spec.role} {child.state}" for child in supervisor.children]
                        if terminal:
                            live.update(Text(" | ".join([*parts, await pulse.line()])))
                        elif told != (told := ", ".join(parts)):
                            self._console.print(told)
                        await asyncio.wait([asked], timeout=STATUS_EVERY_S)
                finally:
                    asked.cancel()
        self._console.print("stopping: running jobs get their grace period; Ctrl-C again stops at once")
