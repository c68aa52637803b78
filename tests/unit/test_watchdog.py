"""Whom a supervisor blames for the end of a child, over small children of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from arriero.ops import supervisor, watchdog
from arriero.ops.crashes import CrashReport
from arriero.ops.signals import StopRequest
from arriero.ops.supervisor import ChildSpec, Supervisor
from arriero.schemas.clock import SystemClock

WAIT_S = 20.0
WATCHDOG_S = 0.8
PREAMBLE = """
import os, signal, sys, threading, time
from pathlib import Path
from arriero.ops.supervisor import FLIGHT_VARIABLE, Report
from arriero.schemas.event import Origin
from arriero.workers.flight import FlightRecorder, label_of
recorder = FlightRecorder(Path(os.environ[FLIGHT_VARIABLE])).__enter__()
def name(number):
    return label_of(f"j{number}", Origin("t", 0, number, 0))
recorder.seated(0, name(0))
recorder.seated(1, name(1))
report = Report()
"""
DECODES = """
recorder.step("decode", [0])
report.ready()
signal.pause()
"""
GOES_ON = """
recorder.step("decode", [0, 1])
report.ready()
while True:
    recorder.step("decode", [0, 1])
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.02)


class Watched:
    def __init__(self, body: str) -> None:
        self.reports: list[CrashReport] = []
        self.request = StopRequest()
        spec = ChildSpec(role="w", arguments=("-c", PREAMBLE + textwrap.dedent(body)), watchdog_s=WATCHDOG_S)
        self.supervisor = Supervisor([spec], clock=SystemClock(), rng=random.Random(1), crashed=self._crashed)
        (self.child,) = self.supervisor.children

    async def _crashed(self, report: CrashReport) -> None:
        self.reports.append(report)

    async def reported(self) -> CrashReport:
        await self.poll(lambda: bool(self.reports))
        return self.reports[0]

    async def died(self) -> None:
        await self.poll(lambda: self.child.restarts > 0)

    async def ready(self) -> int:
        await self.poll(lambda: self.child.state == "ready" and self.child.pid is not None)
        assert self.child.pid is not None
        return self.child.pid

    async def poll(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(body: str) -> AsyncIterator[Watched]:
    watched = Watched(body)
    task = asyncio.create_task(watched.supervisor.run(watched.request), name="supervisor")
    try:
        yield watched
    finally:
        watched.request.note()
        async with asyncio.timeout(WAIT_S):
            await task


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
async def test_a_fault_names_what_was_in_hand(number: signal.Signals) -> None:
    async with running(GOES_ON) as watched:
        os.kill(await watched.ready(), number)
        report = await watched.reported()
    assert (report.signal, report.operation) == (number.name, "decode")
    assert [job.id for job in report.jobs] == ["j0", "j1"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_kill_names_nobody(number: signal.Signals) -> None:
    async with running(GOES_ON) as watched:
        os.kill(await watched.ready(), number)
        await watched.died()
    assert watched.reports == []


async def test_a_fault_is_blamed_on_what_its_own_thread_was_doing() -> None:
    body = """
    import ctypes
    from arriero.ops.crashes import tell_faults
    from arriero.workers.engine.runner import prepare_one
    class Deadly:
        def prepare(self, job):
            ctypes.string_at(0)
    telling = tell_faults(Path(os.environ[FLIGHT_VARIABLE]))
    telling.__enter__()
    def tokenise():
        time.sleep(0.1)
        prepare_one(Deadly(), recorder, None, name(7))
    threading.Thread(target=tokenise, daemon=True).start()
    """
    async with running(textwrap.dedent(body) + GOES_ON) as watched:
        report = await watched.reported()
    assert (report.signal, report.operation, [job.id for job in report.jobs]) == ("SIGSEGV", "tokenise", ["j7"])


async def test_a_step_that_never_ends_is_ended() -> None:
    async with running(DECODES) as watched:
        report = await watched.reported()
    assert (report.signal, report.operation, [job.id for job in report.jobs]) == ("watchdog", "decode", ["j0"])


async def test_a_child_that_is_idle_or_loads_may_take_its_time() -> None:
    for body in ("report.ready()\nsignal.pause()", 'recorder.step("load")\nreport.ready()\nsignal.pause()'):
        async with running(body) as watched:
            await watched.ready()
            await asyncio.sleep(3 * WATCHDOG_S)  # the time itself is what must not matter
            assert watched.child.restarts == 0


async def test_a_prompt_that_holds_a_tokeniser_up_is_blamed_without_those_that_decode_meanwhile() -> None:
    body = """
    def tokenise():
        with recorder.tokenising(name(7)):
            threading.Event().wait()
    threading.Thread(target=tokenise, daemon=True).start()
    """
    async with running(textwrap.dedent(body) + GOES_ON) as watched:
        report = await watched.reported()
    assert (report.operation, [job.id for job in report.jobs]) == ("tokenise", ["j7"])


async def test_a_child_that_is_stopped_is_not_stuck() -> None:
    body = DECODES.replace("signal.pause()", "time.sleep(0.3)\nrecorder.step('idle')\nsignal.pause()")
    async with running(body) as watched:
        pid = await watched.ready()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3 * WATCHDOG_S)
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(2 * WATCHDOG_S)
        assert (watched.child.restarts, watched.reports) == (0, [])


async def test_a_machine_that_was_stopped_as_a_whole_has_no_stuck_child(tmp_path: Path) -> None:
    """Supervisor and child are frozen together, as by a container that is paused."""
    script = tmp_path / "supervised.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, random, sys
        from arriero.ops.signals import StopRequest
        from arriero.ops.supervisor import ChildSpec, Supervisor
        from arriero.schemas.clock import SystemClock
        def changed(child):
            print(child.state, child.pid or 0, flush=True)
        spec = ChildSpec(role="w", arguments=("-c", sys.argv[1]), watchdog_s=float(sys.argv[2]))
        asyncio.run(Supervisor([spec], clock=SystemClock(), rng=random.Random(1), changed=changed).run(StopRequest()))
        """)
    )
    body = PREAMBLE + textwrap.dedent("""
    recorder.step("decode", [0, 1])
    report.ready()
    time.sleep(0.7)
    recorder.step("idle")
    signal.pause()
    """)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), body, str(WATCHDOG_S), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while not (line := await process.stdout.readline()).startswith(b"ready"):
                assert line
        pid = int(line.split()[1])
        await asyncio.sleep(WATCHDOG_S / 2)  # the step has been seen
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3 * WATCHDOG_S)
        os.kill(process.pid, signal.SIGCONT)  # it is awake first
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * WATCHDOG_S):
                assert not await process.stdout.readline()
    finally:
        process.kill()
        await process.wait()


async def test_a_kill_long_after_another_process_ran_out_of_memory_blames_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = 0
    monkeypatch.setattr(watchdog, "oom_kills", lambda: kills)
    monkeypatch.setattr(watchdog, "OOM_WINDOW_S", 0.5)
    async with running(GOES_ON) as watched:
        pid = await watched.ready()
        kills = 1  # a neighbour's
        await asyncio.sleep(2 * WATCHDOG_S)
        os.kill(pid, signal.SIGKILL)
        await watched.died()
    assert watched.reports == []


async def test_the_kernels_kill_for_memory_names_what_was_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 0
    monkeypatch.setattr(watchdog, "oom_kills", lambda: kills)
    async with running(GOES_ON) as watched:
        pid = await watched.ready()
        kills = 1
        os.kill(pid, signal.SIGKILL)
        report = await watched.reported()
    assert (report.signal, len(report.jobs)) == ("out_of_memory", 2)
