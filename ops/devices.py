"""The devices that models can run on, and a worker for each GPU.

llama.cpp is asked in a process of its own: whoever asks a CUDA device anything holds memory on it from then on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from arriero.ops.child import spec
from arriero.ops.settings import Settings
from arriero.ops.supervisor import ChildSpec
from arriero.ops.wiring import worker_name
from arriero.schemas.errors import SetupError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ASK_S: Final = 60.0
"""A driver that wakes its devices takes seconds."""
_QUESTION: Final = (
    "import msgspec, sys; from arriero.workers.engine.llama.model import inventory; "
    "sys.stdout.buffer.write(msgspec.json.encode(inventory()))"
)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """ggml's: CPU, CUDA0, ..."""
    description: str
    free_bytes: int
    total_bytes: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    cpu: Device
    cores: int
    """That this process may use."""
    gpus: list[Device]
    offload: bool
    """Whether llama.cpp here was built for any GPU."""


def take_inventory() -> Inventory:
    """Raises SetupError when llama.cpp cannot be asked."""
    try:
        asked = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, timeout=ASK_S, check=True)
        return msgspec.json.decode(asked.stdout, type=Inventory)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SetupError(f"llama.cpp cannot be asked for its devices: {' '.join(last)}", code="child_failed") from error
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        raise SetupError(f"llama.cpp cannot be asked for its devices: {error}", code="child_failed") from error


def worker_per_gpu(settings: Settings, gpus: int, environment: Mapping[str, str]) -> list[ChildSpec]:
    """A worker for each GPU, which sees no other. Ports of metrics follow each other. Raises SetupError."""
    if not gpus:
        raise SetupError("--per-gpu finds no GPU here; `arriero devices` tells what there is", code="bad_setting")
    if settings.metrics_port and settings.metrics_port + gpus > 1 << 16:
        raise SetupError(f"--metrics-port leaves no ports for {gpus} workers", code="bad_setting")
    visible = [one.strip() for one in environment.get(VISIBLE, "").split(",") if one.strip()]
    ids = visible[:gpus] if len(visible) >= gpus else [str(number) for number in range(gpus)]
    name = settings.worker or worker_name(os.getpid())
    specs = []
    for number, device in enumerate(ids):
        own = msgspec.structs.replace(
            settings,
            worker=f"{name}-gpu{number}",
            metrics_port=settings.metrics_port + number if settings.metrics_port else settings.metrics_port,
        )
        one = spec("worker", own, log_folder=False)
        alone = {**one.environment, VISIBLE: device}
        specs.append(msgspec.structs.replace(one, role=f"worker-gpu{number}", environment=alone))
    return specs
