"""The one crossing between bytes and structs. Encoders and decoders are made once and reused.

Events lie in the log for weeks and are read by other releases than the one that wrote them. `decode_event` reads the
version that this release writes as it is, an older one through the upcasters of `UPCASTERS`, and refuses a later one:
what it means is not known here, and to pass it over could record a second result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from arriero.schemas.errors import Unreadable
from arriero.schemas.event import EVENT_TYPES, EVENT_VERSION, DeadRecord, Event, Origin, SettlingEvent
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


_NOT_THIS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Upcast = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Final[dict[int, Upcast]] = {}
"""By version, what makes an event of the next version of one of this. Between the first and EVENT_VERSION there is no
gap: an event is handed from one to the next."""


def decode_event(value: bytes | None) -> Event:
    """The event in a record's value.

    Raises Unreadable: with code unknown_version when a later release has written it, else unreadable.
    """
    try:
        event = _event.decode(value or b"")
        if event.v == EVENT_VERSION:
            return event
    except _NOT_THIS:
        pass  # of another version, or nothing of ours: found out below, off the fast path
    return _decode_other(value or b"")


def _decode_other(value: bytes) -> Event:
    raw = _json_object(value)
    version = raw.get("v", 1)
    if type(version) is not int or version < 0:
        raise Unreadable(f"an event of version {str(version)[:40]!r}, which is no version")
    if version > EVENT_VERSION:
        raise Unreadable(
            f"an event of version {version}; this release reads versions up to {EVENT_VERSION}: upgrade it",
            code="unknown_version",
        )
    try:
        for number in range(version, EVENT_VERSION):
            raw = {**UPCASTERS[number](raw), "v": number + 1}
        event: Event = msgspec.convert(raw, Event)
    except (LookupError, TypeError, ValueError) as error:  # an upcaster may stumble over what is not there, too
        raise Unreadable(f"no event of version {version}: {type(error).__name__}: {error}") from error
    return event


class Remains(msgspec.Struct, frozen=True):
    """What an event that cannot be read still says. `settles` is None where its type is not known here."""

    settles: bool | None
    origin: Origin | None
    fence: int


def remains_of(value: bytes | None) -> Remains | None:
    """What is left of an event that `decode_event` refuses; None for what cannot be one."""
    try:
        raw = _json_object(value or b"")
    except Unreadable:
        return None
    kind = EVENT_TYPES.get(str(raw.get("type")))
    try:
        origin = msgspec.convert(raw.get("origin"), Origin)
    except msgspec.ValidationError:
        origin = None
    fence = raw.get("fence")
    return Remains(
        settles=None if kind is None else issubclass(kind, SettlingEvent),
        origin=origin,
        fence=fence if type(fence) is int else 0,
    )


def _json_object(value: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(value)
    except _NOT_THIS as error:
        raise Unreadable(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise Unreadable("no JSON object")
    return raw


# The other decoders raise msgspec.MsgspecError for bytes that no release of Arriero has written.


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
