"""Flags that several commands share, each with its variable, and `Settings` made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from arriero.ops.settings import (
    GRACE_S,
    PARTITIONS_DEFAULT,
    WAIT_S,
    WATCHDOG_S,
    EngineSettings,
    Settings,
    cache_folder,
    data_folder,
)
from arriero.schemas.job import CLASSES, MAX_ATTEMPTS_LIMIT
from arriero.schemas.names import MAX_ATTEMPTS, NAMESPACE_DEFAULT, POOL_DEFAULT

F = TypeVar("F", bound=Callable[..., Any])


def _flag(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option whose variable is ARRIERO_ and its long name."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    variable = "ARRIERO_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=False, **settings)


def _all(*flags: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return decorate


PATH: Final = click.Path(path_type=Path)

connection = _all(
    _flag("--data", type=PATH, help="Data folder of a stack on this machine.  [default: ~/.local/share/arriero]"),
    _flag("--kafka", metavar="HOST:PORT,...", help="Kafka brokers, together with --redis, instead of a data folder."),
    _flag("--redis", metavar="URL", help="Redis, as redis://host:port/0."),
    _flag("--namespace", default=NAMESPACE_DEFAULT, show_default=True, help="Prefix of all topics and keys."),
    _flag("--pool", default=POOL_DEFAULT, show_default=True, help="The workers that serve one model."),
    click.option("--debug", is_flag=True, envvar="ARRIERO_DEBUG", help="Log more, and show tracebacks."),
)

server = _all(
    _flag("--partitions", type=int, help=f"Partitions of topics that are made.  [default: {PARTITIONS_DEFAULT}]"),
    _flag("--create-topics/--no-create-topics", default=True, help="Whether Kafka topics that are missing are made."),
    _flag(
        "--wait",
        "wait_s",
        type=click.FloatRange(0),
        default=WAIT_S,
        show_default=True,
        help="Seconds that brokers may take to come.",
    ),
    _flag("--log-json/--log-plain", default=None, help="How to log.  [default: plain on a terminal, else JSON]"),
)

metrics = _all(
    _flag("--metrics-port", type=click.IntRange(0, 65_535), help="Serve Prometheus metrics on this port."),
    _flag("--metrics-host", default="127.0.0.1", show_default=True, help="Address to serve them on."),
)

cache = _flag("--cache", type=PATH, help="Where fetched models are kept.  [default: ~/.cache/arriero/models]")

engine = _all(
    _flag("--model", default=EngineSettings().model, show_default=True, help="A known model or a GGUF file."),
    _flag("--model-name", help="What jobs call the model.  [default: from the file's name]"),
    _flag(
        "--engine",
        type=click.Choice(["llama", "echo"]),
        default="llama",
        show_default=True,
        help="`echo` answers with the prompt: for trying the plumbing.",
    ),
    cache,
    _flag("--slots", type=click.IntRange(1, 255), help="Sequences decoded together.  [default: 16]"),
    _flag("--ctx", type=click.IntRange(256), help="Cells of the KV cache, in tokens.  [default: what fits]"),
    _flag("--batch", type=click.IntRange(1), help="Tokens in one step, at most."),
    _flag("--chunk", type=click.IntRange(1), default=256, show_default=True, help="Prompt tokens beside running jobs."),
    _flag("--threads", type=click.IntRange(1), help="CPU threads.  [default: one a core]"),
    _flag("--gpu-layers", type=click.IntRange(0), help="Layers on the GPU.  [default: all, where there is one]"),
    _flag("--main-gpu", type=click.IntRange(0), default=0, help="The GPU for what is not split."),
    _flag("--split-mode", type=click.Choice(["none", "layer", "row"]), default="layer", help="How GPUs share a model."),
    _flag("--tensor-split", metavar="N,N,...", help="Each GPU's share of the model."),
    _flag("--flash-attn", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True),
    _flag("--kv-type", type=click.Choice(["f32", "f16", "bf16", "q8_0", "q4_0"]), default="f16", show_default=True),
    _flag(
        "--prefix-cache/--no-prefix-cache",
        default=True,
        show_default=True,
        help="Prefill what prompts have in common once.",
    ),
    _flag(
        "--draft-tokens",
        type=click.IntRange(0, 256),
        default=16,
        show_default=True,
        help="Tokens that a step may guess from the text so far while few jobs run; 0 for none.",
    ),
    click.option("--echo-step", "echo_step_s", type=click.FloatRange(0), default=0.0, hidden=True),
)

worker = _all(
    _flag(
        "--watchdog",
        "watchdog_s",
        type=click.FloatRange(1),
        default=WATCHDOG_S,
        show_default=True,
        help="Seconds after which a step that does not end is ended with its process.",
    ),
    _flag(
        "--max-attempts",
        type=click.IntRange(1, MAX_ATTEMPTS_LIMIT),
        default=MAX_ATTEMPTS,
        show_default=True,
        help="Runs that a transient error may cost a job that does not say.",
    ),
    _flag("--worker", metavar="NAME", default="", help="The worker's name.  [default: from host and process]"),
    _flag(
        "--grace",
        "grace_s",
        type=click.FloatRange(0),
        default=GRACE_S,
        show_default=True,
        help="Seconds that running jobs get to end when the worker is stopped.",
    ),
)

gateway = _all(
    _flag("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    _flag("--port", type=click.IntRange(0, 65_535), default=8080, show_default=True),
)

priority = click.option(
    "--class",
    "priority",
    type=click.Choice(CLASSES),
    help="How urgent.  [default: interactive, or batch for files]",
)

as_json = click.option("--json", "as_json", is_flag=True, help="For machines.")


def make_settings(values: dict[str, Any]) -> Settings:
    """Settings from the flags that a command has; what it does not have keeps its default. Raises SetupError."""
    values = {name: value for name, value in values.items() if value is not None}
    split = values.pop("tensor_split", None)
    if split is not None:
        try:
            values["tensor_split"] = tuple(float(part) for part in split.split(","))
        except ValueError:
            raise click.BadParameter("numbers separated by commas are wanted", param_hint="--tensor-split") from None
    of_engine = {name: values.pop(name) for name in EngineSettings.__struct_fields__ if name in values}
    known = {name: value for name, value in values.items() if name in Settings.__struct_fields__}
    known.setdefault("data", data_folder())
    known.setdefault("cache", cache_folder())
    for name in ("data", "cache"):
        known[name] = known[name].expanduser().absolute()
    settings = Settings(engine=EngineSettings(**of_engine), **known)
    settings.check()
    return settings
