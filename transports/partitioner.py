"""Which partition a key belongs to: murmur2, as in Kafka's own clients, so that every client of any language
agrees. (librdkafka: `partitioner=murmur2_random`.) Pure.

The hash is Austin Appleby's MurmurHash2 with the seed that Kafka's Java client has fixed.
"""

from __future__ import annotations

import struct
from typing import Final

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_WORD: Final = 0xFFFFFFFF


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of this many, for records of this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """The 32-bit hash, unsigned."""
    length = len(data)
    whole = length & ~3
    mixed = _SEED ^ length
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        word = (word * _MULTIPLIER) & _WORD
        word = ((word ^ (word >> 24)) * _MULTIPLIER) & _WORD
        mixed = ((mixed * _MULTIPLIER) & _WORD) ^ word
    if whole < length:
        mixed = ((mixed ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER) & _WORD
    mixed = ((mixed ^ (mixed >> 13)) * _MULTIPLIER) & _WORD
    return mixed ^ (mixed >> 15)
