"""Our partitioner against the Kafka client's, and values that every client agrees on."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.partitioner import murmur2 as reference
from hypothesis import given
from hypothesis import strategies as st

from arriero.transports.partitioner import murmur2, partition_of


@given(st.binary(max_size=60))
def test_the_hash_is_the_clients(data: bytes) -> None:
    assert murmur2(data) == reference(data) & 0xFFFFFFFF


@given(st.binary(max_size=60), st.integers(1, 400))
def test_the_partition_is_the_clients(key: bytes, partitions: int) -> None:
    numbers = list(range(partitions))
    assert partition_of(key, partitions) == DefaultPartitioner()(key, numbers, numbers)


@pytest.mark.parametrize(("data", "expected"), [(b"21", -973932308), (b"foobar", -790332482), (b"abc", 479470107)])
def test_the_hash_is_the_one_that_kafka_tests_for(data: bytes, expected: int) -> None:
    assert murmur2(data) == expected & 0xFFFFFFFF
