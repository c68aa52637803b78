"""`arriero up`: projector, relay, worker and gateway as supervised children on one machine; `arriero worker` and the
like as one supervised child."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import structlog

from arriero.ops import child, wiring
from arriero.ops.crashes import publish
from arriero.ops.settings import Settings, writable
from arriero.ops.signals import StopRequest, stop_signals
from arriero.ops.supervisor import Child, ChildSpec, Supervisor
from arriero.schemas.clock import SystemClock, system_random
from arriero.schemas.errors import BusUnavailable, LogUnavailable, SetupError

WAIT_POLL_S: Final = 0.5
log = structlog.get_logger(__name__)

UP_ROLES: Final = ("projector", "relay", "worker", "gateway")
"""In the order of starting. They stop in reverse: no new requests first, and the ends of streams last."""


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the folder for one `up`. Raises SetupError when another runs there."""
    path = writable(folder) / "up.lock"
    try:
        lock = path.open("a+")
    except OSError as error:
        raise SetupError(
            f"the data folder {folder} cannot be used: {path.name}: {error.strerror}", code="data_folder_unwritable"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"a stack is running on {folder} already (process {_pid(lock)}); use that one, or give this one a "
                "folder of its own with --data (with --kafka, too: its logs lie there)",
                code="data_folder_busy",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _pid(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "unknown"


async def run_roles(
    settings: Settings,
    roles: Sequence[str | ChildSpec],
    *,
    log_folder: bool,
    tell: Callable[[str], None] = lambda sentence: None,
    changed: Callable[[Child], None] = lambda child: None,
    beside: Callable[[Supervisor, StopRequest], asyncio.Task[None] | None] = lambda supervisor, request: None,
) -> None:
    """Run these roles (or children, as they are) supervised until Ctrl-C or SIGTERM. `beside` may start a task that
    lives as long.

    Log and bus are waited for as long as the settings say; `tell` is told of it. Raises LogUnavailable, BusUnavailable,
    TopicFault when they are not there by then (later their absence is waited out), SetupError with a child's own
    sentence when no restart can help it.
    """
    if log_folder:
        writable(settings.data / "logs")
    specs = [child.spec(role, settings, log_folder=log_folder) if isinstance(role, str) else role for role in roles]
    supervisor = Supervisor(
        specs,
        clock=SystemClock(),
        rng=system_random(),
        changed=changed,
        crashed=partial(publish, settings, settings.worker or wiring.worker_name(os.getpid())),
    )
    with stop_signals() as request:
        if not await _finished(_prepare(settings, tell), request):
            return
        task = beside(supervisor, request)
        try:
            await supervisor.run(request)
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])


async def _prepare(settings: Settings, tell: Callable[[str], None]) -> None:
    """See that log and bus answer; they may come late."""
    clock, told = SystemClock(), False
    deadline = clock.monotonic() + settings.wait_s
    while True:
        try:
            await wiring.prepare(settings)
        except (LogUnavailable, BusUnavailable) as error:
            left_s = deadline - clock.monotonic()
            if left_s <= 0:
                raise
            if not told:
                tell(f"{error.message}; waiting up to {settings.wait_s:.0f} s for it")
                log.warning("brokers_waited_for", code=error.code, error=error.message, wait_s=settings.wait_s)
                told = True
            await asyncio.sleep(min(WAIT_POLL_S, left_s))
        else:
            return


async def _finished(work: Coroutine[Any, Any, None], request: StopRequest) -> bool:
    """Do this unless a stop is requested before it is done. Raises what it raises."""
    doing = asyncio.create_task(work, name="prepare")
    asked = asyncio.create_task(request.asked.wait(), name="stop request")
    try:
        await asyncio.wait([doing, asked], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        doing.result()
        return True
    finally:
        for task in (doing, asked):
            task.cancel()
        await asyncio.wait([doing, asked])
