"""chaos run, chaos report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import msgspec
from rich.console import Console

from arriero.ops.chaos.faults import FAULTS
from arriero.ops.chaos.report import matrix, read_results
from arriero.ops.chaos.run import ChaosOptions, Result, run_chaos
from arriero.ops.logging import configure
from arriero.schemas.errors import SetupError

RESULTS = click.Path(path_type=Path, dir_okay=False)
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
"""Where a document keeps the matrix."""


@click.group()
def chaos() -> None:
    """Break a fleet of real processes on purpose, and count what was lost, doubled or shown wrongly."""


@chaos.command()
@click.option("--pair", type=click.Choice(["embedded", "real"]), default="embedded", show_default=True)
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), help="Only this.  [default: all]")
@click.option("--workers", type=click.IntRange(1), default=3, show_default=True)
@click.option("--injections", type=click.IntRange(1), default=10, show_default=True, help="Of a fault, in a run.")
@click.option("--rate", type=click.FloatRange(0.1), default=40.0, show_default=True, help="Jobs a second.")
@click.option(
    "--pause", "pause_s", type=click.FloatRange(0), default=0.8, show_default=True, help="Seconds between two."
)
@click.option("--kills", type=click.IntRange(0), default=0, help="Go on until RESULTS count so many on this pair.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first round; later ones count on.")
@click.option("--results", type=RESULTS, help="Append each run to this file; with --kills, what is there counts.")
def run(kills: int, seed: int, results: Path | None, **fields: object) -> None:
    """Run each fault against a fleet of its own. Exits non-zero when a promise was broken."""
    configure(as_json=False, quiet=True)
    console = Console()
    broken = False

    def told(result: Result) -> None:
        nonlocal broken
        verdict = result.verdict
        broken = broken or not verdict.holds
        if results is not None:
            with results.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
        console.print(
            f"{result.pair} {result.fault}: {result.injections} injections, {result.kills} kills, {verdict.jobs} jobs, "
            f"{verdict.tokens} tokens read; lost {verdict.lost}, duplicated {verdict.duplicated}, "
            f"wrong {verdict.wrong}, token errors {verdict.token_errors}, audit {verdict.audit}, "
            f"resets {verdict.resets}; "
            f"slowest takeover {max(result.recovery_s, default=0.0):.2f} s"
        )
        for breach in verdict.breaches:
            console.print(f"  [red]{breach}[/]")

    while True:
        options = ChaosOptions(seed=seed, **fields)  # type: ignore[arg-type]
        asyncio.run(run_chaos(options, told))
        seed += 1
        done = sum(one.kills for one in read_results(results) if one.pair == options.pair) if results else 0
        if broken or done >= kills:
            break
    if broken:
        raise SystemExit(1)


@chaos.command()
@click.argument("results", type=RESULTS, nargs=-1, required=True)
@click.option("--into", type=RESULTS, help="Write it into this document, in place of the one that is there.")
def report(results: tuple[Path, ...], into: Path | None) -> None:
    """Print the matrix of all runs in these files, as Markdown."""
    found = matrix([one for path in results for one in read_results(path)])
    if into is None:
        click.echo(found)
        return
    before, begin, rest = into.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SetupError(f"{into} has no place for a matrix, between {BEGIN} and {END}", code="bad_setting")
    into.write_text(f"{before}{begin}\n\n{found}\n\n{end}{after}")
