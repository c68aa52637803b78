"""From an address to an adapter."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from arriero.schemas.clock import Clock
from arriero.schemas.errors import SetupError
from arriero.schemas.names import Names
from arriero.transports.bus import TokenBus
from arriero.transports.log import JobLog


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where log and bus are: brokers (`host:port,...`) and a Redis URL, or one data folder for the embedded pair."""

    kafka: str | None = None
    redis: str | None = None
    data: Path | None = None
    create_topics: bool = True
    """Whether topics that Kafka lacks may be made; otherwise an error names them. Embedded ones always are."""

    def __post_init__(self) -> None:
        if (self.kafka is None) != (self.redis is None):
            raise SetupError("--kafka and --redis go together", code="bad_setting")
        if (self.kafka is None) == (self.data is None):
            raise SetupError("give either --kafka and --redis, or a data folder", code="bad_setting")
        for broker in self.kafka.split(",") if self.kafka is not None else ():
            host, _, port = broker.strip().rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
                raise SetupError(f"--kafka {self.kafka}: host:port,host:port,... is wanted", code="bad_setting")
        if self.redis is not None and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise SetupError(f"--redis {self.redis}: redis://host:port/0 is wanted", code="bad_setting")

    @property
    def embedded(self) -> bool:
        return self.data is not None


def make_log(endpoints: Endpoints, *, names: Names, clock: Clock, rng: random.Random, client: str) -> JobLog:
    """The job log at these endpoints, not yet entered. `client` names this process in the broker's logs."""
    if endpoints.data is not None:
        from arriero.transports.embedded.log import EmbeddedLog

        return EmbeddedLog(endpoints.data, names=names, clock=clock, rng=rng)
    from arriero.transports.kafka.log import KafkaLog

    assert endpoints.kafka is not None
    return KafkaLog(
        endpoints.kafka, names=names, clock=clock, rng=rng, client=client, create_topics=endpoints.create_topics
    )


def make_bus(endpoints: Endpoints, *, names: Names, clock: Clock) -> TokenBus:
    """The token bus at these endpoints, not yet entered."""
    if endpoints.data is not None:
        from arriero.transports.embedded.bus import EmbeddedBus

        return EmbeddedBus(endpoints.data, names=names, clock=clock)
    from arriero.transports.redis.bus import RedisBus

    assert endpoints.redis is not None
    return RedisBus(endpoints.redis, names=names, clock=clock)
