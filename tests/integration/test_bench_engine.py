"""The engine bench: what it prints is what happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner
from tiny_gguf import write_tiny_gguf

from arriero.ops.bench.engine import EngineBenchOptions, run_engine_bench
from arriero.ops.cli.bench_engine import engine_command


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command configures logging for its process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_the_echo_engine_is_measured(tmp_path: Path) -> None:
    bench = run_engine_bench(EngineBenchOptions(model="echo", cache=tmp_path, jobs=100, max_tokens=5, slots=8))
    assert (bench.jobs, bench.failed, bench.output_tokens) == (100, 0, 500)
    assert bench.tokens_per_s > 0
    assert 0 < bench.full_steps.steps <= bench.all_steps.steps


def test_a_model_is_measured_and_printed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    arguments = ["--model", str(path), "--jobs", "6", "--max-tokens", "4", "--slots", "3", "--threads", "1"]
    shown = CliRunner().invoke(engine_command, arguments)
    assert shown.exit_code == 0, shown.output
    assert "tokens/s" in shown.output
    assert "inter-token" in shown.output
    told = json.loads(CliRunner().invoke(engine_command, [*arguments, "--json"]).stdout)
    assert told["output_tokens"] == 24
    assert told["model"]["name"] == "tiny"


@pytest.mark.parametrize("model", ["nowhere.gguf", "smollm2-135m-instruct"])
def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path, model: str) -> None:
    shown = CliRunner().invoke(engine_command, ["--model", model, "--cache", str(tmp_path)])
    assert shown.exit_code != 0
    assert shown.output.startswith("Error: ")
    assert "Traceback" not in shown.output
