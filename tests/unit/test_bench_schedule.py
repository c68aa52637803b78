"""The scheduler's benchmark: the same trace gives the same numbers, and they say what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from arriero.ops.bench.schedule import ScheduleBenchOptions, draw_trace, read_trace, replay
from arriero.schemas.errors import SetupError

OPTIONS = ScheduleBenchOptions(minutes=5.0)


def test_a_trace_is_a_function_of_its_seed_and_so_is_its_replay() -> None:
    trace = draw_trace(OPTIONS)
    assert trace == draw_trace(OPTIONS)
    first, second = replay(trace, OPTIONS), replay(trace, OPTIONS)
    assert first.classes == second.classes
    assert first.tokens == sum(one.output for one in trace)


def test_classes_serve_the_urgent_and_cost_no_throughput() -> None:
    trace = draw_trace(OPTIONS)
    ours, line = replay(trace, OPTIONS), replay(trace, OPTIONS, classes=False)
    assert ours.classes["interactive"].kept > line.classes["interactive"].kept
    assert ours.classes["interactive"].ttft_p95_s < line.classes["interactive"].ttft_p95_s
    assert ours.wall_s < 1.05 * line.wall_s


@pytest.mark.parametrize("line", ["", "x", '{"at": 1, "prompt": 0}', '{"at": -1}', '{"when": 1}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "trace").write_text(line)
    with pytest.raises(SetupError):
        read_trace(tmp_path / "trace")
