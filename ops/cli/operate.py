"""replay, devices, demo."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from arriero.ops import wiring
from arriero.ops.cli import options
from arriero.ops.logging import configure


@click.command()
@options.connection
def replay(**flags: Any) -> None:
    """Rebuild all job states from the log: running projectors begin again at its start.

    States rebuild by themselves when the bus has forgotten them; this forces it. Nothing is lost meanwhile.
    """
    settings = options.make_settings(flags)
    configure(as_json=False, debug=settings.debug, quiet=True)

    async def forget() -> None:
        async with wiring.open_bus(settings) as bus:
            await bus.check()
            await bus.forget()

    asyncio.run(forget())
    click.echo("projectors begin again at the log's start")


@click.command()
@options.as_json
def devices(as_json: bool) -> None:
    """List what models can run on: this machine's cores and GPUs, with their memory."""
    from arriero.ops.devices import take_inventory

    found = take_inventory()
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    table = Table("device", "what", "free", "of", box=None)
    for device in (found.cpu, *found.gpus):
        what = device.description if device is not found.cpu else f"{device.description}, {found.cores} cores"
        table.add_row(
            device.name, what, *(f"{size / 2**30:,.1f} GiB" for size in (device.free_bytes, device.total_bytes))
        )
    Console(soft_wrap=True).print(table)
    if not found.offload:
        click.echo("llama.cpp was built without GPU support here; with an NVIDIA GPU and its CUDA toolkit: make setup")


@click.command()
@options.cache
@click.option("--model", help="A known model or a GGUF file.  [default: the demo's]")
@click.option("--testbed", is_flag=True, help="On a real Kafka and a real Redis, fetched and started for the demo.")
@click.option("--keep", type=options.PATH, help="Keep the demo's data folder here.  [default: a temporary one]")
def demo(**flags: Any) -> None:
    """Watch a handful of prompts go through a stack of their own: queued by class, decoded together, streamed side by
    side; then one job's history and a summary."""
    from arriero.ops.demo import run_demo

    run_demo(**flags)
