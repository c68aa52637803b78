"""Topics made, and checked for what breaks a guarantee."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import aiokafka.errors as kafka_errors
import structlog
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from arriero.schemas.errors import LogUnavailable, TopicFault
from arriero.transports.kafka.connection import REQUEST_S, Connection, connect, translate
from arriero.transports.log import RECORD_MAX_BYTES, TopicSpec

log = structlog.get_logger(__name__)

_EXISTS: Final = 36
"""The protocol's error code for a topic that somebody else has made meanwhile."""


async def ensure(connection: Connection, specs: Sequence[TopicSpec], *, may_make: bool) -> None:
    """Makes the topics that are missing, with the brokers' default replication, where that is allowed; checks all.

    Raises TopicFault, with the command that mends it, and LogUnavailable.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=connection.bootstrap, client_id=connection.client_id)
    try:
        await connect(admin.start, connection.bootstrap)
        async with asyncio.timeout(REQUEST_S):
            counts = await _make(admin, specs, connection.bootstrap, may_make=may_make)
            settings = await _settings(admin, specs)
    except TimeoutError as error:
        raise LogUnavailable(f"Kafka at {connection.bootstrap} did not answer in {REQUEST_S:.0f} s") from error
    except kafka_errors.KafkaError as error:
        raise translate(error) from error
    finally:
        await admin.close()
    faults = [
        fault for spec in specs for fault in _faults(spec, counts[spec.name], settings[spec.name], connection.bootstrap)
    ]
    if faults:
        raise TopicFault("\n".join(faults))


def wanted_settings(spec: TopicSpec) -> dict[str, str]:
    settings = {
        "cleanup.policy": "delete",
        "retention.ms": str(int(spec.retention_s * 1000)),
        "retention.bytes": "-1",
        "max.message.bytes": str(RECORD_MAX_BYTES),
    }
    if spec.append_time:
        settings["message.timestamp.type"] = "LogAppendTime"
    return settings


async def _make(
    admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec], bootstrap: str, *, may_make: bool
) -> dict[str, int]:
    """Returns once every topic exists with a leader for each partition; their partition counts."""
    names = [spec.name for spec in specs]
    found = await _counts(admin, names)
    missing = {spec.name: spec for spec in specs if spec.name not in found}
    if missing and not may_make:
        commands = "\n".join(_command(spec, bootstrap) for spec in missing.values())
        raise TopicFault(f"topics are missing, and are not to be made by this; make them with\n{commands}")
    if missing:
        new = [
            # An empty assignment lets the brokers choose, with their default replication.
            NewTopic(spec.name, spec.partitions, -1, replica_assignments={}, topic_configs=wanted_settings(spec))
            for spec in missing.values()
        ]
        response = await admin.create_topics(new, timeout_ms=int(REQUEST_S * 1000))
        for name, code, *message in response.topic_errors:
            if code and code != _EXISTS:
                why = message[0] if message and message[0] else kafka_errors.for_code(code).__name__
                raise TopicFault(f"topic {name} could not be made: {why}\n{_command(missing[name], bootstrap)}")
            if not code:
                log.info("topic_made", topic=name)
    while len(found) < len(set(names)):
        await asyncio.sleep(0.05)
        found = await _counts(admin, names)
    return found


def _command(spec: TopicSpec, bootstrap: str) -> str:
    """What makes a topic by hand."""
    settings = " ".join(f"--config {key}={value}" for key, value in wanted_settings(spec).items())
    return (
        f"kafka-topics.sh --bootstrap-server {bootstrap} --create --topic {spec.name} --partitions {spec.partitions} "
        f"{settings}"
    )


async def _counts(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, int]:
    descriptions = await admin.describe_topics(list(names))
    return {
        description["topic"]: len(description["partitions"])
        for description in descriptions
        if not description["error_code"] and all(part["leader"] >= 0 for part in description["partitions"])
    }


async def _settings(admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ConfigResourceType.TOPIC, spec.name) for spec in specs]
    found: dict[str, dict[str, str]] = {}
    for response in await admin.describe_configs(resources):
        for resource in response.to_object()["resources"]:
            if resource["error_code"]:
                raise kafka_errors.for_code(resource["error_code"])()
            entries: list[dict[str, Any]] = resource["config_entries"]
            found[resource["resource_name"]] = {entry["config_names"]: entry["config_value"] for entry in entries}
    return found


def _faults(spec: TopicSpec, partitions: int, settings: dict[str, str], bootstrap: str) -> list[str]:
    """What breaks a guarantee, each with the command that mends it."""
    faults: list[str] = []
    if partitions != spec.partitions:
        mend = (
            f"kafka-topics.sh --bootstrap-server {bootstrap} --alter --topic {spec.name} --partitions {spec.partitions}"
            if partitions < spec.partitions
            else f"set the number of partitions to {partitions}"
        )
        faults.append(f"topic {spec.name} has {partitions} partitions instead of {spec.partitions}: {mend}")
    wanted = wanted_settings(spec)
    wrong = {key: settings.get(key, "") for key in wanted if not _suffices(key, settings.get(key, ""), wanted[key])}
    if wrong:
        mend = ",".join(f"{key}={wanted[key]}" for key in wrong)
        faults.append(
            f"topic {spec.name} has {', '.join(f'{key}={value}' for key, value in wrong.items())}: "
            f"kafka-configs.sh --bootstrap-server {bootstrap} --alter --entity-type topics --entity-name {spec.name} "
            f"--add-config {mend}"
        )
    return faults


def _suffices(key: str, value: str, wanted: str) -> bool:
    if key == "retention.ms":
        return value == "-1" or int(value) >= int(wanted)
    if key == "max.message.bytes":
        return int(value) >= int(wanted)
    return value == wanted
