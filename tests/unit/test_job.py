"""The door that every job passes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.schemas.errors import ArrieroError, BadJob, Undecodable, UnknownVersion
from arriero.schemas.job import JOB_MAX_BYTES, Job, Sampling, body_digest, encode_job, job_seed, read_job


def record(**fields: Any) -> bytes:
    return json.dumps({"id": "a", "prompt": "hello", **fields}).encode()


def refusal(value: bytes | None) -> ArrieroError:
    with pytest.raises(ArrieroError) as caught:
        read_job(value)
    return caught.value


def test_a_minimal_job_gets_the_defaults() -> None:
    job = read_job(b'{"id":"a","prompt":"hello"}')
    assert job == Job(id="a", prompt="hello")
    assert (job.v, job.attempt, job.tenant, job.max_tokens) == (1, 1, "default", 512)


def test_a_job_survives_the_round_trip() -> None:
    job = Job(id="a", prompt="ñ 漢 🦙", sampling=Sampling(temperature=0.5, seed=7), stop=["\n"], priority="batch")
    assert read_job(encode_job(job)) == job


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": None}, "missing_field"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "missing_field"),
        ({"prompt": None, "messages": []}, "empty_prompt"),
        ({"prompt": None, "messages": [{"role": "wizard", "content": "hi"}]}, "bad_type"),
        ({"prompt": 7}, "bad_type"),
        ({"class": "urgent"}, "bad_type"),
        ({"max_tokens": 0}, "bad_value"),
        ({"max_tokens": 10**30}, "bad_value"),
        ({"max_tokens": "many"}, "bad_type"),
        ({"priority": "batch"}, "unknown_field"),
        ({"stop": ["x"] * 17}, "bad_value"),
        ({"stop": [""]}, "bad_value"),
        ({"deadline": -1}, "bad_value"),
        ({"deadline": 1_900_000_000_000}, "bad_value"),
        ({"tenant": "{a}"}, "bad_value"),
        ({"affinity": ""}, "bad_value"),
        ({"sampling": {"temperature": -0.1}}, "bad_value"),
        ({"sampling": {"temperature": 1e300}}, "bad_value"),
        ({"sampling": {"top_p": 0}}, "bad_value"),
        ({"sampling": {"top_k": -1}}, "bad_value"),
        ({"sampling": {"min_p": 1.5}}, "bad_value"),
        ({"sampling": {"repeat_penalty": 0}}, "bad_value"),
        ({"sampling": {"seed": -1}}, "bad_value"),
        ({"sampling": {"temperature": float("nan")}}, "not_finite"),
        ({"sampling": {"top_p": float("inf")}}, "not_finite"),
        ({"logprobs": 1}, "unsupported_option"),
        ({"logit_bias": {"5": 1}}, "unknown_field"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "bad_value"),
        ({"sampling": {"logit_bias": {"5": 101}}}, "bad_value"),
        ({"sampling": {"logit_bias": {"5": float("nan")}}}, "not_finite"),
        ({"sampling": {"grammar": "root ::= [a]", "json_schema": {}}}, "bad_value"),
        ({"sampling": {"typical_p": 1}}, "unsupported_option"),
        ({"prmopt": "x"}, "unknown_field"),
    ],
)
def test_a_job_that_breaks_the_contract_is_refused_under_its_id(fields: dict[str, Any], code: str) -> None:
    error = refusal(record(**fields))
    assert isinstance(error, BadJob)
    assert (error.code, error.job_id) == (code, "a")


def test_a_number_of_thousands_of_digits_is_refused_under_the_id() -> None:
    error = refusal(b'{"id":"a","prompt":"x","max_tokens":' + b"9" * 5_000 + b"}")
    assert isinstance(error, BadJob)
    assert (error.code, error.job_id) == ("bad_value", "a")


def test_infinity_by_exponent_is_not_finite() -> None:
    error = refusal(b'{"id":"a","prompt":"x","sampling":{"temperature":1e999}}')
    assert error.code == "not_finite"


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    assert "did you mean `sampling.temperature`?" in refusal(record(sampling={"temprature": 1})).message
    assert "did you mean `sampling.top_k`?" in refusal(record(top_k=1)).message
    assert "did you mean `deadline`?" in refusal(record(deadlin=1)).message
    assert "did you mean `class`?" in refusal(record(priority="batch")).message


def test_invalid_utf8_is_refused_under_the_id_that_can_be_read() -> None:
    error = refusal(b'{"id":"a","prompt":"\xff\xfe"}')
    assert isinstance(error, BadJob)
    assert (error.code, error.job_id) == ("invalid_utf8", "a")


def test_a_job_over_the_limit_is_refused_under_its_id() -> None:
    error = refusal(record(prompt="x" * JOB_MAX_BYTES))
    assert isinstance(error, BadJob)
    assert (error.code, error.job_id) == ("job_too_large", "a")
    with pytest.raises(BadJob, match="at most"):
        encode_job(Job(id="a", prompt="x" * JOB_MAX_BYTES))


def test_another_version_is_set_apart_whatever_else_it_holds() -> None:
    assert isinstance(refusal(record(v=2)), UnknownVersion)
    assert isinstance(refusal(record(v=2, prompt=7, new_field=1)), UnknownVersion)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "null_value"),
        (b"", "malformed_json"),
        (b"{", "malformed_json"),
        (b"[]", "malformed_json"),
        (b"[" * 100_000, "malformed_json"),
        (b"\xff\xff", "invalid_utf8"),
        (b'{"prompt":"x"}', "missing_field"),
        (b'{"id":7,"prompt":"x"}', "bad_id"),
        (b'{"id":"","prompt":"x"}', "bad_id"),
        (b'{"id":"{a}","prompt":"x"}', "bad_id"),
        (b'{"id":"' + b"a" * 10_000 + b'","prompt":"x"}', "bad_id"),
    ],
)
def test_a_record_without_a_valid_id_is_undecodable(value: bytes | None, code: str) -> None:
    error = refusal(value)
    assert isinstance(error, Undecodable)
    assert error.code == code


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(value: bytes) -> None:
    with contextlib.suppress(BadJob, Undecodable):
        read_job(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["id", "prompt", "messages", "sampling", "stop", "v", "class", "x"]), json_values)
)
def test_no_json_raises_anything_else(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadJob, Undecodable):
        read_job(json.dumps({"id": "a", **fields}).encode())


def test_the_digest_is_the_clients_wish_and_nothing_of_the_fleet() -> None:
    job = Job(id="a", prompt="x")
    moved = msgspec.structs.replace(job, attempt=3, root="t/0/1", priority="batch")
    assert body_digest(job) == body_digest(moved)
    assert body_digest(job) != body_digest(Job(id="a", prompt="y"))


def test_a_seed_is_the_jobs_own_or_follows_from_its_id() -> None:
    assert job_seed(Job(id="a", prompt="x", sampling=Sampling(seed=5))) == 5
    assert job_seed(Job(id="a", prompt="x")) == job_seed(Job(id="a", prompt="y"))
    assert job_seed(Job(id="a", prompt="x")) != job_seed(Job(id="b", prompt="x"))
