"""dead list, show, replay."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from arriero.ops import wiring
from arriero.ops.cli import options
from arriero.ops.dead import Dead, Replay, Wanted, find, plan_replay, run_replay
from arriero.ops.logging import configure
from arriero.producer.client import Client
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import BadJob, JobNotFound

T = TypeVar("T")

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _moment(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A time as `2h` (so long ago) or in ISO 8601, in Unix milliseconds."""
    if value is None:
        return None
    span = _SPAN.match(value)
    if span:
        return int((SystemClock().time() - float(span[1]) * _SECONDS[span[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r}: 30m, 2h, 7d (ago) or 2026-12-01T10:00 is wanted") from None
    return int(moment.astimezone().timestamp() * 1000)


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--until", "until_ms", callback=_moment, metavar="WHEN", help="Died before: 2h, or a date."),
        click.option("--since", "since_ms", callback=_moment, metavar="WHEN", help="Died since: 2h, or a date."),
        click.option("--reason", help="Given up for this reason."),
    ):
        command = option(command)
    return command


@click.group()
def dead() -> None:
    """Jobs that were given up, and records that were none: list, show and replay them."""


@dead.command("list")
@options.connection
@_filters
@options.as_json
def list_(as_json: bool, **flags: Any) -> None:
    """List dead records in the order in which they died. Their numbers name them to `show` and `replay`."""

    async def run(client: Client) -> list[Dead]:
        return [one async for one in find(client, _wanted(flags))]

    found = _run(run, flags)
    if as_json:
        for one in found:
            click.echo(msgspec.json.encode({"number": one.number, "id": one.id, "record": one.record}))
        return
    table = Table("no.", "died", "job", "reason", "error", "from")
    for one in found:
        record = one.record
        error = f"{record.error.code}: {record.error.message[:80]}"
        table.add_row(str(one.number), _when(record.time_ms), one.id, record.reason, error, str(record.origin))
    Console().print(table)


@dead.command()
@click.argument("name")
@options.connection
def show(name: str, **flags: Any) -> None:
    """Show all of a dead record, as JSON. NAME is its number or the job's id: then the last of that id."""

    async def run(client: Client) -> Dead | None:
        last = None
        async for one in find(client, Wanted(ids=[name])):
            last = one
        return last

    found = _run(run, flags)
    if found is None:
        raise JobNotFound(f"nothing in the dead-letter topic is called {name}; `arriero dead list` shows what is there")
    record = msgspec.to_builtins({"number": found.number, "record": found.record})
    click.echo(msgspec.json.format(msgspec.json.encode(record), indent=2))


@dead.command()
@click.argument("names", nargs=-1)
@options.connection
@_filters
@click.option("--all", "everything", is_flag=True, help="Replay all there is, when nothing else says what.")
@click.option("--again", is_flag=True, help="Also what was replayed before, under yet another id.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def replay(names: tuple[str, ...], everything: bool, again: bool, dry_run: bool, yes: bool, **flags: Any) -> None:
    """Run dead jobs again, each under a new id: `<id>~<number>`, with `replay_of` as its origin.

    NAMES are numbers or ids. What was replayed before is left alone. Deadlines that have passed are dropped.

    \b
        arriero dead replay 17
        arriero dead replay --reason attempts_exhausted --since 2h
    """
    wanted = _wanted(flags, names)
    if wanted.everything and not everything:
        raise click.UsageError("say which: numbers, ids, --reason, --since, --until, or --all")
    replays, refused = _run(lambda client: _plan(client, wanted, again=again), flags)
    fresh = [one for one in replays if again or not one.known]
    console = Console(stderr=True)
    for error in refused:
        console.print(f"left out: {error}", markup=False)
    if len(fresh) < len(replays):
        console.print(f"left out: {len(replays) - len(fresh)} replayed before (--again runs them once more)")
    if not fresh:
        console.print("nothing to replay")
        raise SystemExit(0 if replays else 1)
    if dry_run:
        for one in fresh:
            click.echo(f"{one.dead.id}\t{one.new_id}")
        return
    if len(fresh) > 1 and not yes:
        click.confirm(f"run {len(fresh)} jobs again?", abort=True, err=True)

    async def publish(client: Client) -> None:
        for one in fresh:
            await run_replay(client, one)
            click.echo(f"{one.dead.id}\t{one.new_id}")

    _run(publish, flags)


async def _plan(client: Client, wanted: Wanted, *, again: bool) -> tuple[list[Replay], list[str]]:
    replays, refused = [], []
    async with aclosing(find(client, wanted)) as found:
        async for one in found:
            try:
                replays.append(await plan_replay(client, one, again=again))
            except BadJob as error:
                refused.append(error.message)
    return replays, refused


def _wanted(flags: dict[str, Any], names: tuple[str, ...] = ()) -> Wanted:
    return Wanted(ids=names, reason=flags["reason"], since_ms=flags["since_ms"], until_ms=flags["until_ms"])


def _run(work: Callable[[Client], Coroutine[Any, Any, T]], flags: dict[str, Any]) -> T:
    settings = options.make_settings(flags)
    configure(as_json=False, debug=settings.debug, quiet=True)

    async def run() -> T:
        async with wiring.open_client(settings) as client:
            return await work(client)

    return asyncio.run(run())


def _when(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
