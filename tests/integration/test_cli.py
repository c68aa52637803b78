"""The terminal's commands against a running stack, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest
from terminal import COMMAND, Terminal, Typed, environment, terminal, until

from arriero.ops.cli import COMMANDS

LONG = "all work and no play " * 40
SLOW = ("--echo-step", "0.02")


@pytest.fixture(scope="module", params=["embedded", pytest.param("real", marks=pytest.mark.real)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A terminal beside a running stack."""
    flags: list[str] = []
    if request.param == "real":
        pair = request.getfixturevalue("real_pair")
        space = f"t{SystemRandom().getrandbits(48):x}"
        flags = ["--kafka", pair.bootstrap, "--redis", pair.redis_url, "--namespace", space]
    with terminal(tmp_path_factory.mktemp("cli"), *flags) as one:
        one.up(*SLOW)
        yield one


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal on a folder without a stack."""
    with terminal(tmp_path) as one:
        yield one


def job_id(typed: Typed) -> str:
    """The id that `submit` has printed."""
    typed.wait_for("job ")
    found = re.search(r"job (\S+) ", typed.err)
    assert found is not None
    return found[1]


def detach(stack: Terminal, *arguments: str) -> str:
    typed = stack.run("submit", "--detach", *arguments)
    assert typed.process.returncode == 0, typed.err
    return typed.out.strip()


# --- submit ------------------------------------------------------------------------------------------------


def test_submit_streams_the_answer(stack: Terminal) -> None:
    typed = stack.run("submit", "hello there, my friend")
    assert (typed.process.returncode, typed.out) == (0, "hello there, my friend\n")
    assert re.fullmatch(r"job \S+ \(interactive\)\n", typed.err)


def test_submit_shows_tokens_before_the_end(stack: Terminal) -> None:
    typed = stack.start("submit", LONG)
    until(lambda: typed.out)
    assert typed.process.poll() is None
    assert typed.wait() == 0
    assert typed.out == LONG + "\n"


def test_submit_detached_prints_only_the_id(stack: Terminal) -> None:
    one = detach(stack, "hello")
    assert re.fullmatch(r"[0-9a-z]{25}", one)
    assert stack.run("stream", one).out == "hello\n"


def test_submit_reads_standard_input(stack: Terminal) -> None:
    typed = stack.run("submit", "-", stdin="from a pipe: ñ 🦙".encode())
    assert (typed.process.returncode, typed.out) == (0, "from a pipe: ñ 🦙\n")


def test_submit_refuses_standard_input_that_is_not_utf8(stack: Terminal) -> None:
    typed = stack.run("submit", "-", stdin=b"a\xff")
    assert (typed.process.returncode, typed.out) == (1, "")
    assert typed.err == "arriero: standard input is not UTF-8 (byte 1)\n"


def test_submit_refuses_an_argument_that_is_not_utf8(stack: Terminal) -> None:
    typed = stack.run("submit", os.fsdecode(b"a\xff"))
    assert typed.process.returncode == 1
    assert typed.err == "arriero: the job holds text that is not Unicode (a lone surrogate)\n"


def test_submit_as_json_gives_one_object_a_line(stack: Terminal) -> None:
    typed = stack.run("submit", "--json", "hello")
    lines = [json.loads(line) for line in typed.out.splitlines()]
    assert list(lines[-1]) == ["ended"]
    pieces = [token[1] for line in lines if "tokens" in line for token in line["tokens"]["tokens"]]
    assert "".join(pieces) + lines[-1]["ended"]["end"].get("tail", "") == "hello"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "nan", "x"], "`sampling.temperature`"),
        (["--top-p", "7", "x"], "`sampling.top_p`"),
        (["--max-tokens", "-1", "x"], "`max_tokens`"),
        (["--id", "a/b", "x"], "`id`"),
        (["--id", "a" * 10_000, "x"], "`id`"),
        ([""], "prompt"),
    ],
)
def test_submit_refuses_what_no_worker_would_take(alone: Terminal, arguments: list[str], says: str) -> None:
    typed = alone.run("submit", *arguments)
    assert typed.process.returncode == 1
    assert says in typed.err
    assert typed.err.count("\n") == 1


def test_submit_refuses_a_job_over_one_mebibyte(alone: Terminal) -> None:
    typed = alone.run("submit", "-", stdin=b"a" * (1 << 20))
    assert typed.process.returncode == 1
    assert "1,048,576 are accepted" in typed.err


def test_a_job_for_an_unknown_model_is_rejected_with_a_sentence(stack: Terminal) -> None:
    typed = stack.run("submit", "--model", "nope", "hello")
    assert typed.process.returncode == 1
    assert "rejected: unknown_model" in typed.err


def test_submit_without_a_worker_says_so_within_two_seconds_and_how_to_start_one(alone: Terminal) -> None:
    began = time.monotonic()
    typed = alone.start("submit", "hello")
    typed.wait_for("no worker of the pool default is alive; the job stays queued")
    took_s = time.monotonic() - began
    assert f"start one with: arriero up --data {alone.folder / 'data'}" in typed.err
    alone.up()
    assert typed.wait() == 0
    assert typed.out == "hello\n"
    assert took_s < 6.0  # two on a machine that is not busy with other tests


def test_detached_without_a_worker_says_so_and_keeps_the_job(alone: Terminal) -> None:
    typed = alone.run("submit", "--detach", "hello")
    assert typed.process.returncode == 0
    assert "no worker" in typed.err
    alone.up()
    assert alone.run("stream", typed.out.strip()).out == "hello\n"


# --- stream ------------------------------------------------------------------------------------------------


def test_stream_begins_at_an_index(stack: Terminal) -> None:
    one = detach(stack, "hello there, my friend")
    whole = stack.run("stream", one).out
    later = stack.run("stream", "--from", "2", one).out
    assert whole == "hello there, my friend\n"
    assert whole.endswith(later)
    assert 0 < len(later) < len(whole)


def test_ctrl_c_detaches_and_tells_how_to_come_back(stack: Terminal) -> None:
    typed = stack.start("submit", LONG)
    one = job_id(typed)
    until(lambda: len(typed.out) > 10)
    typed.signal(signal.SIGINT)
    assert typed.wait() == 130
    back = next(line for line in typed.err.splitlines() if "to see the rest" in line)
    end = next(line for line in typed.err.splitlines() if "to end it" in line)
    arguments = shlex.split(back.replace("to see the rest", ""))
    rest = Typed(stack.folder / "rest", *arguments[1:])
    assert rest.wait() == 0
    assert typed.out.rstrip("\n") + rest.out.rstrip("\n") == LONG.rstrip("\n")
    assert shlex.split(end)[:2] == ["arriero", "cancel"]
    assert one in end


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(stack: Terminal) -> None:
    one = detach(stack, LONG)
    with subprocess.Popen(
        [*COMMAND, "stream", *stack.flags, one], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_stream_of_an_unknown_job_waits_and_says_so(stack: Terminal) -> None:
    typed = stack.start("stream", "nobody")
    typed.wait_for("nothing is known of job nobody yet; waiting for it")
    typed.signal(signal.SIGINT)
    assert typed.wait() == 130


def test_a_position_that_is_none_is_refused(alone: Terminal) -> None:
    typed = alone.run("stream", "--from", "x", "job")
    assert typed.process.returncode == 2
    assert typed.err.startswith("arriero: --from 'x' is neither")


# --- status, history, cancel -------------------------------------------------------------------------------


def test_status_tells_what_became_of_a_job(stack: Terminal) -> None:
    one = detach(stack, "hello")
    stack.run("stream", one)
    plain = stack.run("status", one).out
    assert "completed" in plain
    state = json.loads(stack.run("status", "--json", one).out)
    assert (state["id"], state["status"], state["model"]) == (one, "completed", "echo")


def test_history_lists_the_events(stack: Terminal) -> None:
    one = detach(stack, "hello")
    stack.run("stream", one)
    plain = stack.run("history", one).out
    assert "Completed" in plain
    events = [json.loads(line) for line in stack.run("history", "--json", one).out.splitlines()]
    assert {event["id"] for event in events} == {one}
    assert sum("settl" in str(event) or event["type"].lower() == "completed" for event in events) == 1


def test_cancel_ends_a_running_job(stack: Terminal) -> None:
    typed = stack.start("submit", LONG)
    one = job_id(typed)
    until(lambda: len(typed.out) > 10)
    asked = stack.run("cancel", "--reason", "enough", one)
    assert (asked.process.returncode, asked.out) == (0, f"asked for the end of job {one}\n")
    assert typed.wait() == 3
    assert f"job {one} cancelled" in typed.err
    assert len(typed.out) < len(LONG)


def test_cancel_of_an_ended_job_changes_nothing(stack: Terminal) -> None:
    one = detach(stack, "hello")
    stack.run("stream", one)
    assert stack.run("cancel", one).out == f"job {one} has ended already: completed\n"


@pytest.mark.parametrize("command", ["status", "history", "cancel"])
def test_a_job_that_nobody_knows_is_a_sentence_and_status_1(stack: Terminal, command: str) -> None:
    typed = stack.run(command, "nobody")
    assert typed.process.returncode == 1
    assert typed.err == "arriero: job nobody is unknown here: never submitted, expired, or under another namespace\n"


def test_replay_keeps_what_is_known(stack: Terminal) -> None:
    one = detach(stack, "hello")
    stack.run("stream", one)
    assert stack.run("replay").process.returncode == 0
    assert json.loads(stack.run("status", "--json", one).out)["status"] == "completed"


# --- what is wrong with the command ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["submit", "--kafka", "x", "hi"], "--kafka and --redis go together"),
        (["submit", "--nope", "hi"], "No such option"),
        (["submit"], "Missing argument"),
        (["submit", "--class", "urgent", "hi"], "urgent"),
        (["submit", "--pool", "A/B", "hi"], "pool"),
        (["nope"], "No such command"),
        (["up", "--slots", "0"], "--slots"),
        (["up", "--tensor-split", "a,b"], "--tensor-split"),
        (["up", "--partitions", "0"], "--partitions"),
        (["models", "fetch", "nope"], "nope"),
        (["models", "inspect", "nope"], "nope"),
        (["submit", "--data", "/proc/nowhere/x", "hi"], "/proc/nowhere/x"),
        (["status", "--data", "/etc/passwd", "x"], "/etc/passwd is no folder"),
        (["up", "--engine", "echo", "--data", "/etc/passwd/x"], "/etc/passwd/x cannot be written"),
    ],
)
def test_what_must_change_is_said_with_status_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    typed = Typed(tmp_path, *arguments, env=environment(HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path / "data")))
    assert typed.wait() == 2
    assert says in typed.err
    assert "Traceback" not in typed.err


def test_variables_do_what_flags_do(stack: Terminal, tmp_path: Path) -> None:
    names = [flag.removeprefix("--").upper() for flag in stack.flags[::2]]
    variables = {f"ARRIERO_{name}": value for name, value in zip(names, stack.flags[1::2], strict=True)}
    typed = Typed(tmp_path, "submit", "hello", env=environment(**variables))
    assert typed.wait() == 0
    assert typed.out == "hello\n"


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in COMMANDS), *(["models", name] for name in ("list", "fetch", "inspect")),
     ["bench", "engine"], ["bench", "fleet"]],
    ids=" ".join,
)  # fmt: skip
def test_every_command_explains_itself_and_loads_no_engine(command: list[str], tmp_path: Path) -> None:
    code = (
        "import atexit, sys\n"
        "heavy = ('llama_cpp', 'numpy', 'aiohttp', 'aiokafka')\n"
        "atexit.register(lambda: print('loaded:', [name for name in heavy if name in sys.modules]))\n"
        "from arriero.ops.cli import main\n"
        "main()\n"
    )
    typed = Typed(tmp_path, *command, "--help", command=[sys.executable, "-c", code])
    assert typed.wait() == 0
    assert "Usage: " in typed.out
    assert typed.out.endswith("loaded: []\n")


# --- an installation for clients ---------------------------------------------------------------------------

CLIENT_ONLY = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("llama_cpp", "numpy", "aiohttp", "jinja2", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
import arriero.producer.client
from arriero.ops.cli import main
main()
"""


def client_only(folder: Path, *arguments: str) -> Typed:
    typed = Typed(folder, *arguments, command=[sys.executable, "-c", CLIENT_ONLY])
    typed.wait()
    return typed


def test_a_client_installation_submits(stack: Terminal, tmp_path: Path) -> None:
    typed = client_only(tmp_path, "submit", *stack.flags, "hello")
    assert (typed.process.returncode, typed.out) == (0, "hello\n"), typed.err


@pytest.mark.parametrize("command", ["up", "worker", "projector", "gateway"])
def test_a_client_installation_says_which_extra_a_server_needs(command: str, tmp_path: Path) -> None:
    typed = client_only(tmp_path, command, "--data", str(tmp_path / "data"))
    assert typed.process.returncode == 2
    extra = "gateway" if command == "gateway" else "worker"
    assert re.fullmatch(rf"arriero: this needs the package \w+: pip install 'arriero\[{extra}\]'\n", typed.err)
