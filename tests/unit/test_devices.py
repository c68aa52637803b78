"""Devices, and a worker for each GPU of a faked list: no GPU is needed, and none was there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arriero.ops.child import SETTINGS_VARIABLE
from arriero.ops.devices import VISIBLE, take_inventory, worker_per_gpu
from arriero.ops.settings import Settings
from arriero.schemas.errors import SetupError


def settings(tmp_path: Path, **changes: object) -> Settings:
    return Settings(data=tmp_path, cache=tmp_path, worker="w", **changes)  # type: ignore[arg-type]


def test_this_machine_is_listed() -> None:
    found = take_inventory()
    assert found.cores >= 1
    assert 0 < found.cpu.free_bytes <= found.cpu.total_bytes
    assert found.offload or not found.gpus


def test_each_gpu_gets_a_worker_that_sees_no_other(tmp_path: Path) -> None:
    specs = worker_per_gpu(settings(tmp_path, metrics_port=9100), 3, {})
    assert [one.role for one in specs] == ["worker-gpu0", "worker-gpu1", "worker-gpu2"]
    assert [one.environment[VISIBLE] for one in specs] == ["0", "1", "2"]
    told = [json.loads(one.environment[SETTINGS_VARIABLE]) for one in specs]
    assert [one["worker"] for one in told] == ["w-gpu0", "w-gpu1", "w-gpu2"]
    assert [one["metrics_port"] for one in told] == [9100, 9101, 9102]
    assert all(one.arguments[-1] == "worker" for one in specs)


def test_gpus_that_were_chosen_before_stay_the_ones(tmp_path: Path) -> None:
    specs = worker_per_gpu(settings(tmp_path), 2, {VISIBLE: "GPU-a, 5"})
    assert [one.environment[VISIBLE] for one in specs] == ["GPU-a", "5"]


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="arriero devices"):
        worker_per_gpu(settings(tmp_path), 0, {})
