"""The real pair for tests: it says what it lacks, and leaves nothing behind."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arriero.ops import testbed

PARENT = """
import sys, threading
from pathlib import Path
from arriero.ops.testbed import RedisServer
server = RedisServer(Path(sys.argv[1]))
server.start()
print(server.port, flush=True)
threading.Event().wait()
"""


def test_what_is_missing_is_one_sentence_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lacking = testbed.missing()
    assert lacking is not None
    assert "java, mvn, redis-server not found" in lacking
    assert "apt-get install" in lacking
    assert "\n" not in lacking


@pytest.mark.real
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server not found")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv not found: servers may outlive a killed parent")
def test_a_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    pytest.fail("the server still answers")
