"""batch."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arriero.ops import wiring
from arriero.ops.cli import options
from arriero.ops.cli.jobs import warn_without_worker
from arriero.ops.logging import configure
from arriero.ops.settings import Settings
from arriero.ops.signals import stop_signals
from arriero.producer import batch as batches
from arriero.producer.batch import Summary
from arriero.producer.lines import check_source

TELL_EVERY_S = 5.0
"""Without a terminal: how often a line tells how far it is."""


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), required=True, help="Answers, a line each.")
@click.option("--errors", type=click.Path(path_type=Path), help="Lines without one.  [default: OUTPUT.errors.jsonl]")
@options.connection
@options.priority
@click.option("--window", type=click.IntRange(1, 100_000), default=batches.WINDOW, show_default=True, help="In flight.")
@click.option("--force", is_flag=True, help="Write over an output that belongs to another input.")
@options.as_json
def batch(source: Path, target: Path, errors: Path | None, **flags: Any) -> None:
    """Generate for every line of SOURCE, a file in the OpenAI batch line format.

    Interrupted, killed or without power: run the same command again and it goes on; what is recorded is never
    generated twice, not even a week later.

    \b
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}}

    Exit status: 0 when every line is answered, 1 when some are in the errors file, 130 when interrupted.
    """
    settings = options.make_settings(flags)
    check_source(source)
    configure(as_json=False, debug=settings.debug, quiet=True)
    summary = asyncio.run(_batch(settings, source, target, errors, flags))
    if flags["as_json"]:
        click.echo(msgspec.json.encode(summary, enc_hook=str))
    refused = summary.errors.exists() and summary.errors.stat().st_size > 0
    sys.exit(130 if summary.stopped else 1 if refused else 0)


async def _batch(settings: Settings, source: Path, target: Path, errors: Path | None, flags: dict[str, Any]) -> Summary:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    last_told = 0.0

    def tell(progress: batches.Progress) -> None:
        nonlocal last_told
        answered = progress.skipped + progress.done + progress.failed
        rate = f"{progress.rate:.1f}/s" + (f", {progress.failed} failed" if progress.failed else "")
        bar.update(task, completed=answered, total=progress.total, rate=rate)
        now = asyncio.get_running_loop().time()
        if not console.is_terminal and now - last_told >= TELL_EVERY_S:
            last_told = now
            console.print(f"{answered:,} of {progress.total:,} lines, {rate}", highlight=False)

    async with wiring.open_client(settings) as client:
        await warn_without_worker(client, settings)
        with stop_signals() as request, bar:
            task = bar.add_task(source.name, total=None, rate="")
            summary = await batches.run_batch(
                client,
                source,
                target,
                errors=errors,
                priority=flags["priority"] or "batch",
                window=flags["window"],
                progress=tell,
                stop=request.asked,
                force=flags["force"],
            )
    said = f"{summary.done:,} answered, {summary.failed:,} failed, {summary.skipped:,} done before"
    if summary.stopped:
        console.print(f"stopped: {said}; run the same command again to go on", highlight=False)
    else:
        where = f"; errors in {summary.errors}" if summary.failed else ""
        console.print(f"{said}, {summary.tokens:,} tokens: {summary.target}{where}", highlight=False)
    return summary
