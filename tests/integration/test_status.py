"""The line that says how a stack is."""

from __future__ import annotations

from pathlib import Path

import pytest

from arriero.ops import status, wiring
from arriero.ops.settings import Settings
from arriero.ops.status import Pulse


async def test_a_full_disk_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data=tmp_path / "data", cache=tmp_path)
    await wiring.prepare(settings)
    async with Pulse(settings) as pulse:
        assert "disk" not in await pulse.line()
        monkeypatch.setattr(status, "DISK_LOW_BYTES", 1 << 60)
        assert (await pulse.line()).startswith("the disk is full")
