"""What becomes of records that are no acceptable jobs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.codec import decode_dead, encode
from arriero.schemas.errors import BadJob, Undecodable
from arriero.schemas.event import DeadLettered, Rejected
from arriero.schemas.event import Undecodable as UndecodableEvent
from arriero.schemas.job import JOB_MAX_BYTES, Job
from arriero.schemas.names import Names
from arriero.schemas.state import JobState
from arriero.transports.log import RECORD_MAX_BYTES, Record
from arriero.workers.door import check_record, owner_elsewhere, refusal

NAMES = Names("test")
TOPIC = NAMES.jobs("default", "batch")


def record(value: bytes | None) -> Record:
    return Record(TOPIC, 2, 5, 1_000, b"k", value)


def fault(value: bytes | None) -> BadJob | Undecodable:
    with pytest.raises((BadJob, Undecodable)) as caught:
        check_record(record(value), "batch", ["m"])
    assert isinstance(caught.value, BadJob | Undecodable)
    return caught.value


def test_a_null_value_is_undecodable() -> None:
    event, (copy,) = refusal(NAMES, record(None), "batch", fault(None), 7)
    assert isinstance(event, UndecodableEvent)
    assert (event.id, event.error.code, event.priority) == (f"{TOPIC}/2/5", "null_value", "batch")
    assert (copy.topic, copy.key) == (NAMES.dead, event.id.encode())
    assert decode_dead(copy.value).raw is None


def test_a_copy_of_four_mebibytes_that_are_no_job_is_cut_to_fit() -> None:
    value = b"\x00" * (RECORD_MAX_BYTES - 100)
    _, (copy,) = refusal(NAMES, record(value), "batch", fault(value), 7)
    assert decode_dead(copy.value).raw == value[:JOB_MAX_BYTES]
    assert len(copy.value) < RECORD_MAX_BYTES // 2


def test_the_copy_of_a_later_versions_job_keeps_fields_that_nobody_knows() -> None:
    value = b'{"id": "a", "v": 2, "prompt": "x", "wisdom": [1.50, {"deep": null}]}'
    event, (copy,) = refusal(NAMES, record(value), "batch", fault(value), 7)
    assert isinstance(event, DeadLettered)
    assert (event.id, event.reason) == ("a", "unknown_version")
    assert decode_dead(copy.value).job == msgspec.json.decode(value)


def test_a_rejected_job_needs_no_copy() -> None:
    value = b'{"id": "a", "prompt": ""}'
    event, copies = refusal(NAMES, record(value), "batch", fault(value), 7)
    assert isinstance(event, Rejected)
    assert (event.root, event.error.code, event.error.field) == (f"{TOPIC}/2/5", "empty_prompt", "prompt")
    assert copies == []


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["id", "prompt", "v", "sampling", "stop", "class", "metadata"]), inner)
        ),
    ).map(msgspec.json.encode)
)
def test_whatever_lies_in_a_record_is_a_job_or_ends_with_a_code(value: bytes) -> None:
    try:
        job, _ = check_record(record(value), "batch", ["m"])
    except (BadJob, Undecodable) as error:
        event, copies = refusal(NAMES, record(value), "batch", error, 7)
        assert event.error.code
        assert len(encode(event)) < 10_000
        assert all(len(copy.value) < RECORD_MAX_BYTES for copy in copies)
    else:
        assert isinstance(job, Job)


def test_only_an_event_says_whose_an_id_is() -> None:
    assert not owner_elsewhere(None, "t/0/1")
    assert not owner_elsewhere(JobState(id="a", root="t/0/0"), "t/0/1")
    assert not owner_elsewhere(JobState(id="a", root="t/0/1", owned=True), "t/0/1")
    assert owner_elsewhere(JobState(id="a", root="t/0/0", owned=True), "t/0/1")
