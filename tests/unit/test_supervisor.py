"""The supervisor, over small children of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from arriero.ops.signals import StopRequest, stop_signals
from arriero.ops.supervisor import Child, ChildSpec, Report, Supervisor
from arriero.schemas.clock import SystemClock
from arriero.schemas.errors import SetupError

WAIT_S = 20.0
PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from arriero.ops.supervisor import Report
report = Report()
"""
SLEEPS = "report.ready(pid=os.getpid())\nsignal.pause()"


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.ops.supervisor.BACKOFF_FIRST_S", 0.02)


class Watched:
    """A supervisor that runs, and what it says."""

    def __init__(self, specs: list[ChildSpec]) -> None:
        self.states: list[tuple[str, str]] = []
        self.request = StopRequest()
        self._news = asyncio.Condition()
        self._told: set[asyncio.Task[None]] = set()
        self.supervisor = Supervisor(specs, clock=SystemClock(), rng=random.Random(1), changed=self._changed)

    def _changed(self, child: Child) -> None:
        self.states.append((child.spec.role, child.state))
        task = asyncio.create_task(self._tell())
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(condition)

    def child(self, role: str) -> Child:
        return next(child for child in self.supervisor.children if child.spec.role == role)


def child(role: str, body: str, **settings: float) -> ChildSpec:
    return ChildSpec(role=role, arguments=("-c", PREAMBLE + textwrap.dedent(body)), **settings)  # type: ignore[arg-type]


@asynccontextmanager
async def running(*specs: ChildSpec) -> AsyncIterator[Watched]:
    watched = Watched(list(specs))
    task = asyncio.create_task(watched.supervisor.run(watched.request), name="supervisor")
    try:
        yield watched
    finally:
        watched.request.note()
        async with asyncio.timeout(WAIT_S):
            await task


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_that_dies_is_started_again_and_why_is_known() -> None:
    async with running(child("a", SLEEPS)) as watched:
        await watched.until(lambda: watched.child("a").state == "ready")
        first = watched.child("a").info["pid"]
        os.kill(first, signal.SIGKILL)
        await watched.until(lambda: ("a", "restarting") in watched.states)
        assert watched.child("a").why == "killed by SIGKILL"
        await watched.until(lambda: watched.child("a").state == "ready")
        assert watched.child("a").info["pid"] != first
        assert watched.child("a").restarts == 1


async def test_last_words_that_are_not_fatal_are_why_it_is_started_again() -> None:
    async with running(child("a", "report.error('the brokers are away', fatal=False)\nsys.exit(1)")) as watched:
        await watched.until(lambda: ("a", "restarting") in watched.states)
        assert watched.child("a").why == "the brokers are away"


async def test_fatal_last_words_end_the_supervisor_and_the_other_children() -> None:
    watched = Watched([child("other", SLEEPS), child("a", "report.error('no such file', fatal=True)\nsys.exit(1)")])
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(SetupError, match="no such file"):
            await watched.supervisor.run(watched.request)
    assert watched.supervisor.children[0].state == "stopped"
    assert watched.supervisor.children[0].pid is None


async def test_children_stop_in_reverse_order_of_starting() -> None:
    async with running(child("a", SLEEPS), child("b", SLEEPS)) as watched:
        await watched.until(lambda: all(one.state == "ready" for one in watched.supervisor.children))
        pids = [one.info["pid"] for one in watched.supervisor.children]
    assert [role for role, state in watched.states if state == "stopped"] == ["b", "a"]
    assert not any(alive(pid) for pid in pids)


async def test_a_stop_while_a_child_waits_for_its_restart_ends_at_once() -> None:
    async with running(child("a", "sys.exit(7)")) as watched:
        await watched.until(lambda: watched.child("a").restarts >= 3)
        began = asyncio.get_running_loop().time()
    assert watched.child("a").why == "ended with status 7"
    assert asyncio.get_running_loop().time() - began < 2.0


async def test_a_stop_before_a_child_has_been_started_leaves_none() -> None:
    async with running(child("a", SLEEPS)) as watched:
        pass
    assert watched.child("a").state == "stopped"
    assert watched.child("a").pid is None


async def test_a_second_request_sends_a_second_signal() -> None:
    body = """
        count = 0
        def note(number, frame):
            global count
            count += 1
            if count == 2:
                os._exit(0)
        signal.signal(signal.SIGTERM, note)
        report.ready(pid=os.getpid())
        while True:
            signal.pause()
    """
    async with running(child("a", body, grace_s=3600.0)) as watched:
        await watched.until(lambda: watched.child("a").state == "ready")
        watched.request.note()
        await watched.until(lambda: watched.child("a").state == "stopping")
        watched.request.note()
    assert watched.child("a").state == "stopped"


async def test_a_child_that_ignores_everything_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.ops.supervisor.KILL_AFTER_S", 0.1)
    monkeypatch.setattr("arriero.ops.supervisor.ABORT_S", 0.1)
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    async with running(child("a", body)) as watched:
        await watched.until(lambda: watched.child("a").state == "ready")
        pid = watched.child("a").info["pid"]
    assert not alive(pid)


async def test_output_is_appended_to_the_log_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")
    spec = ChildSpec(role="a", arguments=("-c", PREAMBLE + "print('out', flush=True)\n" + SLEEPS), log_file=path)
    async with running(spec) as watched:
        await watched.until(lambda: watched.child("a").state == "ready")
    assert path.read_text() == "before\nout\n"


async def test_what_is_no_report_is_ignored() -> None:
    async with running(
        child("a", "os.write(report._fd, b'[]\\n5\\nnonsense\\n{\"error\": 1}\\n')\n" + SLEEPS)
    ) as watched:
        await watched.until(lambda: watched.child("a").state == "ready")


async def test_no_file_descriptor_is_left_of_many_lives() -> None:
    async with running(child("a", "sys.exit(1)")) as watched:
        await watched.until(lambda: watched.child("a").restarts == 1)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        await watched.until(lambda: watched.child("a").restarts == 3)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_a_child_hears_that_its_supervisor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv("ARRIERO_STATUS_FD", str(writing))
    report = Report()
    lost = asyncio.Event()
    report.watch(lost.set)
    report.ready(model="m")
    assert os.read(reading, 1000) == b'{"ready": {"model": "m"}}\n'
    assert not lost.is_set()
    os.close(reading)
    async with asyncio.timeout(WAIT_S):
        await lost.wait()
    report.error("nobody hears this", fatal=True)
    os.close(writing)


async def test_a_child_hears_that_its_supervisor_was_gone_before_it_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setenv("ARRIERO_STATUS_FD", str(writing))
    lost = asyncio.Event()
    Report().watch(lost.set)
    async with asyncio.timeout(WAIT_S):
        await lost.wait()
    os.close(writing)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_asks_to_stop_and_a_second_presses(number: signal.Signals) -> None:
    with stop_signals() as request:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(request.asked.wait(), WAIT_S)
        assert not request.pressed.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(request.pressed.wait(), WAIT_S)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_under_nohup_a_closed_terminal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as request:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            assert not request.asked.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)
