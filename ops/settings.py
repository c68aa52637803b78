"""What an operator may set, and where it comes from: a flag, else a variable ARRIERO_*, else the default.

The command line (`ops/cli/options.py`) reads flags and variables and makes `Settings` of them; a supervised child gets
them as JSON. Nothing else reads the environment.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Final, Literal

import msgspec

from arriero.schemas.errors import SetupError
from arriero.schemas.names import MAX_ATTEMPTS, NAMESPACE_DEFAULT, POOL_DEFAULT, Names, check_word
from arriero.transports.connect import Endpoints
from arriero.transports.log import TopicSpec

PARTITIONS_DEFAULT: Final = 8
"""Partitions of each topic that is made: the most workers that a pool can grow to. It cannot be changed later."""
GRACE_S: Final = 20.0
"""How long a stopping worker may finish what it runs. Short enough for the usual 30 s before a forced kill."""
WATCHDOG_S: Final = 120.0
"""A step that takes longer will never end: the longest is a second or two by its plan."""
WAIT_S: Final = 60.0
"""A cluster that starts together with its clients is there by then; a wrong address is told of soon enough."""
DELAY_PARTITIONS: Final = 1
"""Of each delay topic: a relay moves thousands of records a second, and one partition keeps them in order."""
DEAD_RETENTION_S: Final = 60 * 86_400.0


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's engine; None leaves the choice to the loader."""

    engine: Literal["llama", "echo"] = "llama"
    model: str = "smollm2-135m-instruct"
    """A name of the catalogue or the path of a GGUF file."""
    model_name: str | None = None
    """What jobs call it."""
    slots: int | None = None
    ctx: int | None = None
    batch: int | None = None
    threads: int | None = None
    chunk: int = 256
    draft_tokens: int = 16
    prefix_cache: bool = True
    gpu_layers: int | None = None
    main_gpu: int = 0
    split_mode: Literal["none", "layer", "row"] = "layer"
    tensor_split: tuple[float, ...] = ()
    flash_attn: Literal["auto", "on", "off"] = "auto"
    kv_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    echo_step_s: float = 0.0
    """Length of a step of the echo engine."""
    echo_fail_every: int = 0
    """Every so-manieth token of the echo engine fails, for tests of retries; 0: none."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    data: Path
    """Logs, and the embedded pair's files where no brokers are given."""
    cache: Path
    kafka: str | None = None
    redis: str | None = None
    namespace: str = NAMESPACE_DEFAULT
    pool: str = POOL_DEFAULT
    partitions: int | None = None
    """Of topics that are made; None takes the count of those that are there, else PARTITIONS_DEFAULT."""
    create_topics: bool = True
    wait_s: float = WAIT_S
    """How long brokers may take to come when a server starts."""
    worker: str = ""
    """The worker's name; the host's when empty."""
    engine: EngineSettings = EngineSettings()
    grace_s: float = GRACE_S
    watchdog_s: float = WATCHDOG_S
    flight: Path | None = None
    """The flight recorder of this child, and what its forerunners have crashed with: set by its supervisor."""
    crashes: str = "[]"
    max_attempts: int = MAX_ATTEMPTS
    host: str = "127.0.0.1"
    port: int = 8080
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    debug: bool = False
    log_json: bool | None = None
    """None: JSON unless a person watches."""

    @property
    def names(self) -> Names:
        return Names(self.namespace)

    @property
    def endpoints(self) -> Endpoints:
        if self.kafka is None and self.redis is None:
            return Endpoints(data=self.data)
        return Endpoints(kafka=self.kafka, redis=self.redis, create_topics=self.create_topics)

    @property
    def address(self) -> str:
        """The flags with which another terminal reaches the same stack and pool, for a shell."""
        flags: list[str] = []
        if self.kafka is not None and self.redis is not None:
            flags += ["--kafka", self.kafka, "--redis", self.redis]
        elif self.data != data_folder():
            flags += ["--data", str(self.data)]
        if self.namespace != NAMESPACE_DEFAULT:
            flags += ["--namespace", self.namespace]
        if self.pool != POOL_DEFAULT:
            flags += ["--pool", self.pool]
        return shlex.join(flags)

    def topics(self, partitions: int, event_partitions: int) -> list[TopicSpec]:
        """All that the fleet needs, in the order of a job's way."""
        names = self.names
        specs = [TopicSpec(topic, partitions) for topic in names.job_topics(self.pool)]
        specs += [TopicSpec(topic, DELAY_PARTITIONS, append_time=True) for topic in names.delay_topics(self.pool)]
        specs.append(TopicSpec(names.events, event_partitions))
        specs.append(TopicSpec(names.dead, 1, retention_s=DEAD_RETENTION_S))
        return specs

    def check(self) -> None:
        """Raises SetupError for what no part below would refuse as clearly."""
        check_word("pool", self.pool)
        check_word("namespace", self.namespace)
        _ = self.endpoints
        if self.partitions is not None and not 1 <= self.partitions <= 1_000:
            raise SetupError("--partitions must be between 1 and 1000", code="bad_setting")
        if self.kafka is None:
            try:
                wrong = self.data.exists() and not self.data.is_dir()
            except OSError:  # a component of it cannot be looked into
                wrong = True
            if wrong:
                raise SetupError(f"the data folder {self.data} is no folder; give another with --data")


def data_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "arriero"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "arriero" / "models"


def writable(folder: Path) -> Path:
    """The folder, made if need be. Raises SetupError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SetupError(
            f"the data folder {folder} cannot be written: {error.strerror}; give another with --data",
            code="data_folder_unwritable",
        ) from error
    return folder


def to_json(settings: Settings) -> str:
    return msgspec.json.encode(settings, enc_hook=str).decode()


def from_json(text: str) -> Settings:
    def path(kind: type, value: object) -> object:
        return Path(str(value)) if kind is Path else value

    return msgspec.json.decode(text, type=Settings, dec_hook=path)
