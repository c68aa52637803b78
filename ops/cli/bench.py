"""bench engine, bench fleet."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
import msgspec
from rich.console import Console

from arriero.ops import models
from arriero.ops.bench.engine import EngineBenchOptions, engine_command
from arriero.ops.bench.fleet import print_fleet_bench, run_fleet_bench
from arriero.ops.logging import configure
from arriero.schemas.errors import SetupError


@click.group()
def bench() -> None:
    """Measure the engine, or the whole fleet. Each prints both sides and their ratio from paired runs."""


bench.add_command(engine_command)


@bench.command("fleet")
@click.option("--model", default=models.DEMO.name, show_default=True, help="A known model, a GGUF file, or `echo`.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where fetched models are kept.")
@click.option("--kafka", metavar="HOST:PORT,...", help="Brokers, with --redis.  [default: the embedded pair]")
@click.option("--redis", metavar="URL")
@click.option("--testbed", is_flag=True, help="On a real Kafka and a real Redis, started for it.")
@click.option("--jobs", type=click.IntRange(1), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--slots", type=click.IntRange(1, 255), default=16, show_default=True)
@click.option("--threads", type=click.IntRange(1))
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.0, show_default=True)
@click.option("--pairs", type=click.IntRange(1), default=3, show_default=True, help="Paired runs.")
@click.option("--json", "as_json", is_flag=True)
def fleet(
    kafka: str | None, redis: str | None, testbed: bool, pairs: int, as_json: bool, cache: Path | None, **fields: object
) -> None:
    """The same jobs through the bare engine and through log, worker, projector and bus."""
    configure(as_json=False, quiet=True)
    if testbed and kafka:
        raise SetupError("--testbed starts brokers of its own; leave --kafka out", code="bad_setting")
    options = EngineBenchOptions(cache=cache or models.default_cache(os.environ), **fields)  # type: ignore[arg-type]
    console = Console(stderr=as_json)
    with contextlib.ExitStack() as stack:
        if testbed:
            from arriero.ops.testbed import run_pair

            pair = stack.enter_context(run_pair())
            kafka, redis = pair.bootstrap, pair.redis_url
        runs = run_fleet_bench(options, pairs=pairs, kafka=kafka, redis=redis, console=console)
    if as_json:
        click.echo(msgspec.json.encode([{"ratio": run.ratio, **msgspec.to_builtins(run)} for run in runs]))
    else:
        print_fleet_bench(runs, console)
