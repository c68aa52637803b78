"""up, worker, projector, relay, gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from arriero.ops import stack
from arriero.ops.cli import options
from arriero.ops.devices import take_inventory, worker_per_gpu
from arriero.ops.logging import configure
from arriero.ops.settings import Settings, writable
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import Child, ChildSpec, Supervisor
from arriero.ops.wiring import need

STATUS_EVERY_S = 1.0


@click.command()
@options.connection
@options.engine
@options.server
@options.worker
@options.gateway
def up(**flags: Any) -> None:
    """Start worker, projector, relay and gateway on this machine, and keep them running until Ctrl-C.

    Without --kafka and --redis, queue and token bus live in the data folder, and no other program is needed. Other
    terminals reach the stack through the same folder. Logs go to files in it.

    \b
        arriero up                            the demo's model, on the default folder
        arriero up --model mine.gguf --slots 8
        arriero up --data /srv/llm --port 9000
        arriero up --kafka host:9092 --redis redis://host:6379
    """
    settings = options.make_settings(flags)
    for parts in _PARTS.values():
        need(*parts)
    with stack.only_one(settings.data):
        _find_model(settings)
        logs = writable(settings.data / "logs")
        configure(as_json=settings.log_json is not False, debug=settings.debug, file=logs / "supervisor.log")
        asyncio.run(_up(msgspec.structs.replace(settings, log_json=settings.log_json is not False)))


@click.command()
@options.connection
@options.engine
@options.server
@options.worker
@options.metrics
@click.option(
    "--per-gpu", is_flag=True, help="One for each GPU, which sees no other; ports of metrics follow each other."
)
def worker(per_gpu: bool, **flags: Any) -> None:
    """Run one worker: a supervisor and its child, restarted when it dies.

    A pool grows by starting more of these, up to the partitions of its topics. SIGTERM or Ctrl-C: no more jobs are
    taken, those that run get --grace seconds to end, the rest is left to other workers.

    With --per-gpu their metrics are at --metrics-port and the ports that follow.

    \b
        arriero worker --kafka host:9092 --redis redis://host:6379 --model mine.gguf
        arriero worker --per-gpu --metrics-port 9100 ...
    """
    _run_one("worker", flags, per_gpu=per_gpu)


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
@options.metrics
def relay(**flags: Any) -> None:
    """Run a pool's relay: it puts jobs whose attempt failed back into the queue when they are due. One is enough."""
    _run_one("relay", flags)


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


def _run_one(role: str, flags: dict[str, Any], *, per_gpu: bool = False) -> None:
    settings = options.make_settings(flags)
    configure(as_json=settings.log_json, debug=settings.debug)
    need(*_PARTS[role])
    if role == "worker":
        _find_model(settings)
    roles: list[str | ChildSpec] = [role]
    if per_gpu:
        roles = [*worker_per_gpu(settings, len(take_inventory().gpus), os.environ)]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    tell = _Teller(console)
    asyncio.run(stack.run_roles(settings, roles, log_folder=False, tell=tell, changed=tell.restarts))


_PARTS: Final = {
    "worker": ("worker", "prometheus_client"),
    "projector": ("worker", "prometheus_client"),
    "relay": ("worker", "prometheus_client"),
    "gateway": ("gateway", "aiohttp"),
}


def _find_model(settings: Settings) -> None:
    """Find or fetch the model here, where it can be seen. Raises ModelError for a file that cannot be used."""
    if settings.engine.engine == "echo":
        return
    for module in ("numpy", "jinja2", "llama_cpp"):
        need("worker", module, load=False)
    from arriero.ops import models
    from arriero.ops.cli.models import fetch_with_progress

    known = models.find(settings.engine.model)
    if known is not None:
        fetch_with_progress(known, settings.cache)
    else:
        models.inspect(models.resolve(settings.engine.model, settings.cache).path)


async def _up(settings: Settings) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    screen = _Screen(settings, _Teller(console))
    await stack.run_roles(
        settings, stack.UP_ROLES, log_folder=True, tell=screen.tell, changed=screen.changed, beside=screen.start
    )
    screen.tell("stopped; what was not finished stays queued")


class _Teller:
    """Prints sentences. A terminal that has been closed is not a reason to stop."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, sentence: str, style: str | None = None) -> None:
        with contextlib.suppress(OSError):
            self.console.print(sentence, style=style, markup=False)

    def restarts(self, child: Child) -> None:
        if child.state == "restarting":
            self(f"the {child.spec.role} is started again: {child.why}")


class _Screen:
    """What `up` shows: what happens, and on a terminal a line at the bottom that says how things are."""

    def __init__(self, settings: Settings, tell: _Teller) -> None:
        self._settings = settings
        self.tell = tell
        self._restarted: set[str] = set()

    def changed(self, child: Child) -> None:
        role = child.spec.role
        if child.state == "restarting":
            self._restarted.add(role)
            self.tell(f"the {role} is started again: {child.why} (see {self._settings.data / 'logs' / role}.log)")
        elif child.state == "ready" and role in self._restarted:
            self._restarted.discard(role)
            self.tell(f"the {role} works again")

    def start(self, supervisor: Supervisor, request: StopRequest) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(supervisor, request), name="screen")

    async def _run(self, supervisor: Supervisor, request: StopRequest) -> None:
        settings = self._settings
        asked = asyncio.create_task(request.asked.wait(), name="stop asked")
        status: asyncio.Task[None] | None = None
        self.tell(f"starting on {settings.data if settings.kafka is None else settings.kafka} ...")
        starting = asyncio.create_task(_all_ready(supervisor), name="all ready")
        try:
            await asyncio.wait([asked, starting], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._say_ready(supervisor)
                if self.tell.console.is_terminal:
                    status = asyncio.create_task(self._show_status(supervisor), name="status line")
            await asked
        finally:
            starting.cancel()
            asked.cancel()
            if status is not None:
                status.cancel()
                await asyncio.gather(status, return_exceptions=True)
        self.tell("stopping: running jobs get their grace period; Ctrl-C again stops at once")

    def _say_ready(self, supervisor: Supervisor) -> None:
        settings = self._settings
        info = {key: value for child in supervisor.children for key, value in child.info.items()}
        address = f" {settings.address}" if settings.address else ""
        self.tell(f"ready: {info['model']} on {info['device']}, {info['slots']} slots; gateway {info['url']}")
        self.tell(f"logs in {settings.data / 'logs'}; in another terminal:")
        self.tell(f'    arriero submit{address} "Why do mules follow a mare?"')
        self.tell("Ctrl-C stops all", style="dim")

    async def _show_status(self, supervisor: Supervisor) -> None:
        from arriero.ops.status import Pulse

        async with Pulse(self._settings) as pulse:
            # It is drawn only when it has changed: a thread that draws anyway would cost more than all the rest.
            with Live(Text(), console=self.tell.console, auto_refresh=False, transient=True) as live:
                told = ""
                while True:
                    absent = [f"{one.spec.role} {one.state}" for one in supervisor.children if one.state != "ready"]
                    now = " | ".join([*(absent or ["all ready"]), await pulse.line()])
                    if now != told:
                        told = now
                        live.update(Text(now, no_wrap=True, overflow="ellipsis"), refresh=True)
                    await asyncio.sleep(STATUS_EVERY_S)


async def _all_ready(supervisor: Supervisor) -> None:
    for child in supervisor.children:
        await child.became_ready.wait()
