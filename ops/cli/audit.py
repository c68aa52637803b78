"""audit."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arriero.ops import wiring
from arriero.ops.audit.audit import SHOWN, Auditor
from arriero.ops.audit.audit import audit as take_audit
from arriero.ops.audit.report import Report
from arriero.ops.audit.show import show
from arriero.ops.cli import options
from arriero.ops.logging import configure
from arriero.ops.settings import Settings
from arriero.ops.signals import stop_signals
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import BusUnavailable, LogUnavailable


@click.command()
@options.connection
@click.option(
    "--sample", type=click.IntRange(1), help="Compare one of N jobs with the bus.  [default: by their number]"
)
@click.option("--limit", type=click.IntRange(0), default=SHOWN, show_default=True, help="Breaches told one by one.")
@click.option("--repair", is_flag=True, help="Project states that differ anew. The log is never touched.")
@click.option("--watch", type=click.FloatRange(0.1), metavar="SECONDS", help="Look again and again, until interrupted.")
@options.metrics
@options.as_json
def audit(**flags: Any) -> None:
    """Count from the log whether every promise holds, and compare the bus with it. Exits with 1 when one is broken.

    Workers may go on meanwhile. What looks wrong is looked at again for half a minute before it is called a breach.

    \b
        arriero audit
        arriero audit --json | jq .breaches
        arriero audit --watch 60 --metrics-port 9100     a patrol
        arriero audit --repair                           mend job states on the bus
    """
    settings = options.make_settings(flags)
    configure(as_json=False, debug=settings.debug, quiet=True)
    if not asyncio.run(_audit(settings, flags)):
        sys.exit(1)


async def _audit(settings: Settings, flags: dict[str, Any]) -> bool:
    async with AsyncExitStack() as stack:
        job_log = await stack.enter_async_context(wiring.open_log(settings, "audit"))
        bus = await stack.enter_async_context(wiring.open_bus(settings))
        await bus.check()
        common: dict[str, Any] = {
            "names": settings.names,
            "pools": sorted({settings.pool, *await bus.pools()}),
            "clock": SystemClock(),
            "sample": flags["sample"],
            "shown": flags["limit"],
        }
        if flags["watch"] is not None:
            return await _watch(Auditor(job_log, bus, **common), settings, flags)
        with _bar() as bar:
            task = bar.add_task("reading the log", total=None)
            report = await take_audit(
                job_log,
                bus,
                repair=flags["repair"],
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **common,
            )
    _tell(report, flags)
    return report.holds


async def _watch(auditor: Auditor, settings: Settings, flags: dict[str, Any]) -> bool:
    """Patrols until it is interrupted; true when everything held then."""
    patrol = _Patrol(auditor, settings, flags)
    with stop_signals() as request:
        patrolling = asyncio.create_task(patrol.run(), name="patrol")
        asked = asyncio.create_task(request.asked.wait(), name="stop request")
        try:
            await asyncio.wait([patrolling, asked], return_when=asyncio.FIRST_COMPLETED)
            if patrolling.done():
                patrolling.result()
        finally:
            for task in (patrolling, asked):
                task.cancel()
            await asyncio.wait([patrolling, asked])
    return not patrol.breaches


class _Patrol:
    def __init__(self, auditor: Auditor, settings: Settings, flags: dict[str, Any]) -> None:
        wiring.need("worker", "prometheus_client")
        from arriero.ops.audit.metrics import AuditMetrics

        self.breaches: dict[str, int] | None = None
        """Of the last look."""
        self._metrics = AuditMetrics(wiring.serve_metrics(settings))
        self._auditor = auditor
        self._flags = flags

    async def run(self) -> None:
        """Tells each report whose breaches are news; for machines, each."""
        while True:
            try:
                report = await self._look()
            except (LogUnavailable, BusUnavailable) as error:
                click.echo(f"arriero: {error.message}", err=True)
            else:
                self._metrics.show(report)
                if report.breaches != self.breaches or self._flags["as_json"]:
                    _tell(report, self._flags)
                self.breaches = report.breaches
            await asyncio.sleep(self._flags["watch"])

    async def _look(self) -> Report:
        report = await self._auditor.look()
        if self._flags["repair"] and any(code.startswith("state_") for code in report.breaches):
            await self._auditor.repair()
            report = await self._auditor.look()
        return report


def _tell(report: Report, flags: dict[str, Any]) -> None:
    if flags["as_json"]:
        click.echo(msgspec.json.encode(report))
    else:
        show(report, Console())


def _bar() -> Progress:
    """On standard error, and only where somebody sees it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
