"""The short form of `make chaos`: each fault a few times against a fleet of real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from arriero.ops.chaos.faults import FAULTS
from arriero.ops.chaos.run import ChaosOptions, Result, run_chaos

SHORT_REAL = ("worker-kill", "worker-point", "bus-and-worker", "network-cut")
"""Of the real pair's faults those that no other suite meets; each of the others costs half a minute, too."""

CASES = [
    *(
        pytest.param("embedded", name, id=f"embedded-{name}")
        for name, fault in FAULTS.items()
        if "embedded" in fault.pairs
    ),
    *(pytest.param("real", name, id=f"real-{name}", marks=pytest.mark.real) for name in SHORT_REAL),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("pair", "fault"), CASES)
def test_nothing_is_lost_doubled_or_shown_wrongly(pair: str, fault: str, tmp_path: Path) -> None:
    results: list[Result] = []
    options = ChaosOptions(pair=pair, faults=[fault], workers=2, injections=3, pause_s=0.5)  # type: ignore[arg-type]
    asyncio.run(run_chaos(options, results.append, tmp_path))
    (result,) = results
    assert result.verdict.holds, result.verdict.breaches
    assert result.verdict.jobs > 0
    assert result.verdict.tokens > 0
    assert result.kills >= (0 if fault in ("worker-freeze", "bus-emptied", "disk-full", "network-cut") else 3)
