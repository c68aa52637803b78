"""A supervised child: `python -m arriero.ops.child ROLE`, the settings as JSON in ARRIERO_CHILD_SETTINGS."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from arriero.ops import wiring
from arriero.ops.crashes import ENGINE_DIED, tell_faults
from arriero.ops.logging import configure
from arriero.ops.settings import Settings, from_json, to_json
from arriero.ops.signals import StopRequest, stop_signals
from arriero.ops.supervisor import CRASHES_VARIABLE, FLIGHT_VARIABLE, KILL_AFTER_S, ChildSpec, Report
from arriero.schemas.errors import ArrieroError, EngineError
from arriero.transports import failpoints

Role = Callable[[Settings, wiring.Ready, StopRequest], Awaitable[None]]
ROLES: Final[dict[str, Role]] = {
    "worker": wiring.run_worker,
    "bare-worker": partial(wiring.run_worker, bare=True),
    "projector": wiring.run_projector,
    "relay": wiring.run_relay,
    "gateway": wiring.run_gateway,
}
SETTINGS_VARIABLE: Final = "ARRIERO_CHILD_SETTINGS"

FAILPOINTS_VARIABLE: Final = "ARRIERO_FAILPOINTS"
"""For crash tests: `NAME:COUNT,...` kills this child when it reaches one of these points for the COUNT-th time."""

GC_THRESHOLDS: Final = (50_000, 20, 20)
"""Python's own look for cycles after every 700 new objects: a sixth of a busy worker's time."""

log = structlog.get_logger(__name__)


def spec(role: str, settings: Settings, *, log_folder: bool) -> ChildSpec:
    """How to start a role as a child."""
    return ChildSpec(
        role=role,
        arguments=("-m", "arriero.ops.child", role),
        environment={SETTINGS_VARIABLE: to_json(settings)},
        log_file=settings.data / "logs" / f"{role}.log" if log_folder else None,
        grace_s=settings.grace_s if role == "worker" else 0.0,
        watchdog_s=settings.watchdog_s if role == "worker" else 0.0,
    )


def main(arguments: list[str]) -> int:
    (role,) = arguments
    settings = from_json(os.environ.pop(SETTINGS_VARIABLE))
    flight = os.environ.pop(FLIGHT_VARIABLE, "")
    settings = msgspec.structs.replace(
        settings, flight=Path(flight) if flight else None, crashes=os.environ.pop(CRASHES_VARIABLE, "[]")
    )
    configure(as_json=settings.log_json, debug=settings.debug)
    _arm(os.environ.pop(FAILPOINTS_VARIABLE, ""))
    life = _Life(role, settings)
    try:
        with tell_faults(settings.flight):
            asyncio.run(life.run())
    except ArrieroError as error:
        log.error("stopped", role=role, code=error.code, error=error.message, exc_info=settings.debug)
        # What goes wrong in a child that has worked is not a matter of its settings: the next one may work again.
        life.report.error(error.message, fatal=not (error.retriable or life.ready))
        return ENGINE_DIED if life.ready and isinstance(error, EngineError) else 1
    except Exception:
        log.error("died", role=role, exc_info=True)
        return 1
    return 0


def _arm(text: str) -> None:
    def strike(point: str) -> None:
        log.warning("failpoint", point=point)
        os.kill(os.getpid(), signal.SIGKILL)

    if text:
        points = (item.partition(":") for item in text.split(","))
        failpoints.arm({name: int(count or 1) for name, _, count in points}, strike)


class _Life:
    def __init__(self, role: str, settings: Settings) -> None:
        self.report = Report()
        self.ready = False
        self._role = role
        self._settings = settings
        self._request = StopRequest()

    async def run(self) -> None:
        self.report.watch(self._orphaned)
        with contextlib.ExitStack() as stack:

            def say_ready(**info: object) -> None:
                # What is there now stays. Of what comes next to nothing is a cycle: looking for them seldom is enough.
                gc.collect()
                gc.freeze()
                gc.set_threshold(*GC_THRESHOLDS)
                # Until now it held nothing that needs an end, and SIGTERM killed it: loading cannot be interrupted.
                stack.enter_context(stop_signals(self._request))
                self.ready = True
                self.report.ready(**info)
                log.info("ready", role=self._role, pid=os.getpid(), **info)

            log.info("starting", role=self._role, pid=os.getpid())
            await ROLES[self._role](self._settings, say_ready, self._request)
        log.info("stopped", role=self._role)

    def _orphaned(self) -> None:
        """The supervisor is gone: end as if it had asked for it, and surely."""
        log.warning("supervisor_lost", role=self._role)
        if not self.ready:
            os._exit(1)
        self._request.note()
        asyncio.get_running_loop().call_later(self._settings.grace_s + KILL_AFTER_S, os._exit, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
