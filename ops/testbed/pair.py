"""The real pair, Kafka and Redis: for one process, or shared by several that run tests side by side."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from arriero.ops.testbed.kafka import Broker, kafka_jars
from arriero.ops.testbed.redis import RedisServer
from arriero.schemas.errors import SetupError

_NEEDED: Final = {"java": "openjdk-17-jre-headless", "mvn": "maven", "redis-server": "redis-server"}
"""Program and the Debian package it is in."""

SHARED_START_S: Final = 600.0
"""The first start of all fetches Kafka; later ones take seconds."""


class Pair(NamedTuple):
    bootstrap: str
    redis_url: str


def missing() -> str | None:
    """One sentence that says what the real pair lacks on this machine and how to get it; None when all is there."""
    programs = [program for program in _NEEDED if shutil.which(program) is None]
    if not programs:
        return None
    packages = " ".join(_NEEDED[program] for program in programs)
    return f"{', '.join(programs)} not found: a real Kafka and Redis need it (Debian: apt-get install {packages})"


def cache_folder() -> Path:
    """Where fetched jars are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "arriero" / "testbed"


@contextmanager
def run_pair(cache: Path | None = None) -> Iterator[Pair]:
    """A real Kafka and a real Redis on free ports, gone with all they hold on leaving.

    Raises SetupError when programs are missing or a server doesn't start.
    """
    lacking = missing()
    if lacking is not None:
        raise SetupError(lacking, code="testbed_missing")
    jars = kafka_jars(cache if cache is not None else cache_folder())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arriero-testbed-")))
        redis = RedisServer(folder)
        stack.callback(redis.stop)
        redis.start()
        broker = Broker(folder / "kafka", jars)
        stack.callback(broker.kill)  # nothing of it is kept, so it need not end in order
        broker.start()
        yield Pair(broker.bootstrap, redis.url)


@contextmanager
def share_pair(folder: Path) -> Iterator[Pair]:
    """The pair of this folder, started by whoever comes first and stopped when the last user has left or died.

    Users hold a shared lock, which the kernel takes back from the dead. A keeper process holds the servers:
    1. a user takes the lock shared; 2. under a second lock it starts the keeper unless one runs; 3. the keeper
    waits for the lock exclusively, so until nobody uses the pair; 4. then it forgets the addresses and ends.
    """
    addresses = folder / "pair.json"
    keeper: subprocess.Popen[bytes] | None = None
    with (folder / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)  # 1
        with (folder / "starting").open("w") as starting, (folder / "keeper.log").open("ab") as output:
            fcntl.flock(starting, fcntl.LOCK_EX)  # 2
            if not addresses.exists():
                command = [sys.executable, "-m", "arriero.ops.testbed", "--keep", str(folder)]
                keeper = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
                _wait_for(addresses, keeper, folder / "keeper.log")
        yield Pair(*json.loads(addresses.read_text()))
    if keeper is not None:
        keeper.wait()  # for the others' last user: whoever started it leaves no process behind


def keep_pair(folder: Path) -> None:
    """The keeper's part of `share_pair`."""
    addresses = folder / "pair.json"
    with run_pair() as pair, (folder / "users").open("w") as users:
        draft = addresses.with_suffix(".draft")
        draft.write_text(json.dumps(pair))
        draft.rename(addresses)
        try:
            fcntl.flock(users, fcntl.LOCK_EX)  # 3
        finally:
            addresses.unlink()  # 4


def _wait_for(addresses: Path, keeper: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + SHARED_START_S
    while not addresses.exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.kill()
            keeper.wait()
            raise SetupError(f"no real pair: {output.read_text()[-1_500:]}", code="testbed_failed")
        time.sleep(0.05)
