"""The demo: a stack of its own, a handful of prompts of every class, their tokens side by side, what was recorded.

More prompts than slots, and the least urgent are published first: the urgent ones still begin at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from arriero.ops import stack, wiring
from arriero.ops.cli.jobs import history_table
from arriero.ops.settings import EngineSettings, Settings, cache_folder
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import Supervisor
from arriero.producer.client import Client, JobResult
from arriero.producer.follow import Ended, Reset, Tokens
from arriero.schemas.clock import SystemClock
from arriero.schemas.job import Message, PriorityClass, Sampling

SLOTS: Final = 4
"""Fewer than prompts, so that the classes matter."""
MAX_TOKENS: Final = 48
PROMPTS: Final[tuple[tuple[PriorityClass, str], ...]] = (
    ("batch", "Write three facts about llamas."),
    ("batch", "Describe a mountain pass in winter."),
    ("batch", "Explain what a caravan is."),
    ("standard", "Why do mules follow a mare?"),
    ("standard", "Give me a recipe for flat bread."),
    ("standard", "What is a message queue?"),
    ("interactive", "Say hello in Spanish."),
    ("interactive", "What is the capital of France?"),
)
COLOURS: Final = {"interactive": "green", "standard": "cyan", "batch": "magenta"}
LINE_CHARS: Final = 72


class _Pane(msgspec.Struct):
    """One prompt on the screen."""

    id: str
    priority: PriorityClass
    prompt: str
    text: str = ""
    tokens: int = 0
    status: str = "queued"


def run_demo(*, cache: Path | None, model: str | None, testbed: bool, keep: Path | None) -> None:
    """Raises what the stack's parts raise."""
    from arriero.ops import models
    from arriero.ops.cli.models import fetch_with_progress

    console = Console()
    engine = EngineSettings(slots=SLOTS) if model is None else EngineSettings(slots=SLOTS, model=model)
    cache = cache or cache_folder()
    known = models.find(engine.model)
    if known is not None:
        fetch_with_progress(known, cache)
    with _folder(keep) as folder, _pair(testbed, console) as (kafka, redis):
        settings = Settings(
            data=folder, cache=cache, kafka=kafka, redis=redis, engine=engine, grace_s=0.0, log_json=True
        )
        asyncio.run(_Demo(settings, console).run())


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep.expanduser().absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="arriero-demo-") as folder:
            yield Path(folder)


@contextlib.contextmanager
def _pair(testbed: bool, console: Console) -> Iterator[tuple[str | None, str | None]]:
    if not testbed:
        yield None, None
        return
    from arriero.ops.testbed import run_pair

    console.print("starting a real Kafka and a real Redis (the first time, Kafka is fetched) ...")
    with run_pair() as pair:
        console.print(f"Kafka at {pair.bootstrap}, Redis at {pair.redis_url}", highlight=False)
        yield pair.bootstrap, pair.redis_url


class _Demo:
    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._panes: list[_Pane] = []

    async def run(self) -> None:
        task: asyncio.Task[None] | None = None

        def beside(supervisor: Supervisor, request: StopRequest) -> asyncio.Task[None]:
            nonlocal task
            task = asyncio.create_task(self._show(supervisor, request), name="demo")
            return task

        await stack.run_roles(self._settings, ("projector", "worker"), log_folder=True, beside=beside)
        assert task is not None
        if not task.cancelled():
            task.result()

    async def _show(self, supervisor: Supervisor, request: StopRequest) -> None:
        try:
            self._console.print("starting worker and projector, loading the model ...")
            for child in supervisor.children:
                await child.became_ready.wait()
            info = {key: value for child in supervisor.children for key, value in child.info.items()}
            self._console.print(f"{info['model']} is ready on {info['device']}, {SLOTS} slots\n", highlight=False)
            async with wiring.open_client(self._settings) as client:
                await self._work(client)
        finally:
            request.asked.set()

    async def _work(self, client: Client) -> None:
        clock = SystemClock()
        began = clock.monotonic()
        for number, (priority, prompt) in enumerate(PROMPTS):
            job = await client.submit(
                messages=[Message("user", prompt)],
                priority=priority,
                max_tokens=MAX_TOKENS,
                sampling=Sampling(temperature=0.7, top_p=0.9, seed=number),
            )
            self._panes.append(_Pane(job.id, priority, prompt))
        self._console.print(
            f"{len(PROMPTS)} prompts published, the least urgent first, to {SLOTS} slots: urgent ones go ahead\n"
        )
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=12, get_renderable=self._screen):
                await asyncio.gather(*(self._follow(client, pane) for pane in self._panes))
        else:
            await asyncio.gather(*(self._follow(client, pane) for pane in self._panes))
        took_s = clock.monotonic() - began
        results = await asyncio.gather(*(client.result(pane.id) for pane in self._panes))
        last = self._panes[-1]
        self._console.print(f"\nWhat was recorded of the last one, {last.id}:", highlight=False)
        self._console.print(history_table(await client.history(last.id)))
        self._console.print()
        self._console.print(_summary(self._panes, results, took_s))

    async def _follow(self, client: Client, pane: _Pane) -> None:
        printed = 0
        async with aclosing(client.stream(pane.id)) as items:
            async for item in items:
                if isinstance(item, Tokens):
                    pane.status = "running"
                    pane.tokens += len(item.tokens)
                    pane.text += "".join(token.piece for token in item.tokens)
                elif isinstance(item, Reset):
                    pane.tokens, pane.text = item.count, ""
                elif isinstance(item, Ended):
                    pane.text += item.end.tail
                    pane.status = item.end.finish_reason or item.end.status
                if not self._console.is_terminal:
                    printed = self._print_lines(pane, printed, whole=isinstance(item, Ended))

    def _print_lines(self, pane: _Pane, printed: int, *, whole: bool) -> int:
        """Print what has come of a text in pieces of a line's length; returns how much has been printed."""
        text = pane.text.replace("\n", " ")
        while len(text) - printed >= LINE_CHARS or (whole and printed < len(text)):
            piece = text[printed : printed + LINE_CHARS]
            if not whole and " " in piece:
                piece = piece[: piece.rindex(" ") + 1]
            click.echo(f"{pane.priority:>11} {self._panes.index(pane) + 1} | {piece.strip()}")
            printed += len(piece)
        return printed

    def _screen(self) -> Columns:
        width = max(30, self._console.width // 2 - 1)
        return Columns(
            [
                Panel(
                    Text(pane.text.strip()[-6 * width :]),
                    title=f"{pane.priority}: {pane.prompt}",
                    title_align="left",
                    subtitle=f"{pane.tokens} tokens, {pane.status}",
                    subtitle_align="right",
                    border_style=COLOURS[pane.priority],
                    width=width,
                    height=6,
                )
                for pane in self._panes
            ]
        )


def _summary(panes: list[_Pane], results: list[JobResult], took_s: float) -> Table:
    table = Table("class", "jobs", "tokens", "first token after (median)", box=None)
    for priority in COLOURS:
        of_class = [result for pane, result in zip(panes, results, strict=True) if pane.priority == priority]
        tokens = sum(len(result.tokens) for result in of_class)
        first = statistics.median(result.usage.ttft_s for result in of_class)
        table.add_row(priority, str(len(of_class)), str(tokens), f"{first:.2f} s")
    tokens = sum(len(result.tokens) for result in results)
    table.add_row("all", str(len(results)), str(tokens), f"{tokens / took_s:.1f} tokens/s over {took_s:.1f} s")
    return table
