"""A supervised child: `python -m arriero.ops.child ROLE SETTINGS`, the settings as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from arriero.ops import wiring
from arriero.ops.logging import configure
from arriero.ops.settings import Settings, from_json, to_json
from arriero.ops.signals import StopRequest, stop_signals
from arriero.ops.supervisor import ChildSpec, Report, die_with_parent
from arriero.schemas.errors import ArrieroError

Role = Callable[[Settings, wiring.Ready, StopRequest], Awaitable[None]]
ROLES: Final[dict[str, Role]] = {
    "worker": wiring.run_worker,
    "projector": wiring.run_projector,
    "gateway": wiring.run_gateway,
}

log = structlog.get_logger(__name__)


def spec(role: str, settings: Settings, *, log_folder: bool) -> ChildSpec:
    """How to start a role as a child."""
    return ChildSpec(
        role=role,
        arguments=("-m", "arriero.ops.child", role, to_json(settings)),
        log_file=settings.data / "logs" / f"{role}.log" if log_folder else None,
        grace_s=settings.grace_s if role == "worker" else 0.0,
    )


def main(arguments: list[str]) -> int:
    role, text = arguments
    settings = from_json(text)
    configure(as_json=settings.log_json, debug=settings.debug)
    report = Report()
    if report.supervised:
        die_with_parent()
    try:
        asyncio.run(_run(role, settings, report))
    except ArrieroError as error:
        log.error("stopped", role=role, code=error.code, error=error.message, exc_info=settings.debug)
        if not error.retriable:
            report.fatal(error.message)
        return 1
    return 0


async def _run(role: str, settings: Settings, report: Report) -> None:
    with stop_signals() as request:
        await ROLES[role](settings, report.ready, request)
    log.info("stopped", role=role)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
