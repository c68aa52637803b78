"""bench engine, bench fleet, bench queue."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
import msgspec
from rich.console import Console

from arriero.ops import models
from arriero.ops.bench.engine import EngineBenchOptions, engine_command
from arriero.ops.bench.fleet import AGAINST, Base, print_fleet_bench, run_fleet_bench
from arriero.ops.bench.queue import QueueBenchOptions, print_queue_bench, run_queue_bench
from arriero.ops.logging import configure
from arriero.schemas.errors import SetupError


@click.group()
def bench() -> None:
    """Measure the engine, the whole fleet, or the queue. Each prints both sides and their ratio from paired runs."""


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
@click.option(
    "--against",
    type=click.Choice(list(AGAINST)),
    default="engine",
    show_default=True,
    help="`bare`: a fleet that streams nothing and records only results.",
)
@click.option("--pairs", type=click.IntRange(1), default=3, show_default=True, help="Paired runs.")
@click.option("--json", "as_json", is_flag=True)
def fleet(
    kafka: str | None,
    redis: str | None,
    testbed: bool,
    against: Base,
    pairs: int,
    as_json: bool,
    cache: Path | None,
    **fields: object,
) -> None:
    """The same jobs through the engine alone and through log, worker, projector and bus."""
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
        runs = run_fleet_bench(options, against=against, pairs=pairs, kafka=kafka, redis=redis, console=console)
    if as_json:
        click.echo(msgspec.json.encode([{"ratio": run.ratio, **msgspec.to_builtins(run)} for run in runs]))
    else:
        print_fleet_bench(runs, against, console)


@bench.command("queue")
@click.option("--kafka", metavar="HOST:PORT,...", help="Brokers, with --redis.  [default: started for it]")
@click.option("--redis", metavar="URL", help="Databases 14 and 15 of it serve Celery.")
@click.option("--jobs", type=click.IntRange(100), default=20_000, show_default=True, help="Of a round of Arriero.")
@click.option("--celery-jobs", type=click.IntRange(100), default=2_000, show_default=True, help="Of a round of Celery.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--rate", type=click.IntRange(1), default=100, show_default=True, help="Jobs a second, when steady.")
@click.option("--steady-s", type=click.FloatRange(1), default=20.0, show_default=True, help="Seconds of that.")
@click.option("--json", "as_json", is_flag=True)
def queue(kafka: str | None, redis: str | None, as_json: bool, **fields: object) -> None:
    """Jobs that are nothing, through Kafka and through the embedded files, against Celery on the same Redis."""
    configure(as_json=False, quiet=True)
    if (kafka is None) != (redis is None):
        raise SetupError("--kafka and --redis go together", code="bad_setting")
    console = Console(stderr=as_json)
    with contextlib.ExitStack() as stack:
        if kafka is None or redis is None:
            from arriero.ops.testbed import run_pair

            pair = stack.enter_context(run_pair())
            kafka, redis = pair.bootstrap, pair.redis_url
        options = QueueBenchOptions(**fields)  # type: ignore[arg-type]
        result = run_queue_bench(options, kafka=kafka, redis=redis, console=console)
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        print_queue_bench(result, console)
