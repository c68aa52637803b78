"""The one crossing between bytes and structs. Encoders and decoders are made once and reused."""

from __future__ import annotations

import msgspec

from arriero.schemas.event import DeadRecord, Event
from arriero.schemas.state import JobState
from arriero.schemas.token import Message, StreamEnd
from arriero.schemas.worker import WorkerInfo

_encoder = msgspec.json.Encoder()
_event: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_state = msgspec.json.Decoder(JobState)
_message: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_end = msgspec.json.Decoder(StreamEnd)
_worker = msgspec.json.Decoder(WorkerInfo)
_dead = msgspec.json.Decoder(DeadRecord)

Encodable = Event | JobState | Message | StreamEnd | WorkerInfo | DeadRecord


def encode(value: Encodable) -> bytes:
    """JSON, defaults left out."""
    return _encoder.encode(value)


# Decoders raise msgspec.MsgspecError for bytes that no release of Arriero has written.


def decode_event(value: bytes) -> Event:
    return _event.decode(value)


def decode_state(value: bytes) -> JobState:
    return _state.decode(value)


def decode_message(value: bytes) -> Message:
    return _message.decode(value)


def decode_end(value: bytes | str) -> StreamEnd:
    return _end.decode(value)


def decode_worker(value: bytes) -> WorkerInfo:
    return _worker.decode(value)


def decode_dead(value: bytes) -> DeadRecord:
    return _dead.decode(value)
