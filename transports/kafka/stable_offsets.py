"""OffsetFetch version 7, which aiokafka 0.14 does not have: a broker asked for stable offsets refuses to answer
while a transaction over them is open or its markers are still being written, where older versions answer what was
true before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka.errors import KafkaError
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

UNSTABLE_CODE: Final = 88


class UnstableOffset(KafkaError):  # type: ignore[misc]
    retriable = True


class _Response(Response):  # type: ignore[misc]
    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class _Request(RequestStruct):  # type: ignore[misc]
    API_KEY = 9
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Response
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class StableOffsetFetchRequest(Request[_Request]):  # type: ignore[misc]
    """Offsets of a group by topic and partition. With `stable`, those in doubt are answered by UNSTABLE_CODE."""

    API_KEY = 9

    def __init__(self, group: str, topics: Mapping[str, Sequence[int]], *, stable: bool) -> None:
        self._group = group
        self._topics: list[Any] = [(topic, list(partitions), {}) for topic, partitions in topics.items()]
        self._stable = stable

    def build(self, request_struct_class: type[_Request]) -> Any:
        return request_struct_class(self._group, self._topics, self._stable, {})
