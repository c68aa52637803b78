"""bench engine."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec
import structlog
from click.core import ParameterSource
from rich.console import Console

from arriero.ops import models, wiring
from arriero.ops.bench.engine import EngineBenchOptions, print_engine_bench, run_engine_bench
from arriero.schemas.errors import ArrieroError
from arriero.workers.schedule import CHUNK_TOKENS

_OF_WORKLOADS: Final = tuple(
    "jobs max_tokens padding_tokens n_ctx gpu_layers chunk_tokens temperature top_p top_k".split()
)
"""Options that a set workload leaves no choice of."""
_OF_AGAINST: Final = ("workload", "rounds", "server_args")


def _refuse(ctx: click.Context, names: Sequence[str], why: str) -> None:
    """An option that would be ignored is an error."""
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} {why} --against")


@click.command("engine")
@click.option("--model", default=models.DEMO.name, show_default=True, help="A known model, a GGUF file, or `echo`.")
@click.option("--cache", type=click.Path(path_type=Path), help="Where fetched models are kept.")
@click.option("--jobs", type=click.IntRange(1), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Longest output of a job.")
@click.option("--padding-tokens", type=click.IntRange(0), default=0, help="Lengthen every prompt by about so many.")
@click.option("--slots", type=click.IntRange(1), help="Sequences in one batch.")
@click.option("--n-ctx", type=click.IntRange(1), help="Cells of the KV cache, in tokens.")
@click.option("--threads", type=click.IntRange(1))
@click.option("--gpu-layers", type=click.IntRange(0), help="Layers on the device; all of them when there is one.")
@click.option("--chunk-tokens", type=click.IntRange(1), default=CHUNK_TOKENS, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True)
@click.option("--top-k", type=click.IntRange(0), default=0, show_default=True)
@click.option("--against", type=click.Choice(["llama-server"]), help="Compare with llama.cpp's own server.")
@click.option("--workload", "workload", metavar="NAME,...", help="With --against: which.  [default: all]")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="With --against: runs of a side.")
@click.option("--server-args", metavar="WORDS", default="", help="With --against: further flags for llama-server.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def engine_command(
    ctx: click.Context,
    /,
    cache: Path | None,
    as_json: bool,
    against: str | None,
    workload: str | None,
    rounds: int,
    server_args: str,
    **options: object,
) -> None:
    """Many jobs through one engine, without brokers.

    Prints tokens/s, times to the first and between tokens, where the time of a step goes, and memory.

    With --against llama-server the jobs are those of set workloads, and llama.cpp's server does the same in turns, with
    the same token ids, sampling, threads, slots and KV cells. It is built from the source of the installed
    llama-cpp-python the first time (some ten minutes; cmake and a C++ compiler are needed).

    \b
        a   16 jobs at once, 128 tokens in, 64 out, greedy     (beside llama-batched-bench, too)
        b   the same, sampled                                  (beside llama-batched-bench, too)
        c   32 at once behind one system prompt of 512 tokens, cold cache (32 slots)
        c2  128 behind four such system prompts, 16 at a time
        d   mixed lengths, Poisson arrivals
        e   a prompt of 2,048 tokens joins 8 running streams: the gap that they see
        h   interactive jobs arrive in a full batch class: their time to the first token

    \b
    arriero bench engine --against llama-server --workload a,c --rounds 5
    arriero bench engine --against llama-server --model gemma-3-270m --server-args="--swa-full"
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    fields = {"cache": cache or models.default_cache(os.environ), **options}
    _refuse(ctx, _OF_WORKLOADS if against else _OF_AGAINST, "goes only without" if against else "needs")
    try:
        if against:
            wiring.need("worker", "llama_cpp")
            wiring.need("gateway", "aiohttp")
            from arriero.ops.bench.against import AgainstOptions, bench_against

            shared = {name: fields[name] for name in ("model", "cache", "slots", "threads")}
            bench_against(
                AgainstOptions(rounds=rounds, server_arguments=tuple(shlex.split(server_args)), **shared),  # type: ignore[arg-type]
                workload,
                as_json=as_json,
            )
            return
        bench = run_engine_bench(EngineBenchOptions(**fields))  # type: ignore[arg-type]
    except ArrieroError as error:
        raise click.ClickException(error.message) from error
    if as_json:
        click.echo(msgspec.json.encode(bench))
    else:
        print_engine_bench(bench, Console())
