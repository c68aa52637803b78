"""The command `arriero`. Commands live in modules of their own and are imported when they are called, so that
`--help` and client commands start quickly.

    serve.py      up, worker, projector, relay, gateway
    dead.py       dead list, show, replay
    jobs.py       submit, stream, status, history, cancel
    batch.py      batch
    models.py     models list, fetch, inspect
    operate.py    replay, devices, demo
    audit.py      audit
    bench.py      bench engine, fleet, queue, schedule
    chaos.py      chaos run, report
    simulate.py   simulate
    options.py    flags that several of them share
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Final

import click

from arriero.schemas.errors import ArrieroError, ModelError, SetupError

COMMANDS: Final = {
    "up": ("serve", "Start worker, projector, relay and gateway on this machine."),
    "submit": ("jobs", "Publish a job and show its tokens as they come."),
    "stream": ("jobs", "Show a job's tokens, from its start or from an index on."),
    "status": ("jobs", "Tell what is known of a job."),
    "history": ("jobs", "List a job's events."),
    "cancel": ("jobs", "Ask for the end of a job."),
    "batch": ("batch", "Generate for every line of a file; resumable."),
    "models": ("models", "List, fetch and inspect models."),
    "worker": ("serve", "Run one worker."),
    "projector": ("serve", "Run the projector: job states, and the ends of streams."),
    "relay": ("serve", "Run the relay: retries go back into the queue when they are due."),
    "gateway": ("serve", "Run the HTTP gateway."),
    "dead": ("dead", "List, show and replay jobs that were given up."),
    "devices": ("operate", "List what models can run on, with its memory."),
    "replay": ("operate", "Rebuild all job states from the log."),
    "audit": ("audit", "Count from the log whether every promise holds."),
    "demo": ("operate", "Watch a handful of prompts go through a stack of their own."),
    "bench": ("bench", "Measure the engine, the whole fleet, the queue or the scheduler."),
    "simulate": ("simulate", "Run the fleet in virtual time, broken by faults that a seed draws."),
    "chaos": ("chaos", "Break a fleet on purpose, and count what that costs."),
}


class _Lazy(click.Group):
    """Knows its commands by name, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"arriero.ops.cli.{COMMANDS[name][0]}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="arriero")
def cli() -> None:
    """A worker fleet that serves language models from behind a message queue.

    \b
    Start a stack here, and use it from another terminal:
        arriero up
        arriero submit "Why do mules follow a mare?"
        arriero batch questions.jsonl -o answers.jsonl

    Give every command --kafka and --redis to use real clusters instead. Every flag has a variable, ARRIERO_ and its
    name: ARRIERO_KAFKA, ARRIERO_DATA.
    """


def main() -> None:
    """What goes wrong is one sentence and an exit status: 2 for settings that must change, 1 for the rest."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets another one
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ArrieroError as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"arriero: {error.message}", err=True)
        sys.exit(2 if isinstance(error, SetupError | ModelError) else 1)
    except UnicodeEncodeError:
        if "--debug" in sys.argv:
            raise
        click.echo("arriero: an argument is not UTF-8", err=True)
        sys.exit(2)
    except BrokenPipeError:
        # Who read our output has gone, as in `arriero stream ID | head`; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
