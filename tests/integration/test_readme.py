"""What the README shows, run as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from fleet import Fleet

from arriero.schemas.names import Names
from arriero.transports.connect import Endpoints

README = Path(__file__).parents[2] / "README.md"


async def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    folder = tmp_path / ".local" / "share" / "arriero"  # the default, in a home of its own
    async with AsyncExitStack() as stack:
        fleet = Fleet(Endpoints(data=folder), Names(), stack)
        await fleet.open()
        async with fleet.running(fleet.make_worker()), fleet.projecting(), asyncio.timeout(40):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code),
                env={**os.environ, "HOME": str(tmp_path)},
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
    assert process.returncode == 0
    shown, _, last = output.decode().rstrip().rpartition("\n")
    assert "Why do mules follow a mare?" in shown
    assert re.fullmatch(r"completed, \d+ tokens", last)
