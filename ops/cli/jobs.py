"""submit, stream, status, history, cancel."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Coroutine
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from arriero.ops import wiring
from arriero.ops.cli import options
from arriero.ops.logging import configure
from arriero.ops.settings import Settings
from arriero.ops.signals import stop_signals
from arriero.producer.client import Client, Submitted
from arriero.producer.follow import START, Ended, Reset, Tokens, parse_position
from arriero.schemas.errors import ArrieroError, BadJob, NoLiveWorker, SetupError
from arriero.schemas.event import Duplicate, Event, Progressed, Settling, Terminal
from arriero.schemas.job import Message, PriorityClass, Sampling, check_id
from arriero.schemas.state import JobState
from arriero.schemas.token import StreamEnd
from arriero.transports.bus import Position

T = TypeVar("T")

STATUS_EXIT: Final = {"completed": 0, "cancelled": 3, "expired": 3}
"""Exit status by outcome; every other outcome is 1."""


WORKER_WAIT_S: Final = 1.2
"""How long a missing worker is looked for: two announcements, and within two seconds of the command's start."""


@click.command()
@click.argument("prompt")
@options.connection
@options.priority
@click.option("--chat/--raw", default=None, help="Use the model's chat template.  [default: where it has one]")
@click.option("--system", help="A system message before the prompt (chat).")
@click.option("--id", "job_id", help="The job's id, an idempotency key.  [default: a new one]")
@click.option("--model", help="The model to ask for.  [default: the pool's only one]")
@click.option("--max-tokens", type=int, help="Longest output.  [default: 512]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 1]")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--min-p", type=float)
@click.option("--repeat-penalty", type=float)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--ttl", "ttl_s", type=float, help="Seconds after which nobody wants the answer any more.")
@click.option("--affinity", help="Jobs with one key meet in one worker.")
@click.option("--tenant", help="On whose account.")
@click.option("--detach", is_flag=True, help="Only print the job's id.")
@options.as_json
def submit(prompt: str, **flags: Any) -> None:
    """Publish a job and show its tokens as they come. PROMPT `-` reads standard input.

    The id is printed first (to standard error), so a lost terminal loses nothing: `arriero stream ID` shows the rest.

    \b
        arriero submit "Why do mules follow a mare?"
        arriero submit --class batch --detach "Summarise ..."
        git diff | arriero submit --system "Review this." -
    """
    if prompt == "-":
        prompt = _standard_input()
    if not prompt:
        raise BadJob("the prompt is empty", code="empty_prompt")
    settings = options.make_settings(flags)
    sys.exit(_run(_submit(settings, prompt, flags), settings))


async def _submit(settings: Settings, prompt: str, flags: dict[str, Any]) -> int:
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
    sampling = Sampling(**{name: flags[name] for name in names if flags[name] is not None})
    priority: PriorityClass = flags["priority"] or "interactive"
    async with wiring.open_client(settings) as client:
        chat = flags["chat"]
        if chat is None:
            workers = await client.workers()
            chat = flags["system"] is not None or any(worker.chat for worker in workers)
        messages = [Message("user", prompt)]
        if flags["system"] is not None:
            messages.insert(0, Message("system", flags["system"]))
        job = await client.submit(
            None if chat else prompt,
            messages=messages if chat else None,
            id=flags["job_id"],
            model=flags["model"],
            priority=priority,
            sampling=sampling,
            max_tokens=flags["max_tokens"],
            stop=flags["stop"],
            ttl_s=flags["ttl_s"],
            affinity=flags["affinity"],
            tenant=flags["tenant"],
        )
        if flags["detach"]:
            click.echo(msgspec.json.encode(job) if flags["as_json"] else job.id)
            await warn_without_worker(client, settings)
            return 0
        click.echo(f"job {job.id} ({priority})", err=True)
        await warn_without_worker(client, settings)
        return await _show(client, settings, job, START, as_json=flags["as_json"])


@click.command()
@click.argument("job_id")
@options.connection
@click.option("--from", "position", default="0", help="An index, or a position as `--json` and the gateway give it.")
@options.as_json
def stream(job_id: str, position: str, **flags: Any) -> None:
    """Show a job's tokens, from its start or from an index on, until its end. Ctrl-C detaches; the job runs on.

    \b
        arriero stream 06h2x...
        arriero stream --from 120 06h2x...
    """
    check_id(job_id)
    settings = options.make_settings(flags)
    try:
        start = parse_position(position)
    except ValueError as error:
        raise SetupError(f"--from {error}", code="bad_setting") from error

    async def show() -> int:
        async with wiring.open_client(settings) as client:
            if await client.peek(job_id) is None:
                click.echo(f"nothing is known of job {job_id} yet; waiting for it", err=True)
            return await _show(client, settings, job_id, start, as_json=flags["as_json"])

    sys.exit(_run(show(), settings))


@click.command()
@click.argument("job_id")
@options.connection
@options.as_json
def status(job_id: str, **flags: Any) -> None:
    """Tell what is known of a job."""
    settings = options.make_settings(flags)

    async def ask() -> JobState:
        async with wiring.open_client(settings) as client:
            return await client.status(job_id)

    state = _run(ask(), settings)
    if flags["as_json"]:
        click.echo(msgspec.json.encode({"status": state.status, **msgspec.to_builtins(state)}))
        return
    table = Table(show_header=False, box=None)
    rows: dict[str, object] = {
        "job": state.id,
        "status": state.status,
        "class": state.priority,
        "tenant": state.tenant,
        "model": state.model,
        "queued": _moment(state.queued_ms),
        "started": _moment(state.started_ms),
        "ended": _moment(state.finished_ms),
        "tokens": state.tokens,
        "finish reason": state.finish_reason,
        "error": f"{state.error.code}: {state.error.message}" if state.error else None,
        "worker": state.worker,
        "record": state.record,
        "duplicates": len(state.duplicates) or None,
    }
    for name, value in rows.items():
        if value not in (None, ""):
            table.add_row(name, str(value))
    Console(soft_wrap=True, highlight=False).print(table)


@click.command()
@click.argument("job_id")
@options.connection
@options.as_json
def history(job_id: str, **flags: Any) -> None:
    """List a job's events, as they were recorded."""
    settings = options.make_settings(flags)

    async def ask() -> list[Event]:
        async with wiring.open_client(settings) as client:
            return await client.history(job_id)

    events = _run(ask(), settings)
    if flags["as_json"]:
        for event in events:
            click.echo(msgspec.json.encode(event))
        return
    Console(soft_wrap=True, highlight=False).print(history_table(events))


@click.command()
@click.argument("job_id")
@options.connection
@click.option("--reason", default="", help="Kept with the request.")
def cancel(job_id: str, reason: str, **flags: Any) -> None:
    """Ask for the end of a job. One that runs ends within a decode step; one that has ended stays as it is."""
    settings = options.make_settings(flags)

    async def ask() -> str:
        async with wiring.open_client(settings) as client:
            before = await client.status(job_id)
            if before.ended:
                return f"job {job_id} has ended already: {before.status}"
            await client.cancel(job_id, reason)
            return f"asked for the end of job {job_id}"

    click.echo(_run(ask(), settings))


# --- showing -----------------------------------------------------------------------------------------------


def history_table(events: list[Event]) -> Table:
    table = Table("at", "event", "worker", "what", box=None)
    first = events[0].time_ms if events else 0
    for event in events:
        table.add_row(
            f"+{(event.time_ms - first) / 1000:.3f} s",
            type(event).__name__,
            getattr(event, "worker", ""),
            _detail(event),
        )
    return table


def _detail(event: Event) -> str:
    parts: list[str] = []
    if isinstance(event, Progressed):
        parts.append(f"tokens {event.first}..{event.first + len(event.tokens)}")
    if isinstance(event, Terminal):
        parts.append(f"{event.output.count} tokens")
        parts.append(f"first after {event.usage.ttft_s:.3f} s" if event.usage.ttft_s else "")
    for name in ("finish_reason", "stage", "model", "reason", "prompt_tokens"):
        value = getattr(event, name, None)
        if value:
            parts.append(f"{name.replace('_', ' ')} {value}")
    if isinstance(event, Duplicate):
        parts.append(f"{'another body than' if event.body_differs else 'the same body as'} {event.first_root}")
    error = getattr(event, "error", None)
    if error:
        parts.append(f"{error.code}: {error.message}")
    if isinstance(event, Settling):
        parts.append(f"settles {event.origin}")
    return ", ".join(part for part in parts if part)


async def _show(client: Client, settings: Settings, job: Submitted | str, start: Position, *, as_json: bool) -> int:
    """Print tokens until the end. Ctrl-C detaches and tells how to come back."""
    job_id = job if isinstance(job, str) else job.id
    position = start

    def moved(now: Position) -> None:
        nonlocal position
        position = now

    async def show() -> StreamEnd:
        async with aclosing(client.stream(job, start, moved=moved)) as items:
            async for item in items:
                if as_json:
                    click.echo(msgspec.json.encode({type(item).__name__.lower(): item}))
                elif isinstance(item, Tokens):
                    click.echo("".join(token.piece for token in item.tokens), nl=False)
                elif isinstance(item, Reset):
                    click.echo(f"\n[the text is taken back to token {item.count}]", err=True)
                if isinstance(item, Ended):
                    if not as_json:
                        click.echo(item.end.tail)
                    return item.end
        raise AssertionError("a stream ends with its end")

    with stop_signals() as request:
        showing = asyncio.create_task(show(), name="show")
        asked = asyncio.create_task(request.asked.wait(), name="stop request")
        try:
            await asyncio.wait([showing, asked], return_when=asyncio.FIRST_COMPLETED)
            if not showing.done():
                at = position.count
                address = f"{settings.address} " if settings.address else ""
                click.echo(
                    f"\ndetached at token {at}; the job goes on\n"
                    f"    arriero stream {address}--from {at} {shlex.quote(job_id)}     to see the rest\n"
                    f"    arriero cancel {address}{shlex.quote(job_id)}     to end it",
                    err=True,
                )
                return 130
            end = showing.result()
        finally:
            for task in (showing, asked):
                task.cancel()
            await asyncio.wait([showing, asked])
    if end.status != "completed":
        reason = f": {end.code}: {end.error}" if end.code else ""
        click.echo(f"job {job_id} {end.status.replace('_', ' ')}{reason}", err=True)
    return STATUS_EXIT.get(end.status, 1)


async def warn_without_worker(client: Client, settings: Settings) -> None:
    try:
        await client.require_worker(WORKER_WAIT_S)
    except NoLiveWorker as error:
        start = "arriero up" if settings.kafka is None else "arriero worker"
        address = f" {settings.address}" if settings.address else ""
        click.echo(f"{error.message}; start one with: {start}{address}", err=True)


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).astimezone().isoformat(" ", "milliseconds") if time_ms else ""


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise BadJob(f"standard input is not UTF-8 (byte {error.start})", code="invalid_utf8") from error


def _run(work: Coroutine[Any, Any, T], settings: Settings) -> T:
    """Run a client command: quiet unless something is wrong."""
    configure(as_json=False, debug=settings.debug, quiet=True)
    try:
        return asyncio.run(work)
    except ExceptionGroup as group:
        first = group.exceptions[0]
        if isinstance(first, ArrieroError):
            raise first from group
        raise
