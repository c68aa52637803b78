"""The matrix of all runs, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from arriero.ops.chaos.faults import FAULTS
from arriero.ops.chaos.run import Result

_HEAD = (
    "| fault | runs | injected | kills | jobs | lost | duplicated | wrong text | tokens read | token errors "
    "| audit | resets | takeover, s: median / slowest |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
_TITLES = {"embedded": "The embedded files", "real": "Apache Kafka and Redis"}


def read_results(path: Path) -> list[Result]:
    """One result a line."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines() if line]


def matrix(results: Sequence[Result]) -> str:
    parts = []
    for pair, title in _TITLES.items():
        of_pair = [result for result in results if result.pair == pair]
        if of_pair:
            rows = [
                _row(fault.told, [result for result in of_pair if result.fault == name])
                for name, fault in FAULTS.items()
                if any(result.fault == name for result in of_pair)
            ]
            parts.append("\n".join((f"### {title}", "", _HEAD, *rows, _row("**all**", of_pair))))
    return "\n\n".join(parts)


def _row(title: str, results: Sequence[Result]) -> str:
    verdicts = [result.verdict for result in results]
    recoveries = [one for result in results for one in result.recovery_s]
    cells = [
        title,
        len(results),
        sum(result.injections for result in results),
        sum(result.kills for result in results),
        *(
            f"{sum(getattr(verdict, name) for verdict in verdicts):,}"
            for name in ("jobs", "lost", "duplicated", "wrong", "tokens", "token_errors", "audit", "resets")
        ),
        f"{statistics.median(recoveries):.2f} / {max(recoveries):.2f}" if recoveries else "",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"
