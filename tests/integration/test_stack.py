"""`arriero up` and `arriero worker` as processes: their start, their stop, and deaths of their children."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import SystemRandom

import psutil
import pytest
from terminal import Terminal, Typed, left_over, terminal, until
from tiny_gguf import write_tiny_gguf

from arriero.ops.testbed import Broker, RedisServer, cache_folder, kafka_jars
from arriero.schemas.names import Names

LONG = "all work and no play " * 40


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Terminal]:
    with terminal(tmp_path) as one:
        yield one


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.real)])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    flags: list[str] = []
    if request.param == "real":
        pair = request.getfixturevalue("real_pair")
        space = f"t{SystemRandom().getrandbits(48):x}"
        flags = ["--kafka", pair.bootstrap, "--redis", pair.redis_url, "--namespace", space]
    with terminal(tmp_path, *flags) as one:
        yield one


def submit_long(terminal: Terminal, *flags: str) -> tuple[Typed, str]:
    """A job of 280 tokens that has begun, and its id."""
    typed = terminal.start("submit", *flags, LONG)
    until(lambda: len(typed.out) > 10)
    return typed, typed.err.split()[1]


def outcomes(terminal: Terminal, job_id: str) -> list[str]:
    """The types of the job's events, in order."""
    typed = terminal.run("history", "--json", job_id)
    assert typed.process.returncode == 0, typed.err
    return [json.loads(line)["type"].lower() for line in typed.out.splitlines()]


def log_of(terminal: Terminal, role: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (terminal.folder / "data" / "logs" / f"{role}.log").read_text().splitlines()]


# --- start -------------------------------------------------------------------------------------------------


def test_up_says_where_everything_is(embedded: Terminal) -> None:
    up = embedded.up()
    up.wait_for("Ctrl-C stops all")
    assert "ready: echo on echo, 64 slots; gateway http://127.0.0.1:" in up.err
    assert f"logs in {embedded.folder / 'data' / 'logs'}" in up.err
    assert f'arriero submit --data {embedded.folder / "data"} "' in up.err
    url = up.err.split("gateway ")[1].split()[0]
    with urllib.request.urlopen(url + "/healthz", timeout=10) as answer:
        assert answer.status == 200


def test_a_second_up_on_a_folder_is_refused(embedded: Terminal) -> None:
    up = embedded.up()
    second = embedded.run("up", "--engine", "echo", "--port", "0")
    assert second.process.returncode == 2
    assert f"a stack is running on {embedded.folder / 'data'} already (process {up.process.pid})" in second.err
    assert second.err.count("\n") == 1
    assert embedded.run("submit", "still here").out == "still here\n"


def test_a_port_in_use_ends_up_with_a_sentence(embedded: Terminal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = embedded.run("up", "--engine", "echo", "--port", str(port))
        assert up.process.returncode == 2
        assert f"arriero: the gateway cannot listen on 127.0.0.1:{port}" in up.err
        assert "Traceback" not in up.err
        assert "again" not in up.err


def test_a_metrics_port_in_use_ends_a_worker_with_a_sentence(embedded: Terminal) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worker = embedded.run("worker", "--engine", "echo", "--metrics-port", str(port))
        assert worker.process.returncode == 2
        assert f"arriero: metrics cannot be served on 127.0.0.1:{port}" in worker.err


@pytest.mark.parametrize("command", ["up", "worker"])
@pytest.mark.parametrize("kind", ["missing", "not gguf", "truncated", "a folder", "empty"])
def test_a_model_that_cannot_be_used_is_one_sentence(embedded: Terminal, command: str, kind: str) -> None:
    path = embedded.folder / "model.gguf"
    if kind == "not gguf":
        path.write_bytes(b"PK\x03\x04" * 1000)
    elif kind == "truncated":
        write_tiny_gguf(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "a folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    typed = embedded.run(command, "--model", str(path))
    assert typed.process.returncode == 2
    assert typed.err.startswith("arriero: ")
    assert str(path) in typed.err
    assert typed.err.count("\n") == 1


def test_an_engine_that_cannot_be_set_so_ends_the_stack(embedded: Terminal) -> None:
    """Only loading finds out, so it is the child that says it."""
    path = write_tiny_gguf(embedded.folder / "model.gguf")
    up = embedded.run("up", "--model", str(path), "--port", "0", "--kv-type", "q8_0", "--flash-attn", "off")
    assert up.process.returncode == 2
    assert up.err.splitlines()[-1].startswith("arriero: ")
    assert "again" not in up.err
    assert "Traceback" not in up.err


@pytest.mark.parametrize("command", ["worker", "projector", "gateway", "up"])
def test_brokers_that_are_not_there_at_the_start_are_one_sentence(tmp_path: Path, command: str) -> None:
    flags = [
        "--kafka",
        "127.0.0.1:1",
        "--redis",
        "redis://127.0.0.1:1",
        "--data",
        str(tmp_path / "data"),
        "--wait",
        "0",
    ]
    engine = ["--engine", "echo"] if command in ("worker", "up") else []
    typed = Typed(tmp_path, command, *flags, *engine)
    assert typed.wait() == 1
    assert "arriero: Kafka at 127.0.0.1:1 does not answer" in typed.err
    assert "Traceback" not in typed.err


@pytest.mark.real
def test_a_redis_that_is_not_there_at_the_start_is_one_sentence(tmp_path: Path, kafka_bootstrap: str) -> None:
    brokers = ["--kafka", kafka_bootstrap, "--redis", "redis://127.0.0.1:1"]
    typed = Typed(tmp_path, "worker", *brokers, "--engine", "echo", "--wait", "0.5")
    assert typed.wait() == 1
    waiting, ending = typed.err.splitlines()[0], typed.err.splitlines()[-1]
    assert "waiting up to" in waiting
    assert ending.startswith("arriero: ")
    assert "127.0.0.1:1" in ending
    assert "Traceback" not in typed.err


@pytest.mark.real
def test_brokers_may_come_late(tmp_path: Path, kafka_bootstrap: str, names: Names) -> None:
    redis = RedisServer(tmp_path)
    flags = ["--kafka", kafka_bootstrap, "--redis", redis.url, "--namespace", names.namespace]
    with closing(Typed(tmp_path / "worker", "worker", *flags, "--engine", "echo", "--log-plain")) as worker:
        worker.wait_for("waiting up to 60 s")
        redis.start()
        try:
            worker.wait_for("worker_joined")
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0
        finally:
            redis.stop()


# --- stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(both: Terminal, number: signal.Signals) -> None:
    up = both.up()
    up.signal(number)
    assert up.wait() == 0
    assert up.err.endswith("stopped; what was not finished stays queued\n")
    assert left_over(both.folder) == []


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.5, 0.7])
def test_a_signal_during_the_start_stops_everything(embedded: Terminal, after_s: float) -> None:
    up = embedded.start("up", "--engine", "echo", "--port", "0")
    up.wait_for("starting on")
    time.sleep(after_s)  # no event to wait for: it should hit any moment of the start
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert left_over(embedded.folder) == []


def test_a_supervisor_that_is_killed_takes_its_children_along(embedded: Terminal) -> None:
    up = embedded.up("--echo-step", "0.05", "--grace", "0")
    submit_long(embedded)
    up.signal(signal.SIGKILL)
    until(lambda: not [pid for pid in left_over(embedded.folder) if is_server(pid)])


def is_server(pid: int) -> bool:
    try:
        return "arriero.ops.child" in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


def test_a_supervisor_that_is_killed_during_the_start_leaves_nothing(embedded: Terminal) -> None:
    up = embedded.start("up", "--engine", "echo", "--port", "0")
    until(lambda: len(up.children()) == 4)
    up.signal(signal.SIGKILL)
    until(lambda: not left_over(embedded.folder))


def test_the_folder_is_free_after_a_kill(embedded: Terminal) -> None:
    embedded.up().signal(signal.SIGKILL)
    until(lambda: not left_over(embedded.folder))
    embedded.up()
    assert embedded.run("submit", "hello").out == "hello\n"


def test_a_second_signal_does_not_wait_for_running_jobs(embedded: Terminal) -> None:
    up = embedded.up("--echo-step", "0.5", "--grace", "600")
    submit_long(embedded)
    up.signal(signal.SIGINT)
    up.wait_for("stopping: running jobs get their grace period")
    up.signal(signal.SIGINT)
    assert up.wait() == 0


def test_a_terminal_shows_a_status_line_and_may_be_closed(embedded: Terminal) -> None:
    leader, follower = pty.openpty()
    up = embedded.start("up", "--engine", "echo", "--port", "0", terminal=follower)
    os.close(follower)
    seen = b""
    while b"all ready | 0 running | unsettled: interactive 0" not in seen:
        seen += os.read(leader, 4096)
    os.close(leader)
    assert embedded.run("submit", "hello").out == "hello\n"
    up.signal(signal.SIGTERM)
    assert up.wait() == 0


# --- jobs across stops and deaths --------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_started_again_and_the_job_ends_once(both: Terminal) -> None:
    up = both.up("--echo-step", "0.02")
    typed, job_id = submit_long(both)
    os.kill(up.children()["worker"], signal.SIGKILL)
    assert typed.wait() == 0
    up.wait_for("the worker is started again: killed by SIGKILL")
    up.wait_for("the worker works again")
    assert outcomes(both, job_id).count("completed") == 1
    assert both.run("stream", job_id).out == LONG + "\n"


@pytest.mark.parametrize("role", ["projector", "relay", "gateway"])
def test_a_part_that_is_killed_is_started_again_and_works_on(embedded: Terminal, role: str) -> None:
    up = embedded.up()
    os.kill(up.children()[role], signal.SIGKILL)
    up.wait_for(f"the {role} works again")
    assert embedded.run("submit", "hello").out == "hello\n"


def test_jobs_end_within_the_grace_period_of_a_stop(both: Terminal) -> None:
    up = both.up("--echo-step", "0.02", "--grace", "60")
    typed, _ = submit_long(both)
    up.signal(signal.SIGTERM)
    assert up.wait() == 0
    assert typed.wait() == 0
    assert typed.out == LONG + "\n"


def test_a_stop_in_mid_job_loses_nothing(both: Terminal) -> None:
    first = both.up("--echo-step", "0.05", "--grace", "0.2")
    typed, job_id = submit_long(both)
    waiting = both.run("submit", "--detach", "behind it")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    both.up("--echo-step", "0.01")
    assert typed.wait() == 0
    assert both.run("stream", job_id).out == LONG + "\n"
    assert both.run("stream", waiting.out.strip()).out == "behind it\n"
    assert outcomes(both, job_id).count("completed") == 1


def test_a_worker_of_its_own_serves_and_stops(embedded: Terminal) -> None:
    projector = embedded.start("projector")
    worker = embedded.start("worker", "--engine", "echo")
    until(lambda: worker.children() and projector.children())
    assert embedded.run("submit", "hello").out == "hello\n"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "Traceback" not in worker.err
    assert left_over(embedded.folder) == [projector.process.pid, *projector.children().values()]


# --- logs --------------------------------------------------------------------------------------------------


def test_logs_are_appended_as_json_lines_without_prompts(embedded: Terminal) -> None:
    for _ in range(2):
        up = embedded.up()
        assert embedded.run("submit", "a secret prompt").out == "a secret prompt\n"
        up.signal(signal.SIGTERM)
        assert up.wait() == 0
    for role in ("worker", "projector", "gateway"):
        entries = log_of(embedded, role)
        assert [entry["event"] for entry in entries].count("ready") == 2
        assert "secret" not in json.dumps(entries)
        assert {"event", "level", "timestamp"} <= set(entries[0])


def test_settings_are_hidden_from_the_process_list(embedded: Terminal) -> None:
    up = embedded.up()
    for pid in up.children().values():
        assert str(embedded.folder) not in " ".join(psutil.Process(pid).cmdline())


# --- brokers that go away ----------------------------------------------------------------------------------


@pytest.mark.real
def test_a_running_stack_survives_brokers_that_go_away(tmp_path: Path, kafka_bootstrap: str) -> None:
    """Its own pair, since others must not lose theirs; `kafka_bootstrap` sees that one can run here."""
    with ExitStack() as stack:
        redis = RedisServer(tmp_path)
        stack.callback(redis.stop)
        redis.start()
        broker = Broker(tmp_path / "kafka", kafka_jars(cache_folder()))
        stack.callback(broker.kill)
        broker.start()
        one = stack.enter_context(terminal(tmp_path, "--kafka", broker.bootstrap, "--redis", redis.url))
        up = one.up("--echo-step", "0.01")
        children = up.children()

        redis.kill()
        away = one.run("submit", "hello")
        assert away.process.returncode == 1
        assert away.err.startswith("arriero: ")
        redis.start()
        until(lambda: one.run("submit", "after redis").out == "after redis\n")

        broker.kill()
        away = one.run("submit", "hello")
        assert away.process.returncode == 1
        assert away.err.startswith("arriero: ")
        broker.launch()  # `start` would make it a new cluster
        broker.wait()
        until(lambda: one.run("submit", "after kafka").out == "after kafka\n")

        assert up.process.poll() is None
        assert up.children() == children, up.err
