"""models list, fetch, inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from arriero.ops.cli import options
from arriero.ops.settings import cache_folder
from arriero.schemas.errors import SetupError

if TYPE_CHECKING:
    from arriero.ops.models import CatalogueModel


@click.group()
def models() -> None:
    """List, fetch and inspect models.

    Any GGUF file works by its path: arriero up --model mine.gguf
    """


@models.command("list")
@options.cache
@options.as_json
def list_command(cache: Path | None, as_json: bool) -> None:
    """The models that can be fetched by name, and which are here."""
    from arriero.ops import models as catalogue

    listed = catalogue.list_models(cache or cache_folder())
    if as_json:
        click.echo(msgspec.json.encode([{"name": one.model.name, "path": str(one.path or "")} for one in listed]))
        return
    table = Table("name", "what", "license", "size", "here", box=None)
    for one in listed:
        model = one.model
        here = str(one.path) if one.path else f"no: arriero models fetch {model.name}"
        table.add_row(model.name, model.about, model.license, f"{model.size_bytes / 1e6:,.0f} MB", here)
    Console(soft_wrap=True).print(table)


@models.command("fetch")
@click.argument("name", default="smollm2-135m-instruct")
@options.cache
def fetch_command(name: str, cache: Path | None) -> None:
    """Fetch a model into the cache folder and check its digest. NAME defaults to the demo's."""
    from arriero.ops import models as catalogue

    model = catalogue.find(name)
    if model is None:
        known = ", ".join(one.name for one in catalogue.CATALOGUE)
        raise SetupError(f"{name} is no model that can be fetched; known: {known}", code="bad_setting")
    click.echo(fetch_with_progress(model, cache or cache_folder()))


@models.command("inspect")
@click.argument("model")
@options.cache
@options.as_json
def inspect_command(model: str, cache: Path | None, as_json: bool) -> None:
    """Tell what a model file says of itself. MODEL is a known name or a path."""
    from arriero.ops import models as catalogue

    inspection = catalogue.inspect(catalogue.resolve(model, cache or cache_folder()).path)
    values = {name: getattr(inspection, name) for name in inspection.__struct_fields__}
    if as_json:
        click.echo(msgspec.json.encode(values, enc_hook=str))
        return
    table = Table(show_header=False, box=None)
    for name, value in values.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console(soft_wrap=True).print(table)


def fetch_with_progress(model: CatalogueModel, cache: Path) -> Path:
    """Fetch a model, with a bar on a terminal."""
    from arriero.ops import models as catalogue

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(model.name, total=None)
        return catalogue.fetch(
            model,
            cache,
            lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None),
        )
