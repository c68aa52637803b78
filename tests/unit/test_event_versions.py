"""Events of other releases, and what is no event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from arriero.schemas import codec
from arriero.schemas.codec import Remains, decode_event, encode, remains_of
from arriero.schemas.errors import Unreadable
from arriero.schemas.event import EVENT_TYPES, EVENT_VERSION, Cancelled, CancelRequested, Origin

ORIGIN = Origin("ns.jobs.default.standard", 0, 7, 1_000)
EVENT = Cancelled(id="a", time_ms=1, attempt=1, root=str(ORIGIN), origin=ORIGIN, worker="w", fence=9)


def raw(**changes: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(encode(EVENT)), **changes})


def test_an_event_of_this_version_is_read_whether_or_not_it_says_so() -> None:
    assert decode_event(encode(EVENT)) == decode_event(raw(v=EVENT_VERSION)) == EVENT


@pytest.mark.parametrize("value", [raw(v=EVENT_VERSION + 1), raw(v=99, type="Paused"), b'{"v":2}'])
def test_an_event_of_a_later_version_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(Unreadable, match="version") as refused:
        decode_event(value)
    assert refused.value.code == "unknown_version"


@pytest.mark.parametrize(
    "value",
    [None, b"", b"{", b"\xff", b"[]", b"[" * 5_000, b"{}", raw(type="Paused"), raw(origin=3), raw(v=True), raw(v=-1)],
)
def test_what_no_release_has_written_is_unreadable(value: bytes | None) -> None:
    with pytest.raises(Unreadable) as refused:
        decode_event(value)
    assert refused.value.code == "unreadable"


def test_an_older_event_is_handed_from_version_to_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_0(event: dict[str, Any]) -> dict[str, Any]:
        job = event.pop("job")
        return {**event, "id": job["id"]}

    monkeypatch.setitem(codec.UPCASTERS, 0, from_0)
    old = b'{"v":0,"type":"CancelRequested","job":{"id":"a"},"time_ms":1,"reason":"why"}'
    assert decode_event(old) == CancelRequested(id="a", time_ms=1, reason="why")
    with pytest.raises(Unreadable, match="KeyError"):
        decode_event(b'{"v":0,"type":"CancelRequested","time_ms":1}')


def test_a_version_that_nobody_can_upcast_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="no event of version 0"):
        decode_event(raw(v=0))


def test_no_version_is_left_out_between_the_first_and_this_one() -> None:
    assert sorted(codec.UPCASTERS) == list(range(1, EVENT_VERSION))


def test_what_cannot_be_read_still_says_what_it_settles() -> None:
    assert remains_of(raw(v=2, attempt="x")) == Remains(settles=True, origin=ORIGIN, fence=9)
    assert remains_of(raw(type="Started", origin=None, fence="x")) == Remains(settles=False, origin=None, fence=0)
    assert remains_of(raw(type="Paused")) == Remains(settles=None, origin=ORIGIN, fence=9)
    assert remains_of(b"no event") is None


def test_every_kind_of_event_is_known_by_its_name() -> None:
    for name, kind in EVENT_TYPES.items():
        assert kind.__struct_config__.tag == name
