"""bench engine, bench fleet, bench queue, bench schedule."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
import msgspec
from rich.console import Console

from arriero.ops import models
from arriero.ops.bench.engine import EngineBenchOptions
from arriero.ops.bench.fleet import AGAINST, Base, print_fleet_bench, run_fleet_bench
from arriero.ops.bench.queue import QueueBenchOptions, print_queue_bench, run_queue_bench
from arriero.ops.bench.schedule import ScheduleBenchOptions, StepCost, print_schedule_bench, run_schedule_bench
from arriero.ops.cli.bench_engine import engine_command
from arriero.ops.logging import configure
from arriero.schemas.errors import SetupError


@click.group()
def bench() -> None:
    """Measure the engine, the whole fleet, the queue or the scheduler, each beside something to compare it with."""


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


@bench.command("schedule")
@click.option(
    "--trace", type=click.Path(exists=True, path_type=Path), help="JSON lines.  [default: drawn from the seed]"
)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--minutes", type=click.FloatRange(0.1, 10_000), default=30.0, show_default=True, help="Of the drawn trace."
)
@click.option(
    "--load", type=click.FloatRange(0.01, 10), default=0.9, show_default=True, help="Its share of all that can be done."
)
@click.option("--slots", type=click.IntRange(1, 255), default=16, show_default=True)
@click.option("--n-ctx", type=click.IntRange(256), default=16_384, show_default=True)
@click.option(
    "--step-ms", type=click.FloatRange(0), default=40.0, show_default=True, help="What a step takes at least."
)
@click.option("--token-ms", type=click.FloatRange(0), default=3.0, show_default=True, help="Of each token in it.")
@click.option("--json", "as_json", is_flag=True)
def schedule(step_ms: float, token_ms: float, as_json: bool, **fields: object) -> None:
    """An arrival trace through the scheduler in virtual time: how many jobs of each class keep their promise.

    A line of a trace is {"at": seconds, "class": ..., "tenant": ..., "prompt": tokens, "output": tokens, "prefix":
    tokens that it shares with others of its tenant}. Beside it runs the same trace as one line without classes.
    """
    console = Console(stderr=as_json)
    cost = StepCost(step_s=step_ms / 1000, token_s=token_ms / 1000)
    ours, line = run_schedule_bench(ScheduleBenchOptions(cost=cost, **fields), console)  # type: ignore[arg-type]
    if as_json:
        click.echo(msgspec.json.encode({"ours": ours, "one_line": line}))
    else:
        print_schedule_bench(ours, line, console)
