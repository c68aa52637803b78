"""A real Apache Kafka on a bare machine: one KRaft node, run by the machine's own Java."""

from __future__ import annotations

import fcntl
import shutil
import struct
import subprocess
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

from arriero.ops.testbed.process import ServerProcess, exchange, free_ports
from arriero.schemas.errors import SetupError

KAFKA_VERSION: Final = "4.4.0"
"""As in pom.xml; it names the cache folder, so that a new version is fetched anew."""
START_S: Final = 90.0
"""A broker takes 6 s on an idle machine; several times that on a crowded one."""
FETCH_S: Final = 600.0
HEAP: Final = "640m"
"""Enough for the suites; the process takes 350 to 530 MB."""

# A killed broker may register again only when its former session has run out: 9 s by default.
_SETTINGS: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}{proxied}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}{advertised}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={data}
num.partitions=1
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
"""

_API_VERSIONS: Final = struct.pack(">ihhih", 10, 18, 0, 1, -1)
"""The smallest request of the protocol: key 18, version 0, correlation id 1, no client id."""


def kafka_jars(cache: Path) -> Path:
    """The folder with the broker's jars, fetched from Maven Central the first time (45 jars, 43 MB).

    Raises SetupError when they cannot be fetched.
    """
    folder = cache / f"kafka-{KAFKA_VERSION}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once fetch once
        if folder.exists():
            return folder
        partial = cache / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pom = Path(__file__).with_name("pom.xml")
        command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={partial}"]
        try:
            subprocess.run(command, check=True, timeout=FETCH_S, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            why = (error.stdout + error.stderr)[-1_000:]
            raise SetupError(f"Maven could not fetch Kafka's jars: {why}", code="testbed_failed") from error
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"Maven took over {FETCH_S:.0f} s for Kafka's jars", code="testbed_failed") from error
        partial.rename(folder)
    return folder


class Broker:
    """One node over one folder. It keeps its port and its records across `kill` and `launch`."""

    def __init__(self, folder: Path, jars: Path, *, proxied: bool = False) -> None:
        """proxied: listen on `proxied_port` too, and send its clients on to `proxy_port`, where a proxy should be."""
        self._folder = folder
        self._settings = folder / "server.properties"
        self.port, controller_port, self.proxied_port, self.proxy_port = free_ports(4)
        self._data = folder / "data"
        self._text = _SETTINGS.format(
            port=self.port,
            controller_port=controller_port,
            data=self._data,
            proxied=f",PROXIED://127.0.0.1:{self.proxied_port}" if proxied else "",
            advertised=f",PROXIED://127.0.0.1:{self.proxy_port}" if proxied else "",
        )
        java = ["java", f"-Xmx{HEAP}", "-XX:+UseSerialGC", "-Dlog4j2.level=INFO", "-cp", f"{jars}/*"]
        self._format = [*java, "kafka.tools.StorageTool", "format", "-c", str(self._settings)]
        self._process = ServerProcess([*java, "kafka.Kafka", str(self._settings)], folder / "broker.log")

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Formats the folder, launches the broker and returns once it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._settings.write_text(self._text)
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # With "=": a random id may begin with a dash.
        done = subprocess.run([*self._format, f"--cluster-id={cluster_id}"], check=False, capture_output=True)
        if done.returncode:
            why = done.stderr.decode(errors="replace")[-1_000:]
            raise SetupError(f"Kafka could not format {self._data}: {why}", code="testbed_failed")
        self.launch()
        self.wait()

    def launch(self) -> None:
        self._process.launch()

    def wait(self, timeout_s: float = START_S) -> None:
        """Returns once the broker answers requests."""
        self._process.wait_until(lambda: len(exchange(self.port, _API_VERSIONS)) > 0, timeout_s)

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()
