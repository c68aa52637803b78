"""A real Redis that keeps nothing on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from arriero.ops.testbed.process import ServerProcess, exchange, free_ports

START_S: Final = 30.0


class RedisServer:
    """One redis-server on the loopback. It keeps its port across `kill` and `launch`, and loses its keys."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        command = f"redis-server --bind 127.0.0.1 --port {self.port} --save  --appendonly no"
        self._process = ServerProcess(
            [*command.split(" "), "--maxmemory-policy", "noeviction", "--dir", str(folder)], folder / "redis.log"
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Launches it and returns once it answers."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        self._process.launch()

    def wait(self, timeout_s: float = START_S) -> None:
        self._process.wait_until(lambda: exchange(self.port, b"PING\r\n") == b"+PONG\r\n", timeout_s)

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()
