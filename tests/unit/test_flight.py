"""What a flight recorder tells of a process that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.ops.crashes import ENGINE_DIED, CrashLog, CrashReport, crash_report, oom_kills
from arriero.schemas.clock import SystemClock
from arriero.schemas.event import Origin
from arriero.workers.flight import (
    ENGINE_LANE,
    LABEL_BYTES,
    FlightRecorder,
    Named,
    label_of,
    progress,
    read_flight,
    stuck_lanes,
)

ORIGIN = Origin("arriero.jobs.default.standard", 3, 17, 5)


def origin(offset: int) -> Origin:
    return Origin("arriero.jobs.default.standard", 3, offset, 5)


def test_a_step_names_the_jobs_in_it_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        for slot in range(4):
            recorder.seated(slot, label_of(f"j{slot}", origin(slot)))
        recorder.step("decode", [1, 3])
        flight = read_flight(path)
        assert flight is not None
        assert (flight.operation, flight.jobs) == ("decode", [Named("j1", origin(1)), Named("j3", origin(3))])
        recorder.seated(1, label_of("j9", origin(9)))
        recorder.step("prefill", [1])
        flight = read_flight(path)
        assert flight is not None
        assert (flight.operation, flight.jobs) == ("prefill", [Named("j9", origin(9))])
        recorder.step("idle")
        flight = read_flight(path)
        assert flight is not None
        assert (flight.operation, flight.jobs) == ("idle", [])


def test_what_is_under_way_in_other_threads_is_named_beside_the_step(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        recorder.seated(0, label_of("a", origin(0)))
        recorder.step("decode", [0])
        with recorder.tokenising(label_of("b", origin(1))), recorder.reading(label_of("c", origin(2))):
            flight = read_flight(path)
        after = read_flight(path)
    assert flight is not None
    assert {job.id for job in flight.jobs} == {"a", "b", "c"}
    assert after is not None
    assert [job.id for job in after.jobs] == ["a"]


def test_an_operation_that_raises_is_over(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        for operation in (recorder.reading, recorder.tokenising):
            with pytest.raises(ValueError, match="refused"), operation(label_of("a", ORIGIN)):
                raise ValueError("refused")
        flight = read_flight(path)
    assert flight is not None
    assert flight.jobs == []


def test_more_threads_than_lanes_and_labels_that_are_too_long_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        many = [recorder.tokenising(label_of(f"j{number}", origin(number))) for number in range(20)]
        for one in many:
            one.__enter__()
        recorder.seated(0, "x" * (LABEL_BYTES + 1))
        recorder.seated(5_000, label_of("a", ORIGIN))
        recorder.step("decode", [0])
        assert read_flight(path) is not None
        for one in many:
            one.__exit__(None, None, None)
        flight = read_flight(path)
    assert flight is not None
    assert flight.jobs == []


def test_the_longest_names_that_there_are_fit() -> None:
    longest = Origin("n" * 61 + ".jobs." + "p" * 61 + ".interactive", 99_999, 1 << 62, 1 << 45)
    assert len(label_of("i" * 200, longest)) <= LABEL_BYTES


def test_without_a_path_nothing_is_written() -> None:
    with FlightRecorder(None) as recorder:
        recorder.seated(0, "x")
        recorder.step("decode", [0])
        with recorder.reading("x"):
            pass


def test_what_was_written_last_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    code = (
        "import os, signal, sys; from pathlib import Path; from arriero.schemas.event import Origin\n"
        "from arriero.workers.flight import FlightRecorder, label_of\n"
        "with FlightRecorder(Path(sys.argv[1])) as recorder:\n"
        "    recorder.seated(2, label_of('a', Origin('t', 0, 1, 2))); recorder.step('decode', [2])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    flight = read_flight(path)
    assert flight is not None
    assert flight.jobs == [Named("a", Origin("t", 0, 1, 2))]


def test_garbage_is_no_flight(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    assert read_flight(path) is None
    path.write_bytes(b"short")
    assert read_flight(path) is None
    assert progress(path) == ()
    path.write_bytes(os.urandom(1 << 20))
    flight = read_flight(path)
    assert flight is not None
    assert flight.jobs == []


def test_only_an_operation_that_does_not_move_on_is_stuck(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        recorder.step("load")
        before = progress(path)
        assert not stuck_lanes(before, progress(path))
        recorder.step("decode", [0])
        before = progress(path)
        assert stuck_lanes(before, progress(path))
        recorder.step("decode", [0])
        assert not stuck_lanes(before, progress(path))
        recorder.step("idle")
        before = progress(path)
        assert not stuck_lanes(before, progress(path))
        with recorder.tokenising(label_of("a", ORIGIN)):
            before = progress(path)
            assert stuck_lanes(before, progress(path))


@pytest.mark.parametrize(
    ("status", "stuck", "out_of_memory", "cause"),
    [
        (-signal.SIGSEGV, (), False, "SIGSEGV"),
        (-signal.SIGABRT, (), False, "SIGABRT"),
        (-signal.SIGKILL, (), False, None),
        (-signal.SIGKILL, (), True, "out_of_memory"),
        (-signal.SIGKILL, (ENGINE_LANE,), False, "watchdog"),
        (-signal.SIGTERM, (), True, None),
        (ENGINE_DIED, (), False, "exception"),
        (1, (), True, None),
        (0, (), False, None),
    ],
)
def test_only_faults_are_blamed_on_what_was_in_hand(
    tmp_path: Path, status: int, stuck: tuple[int, ...], out_of_memory: bool, cause: str | None
) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        recorder.seated(0, label_of("a", ORIGIN))
        recorder.step("decode", [0])
    report = crash_report(status, path, stuck=stuck, out_of_memory=out_of_memory, clock=SystemClock())
    assert (report.signal if report else None) == cause
    if report:
        (event,) = report.events("w")
        assert (event.id, event.origin, event.alone, event.worker) == ("a", ORIGIN, True, "w")


def test_an_idle_process_that_dies_blames_nobody(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        recorder.step("idle")
    assert crash_report(-signal.SIGSEGV, path, stuck=(), out_of_memory=False, clock=SystemClock()) is None


def test_a_supervisor_remembers_who_was_there_and_how_often() -> None:
    crashes = CrashLog()
    both = [Named("a", origin(0)), Named("b", origin(1))]
    for time_ms, jobs in enumerate((both, both, both[:1])):
        crashes.add(CrashReport("SIGSEGV", "decode", jobs, time_ms))
    (found,) = [state for state in json.loads(crashes.to_json()) if state["id"] == "a"]
    assert (found["crashes"], found["crashes_in_row"], found["crashes_alone"]) == (3, 3, 1)
    for number in range(500):
        crashes.add(CrashReport("SIGSEGV", "decode", [Named(f"j{number}", origin(number))], 3))
    assert '"id":"a"' not in crashes.to_json()


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/box", "box/memory.events"),
        ("0::/box", "memory.events"),
        ("4:memory:/box", "memory/box/memory.oom_control"),
    ],
)
def test_the_kernels_count_is_found_in_either_hierarchy(tmp_path: Path, line: str, file: str) -> None:
    proc, counter = tmp_path / "cgroup", tmp_path / "fs" / file
    proc.write_text(f"{line}\n")
    assert oom_kills(proc, tmp_path / "fs") == 0
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text("low 0\noom_kill 7\n")
    assert oom_kills(proc, tmp_path / "fs") == 7


def test_of_given_lanes_only_theirs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    with FlightRecorder(path) as recorder:
        recorder.seated(0, label_of("a", origin(0)))
        with recorder.tokenising(label_of("b", origin(1))):
            before = progress(path)
            recorder.step("decode", [0])
            other = read_flight(path, stuck_lanes(before, progress(path)))
            engine = read_flight(path, [ENGINE_LANE])
    assert other is not None
    assert engine is not None
    assert (other.operation, [job.id for job in other.jobs]) == ("tokenise", ["b"])
    assert (engine.operation, [job.id for job in engine.jobs]) == ("decode", ["a"])


def test_where_there_is_no_room_for_a_recorder_the_work_goes_on_without(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from arriero.workers.flight import FlightRecorder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "with FlightRecorder(Path(sys.argv[1])) as recorder:\n"
        "    recorder.seated(200, 'x' * 600); recorder.step('decode', [200])\n"
    )
    path = tmp_path / "flight"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True)
    assert done.returncode == 0
    assert b"flight_recorder_unavailable" in done.stdout + done.stderr
    assert read_flight(path) is None
