"""OpenAI's dialect: bodies to jobs, outcomes to objects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.producer.follow import Tokens
from arriero.producer.openai import (
    Answer,
    Kind,
    TextOnce,
    api_error,
    outcome_error,
    read_json,
    read_request,
)
from arriero.schemas.errors import (
    ArrieroError,
    BadJob,
    BusUnavailable,
    ConflictingDuplicate,
    JobNotFound,
    LogUnavailable,
    NoLiveWorker,
)
from arriero.schemas.event import Usage
from arriero.schemas.job import LATER_OPTIONS, Message, Sampling, encode_job, read_job
from arriero.schemas.token import Token

TURNS = [{"role": "user", "content": "hi"}]


def understand(kind: Kind = "completion", **body: Any) -> Any:
    body.setdefault("prompt" if kind == "completion" else "messages", "hi" if kind == "completion" else TURNS)
    return read_request(kind, body, job_id="a")


def refused(kind: Kind = "completion", **body: Any) -> BadJob:
    with pytest.raises(BadJob) as caught:
        understand(kind, **body)
    return caught.value


def test_a_completion_with_everything() -> None:
    asked = understand(
        model="m",
        prompt="once",
        n=1,
        max_tokens=7,
        stop="\n",
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        seed=3,
        top_k=5,
        min_p=0.05,
        repeat_penalty=1.1,
        penalty_last_n=32,
    )
    job = asked.job
    assert (job.model, job.prompt, job.messages, job.max_tokens, job.stop) == ("m", "once", None, 7, ["\n"])
    assert job.metadata == {"user": "u"}
    assert job.sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        seed=3,
        top_k=5,
        min_p=0.05,
        repeat_penalty=1.1,
        penalty_last_n=32,
    )
    assert asked.stream
    assert asked.include_usage


def test_a_chat_joins_the_text_parts_of_a_turn() -> None:
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    asked = understand("chat", messages=turns, max_completion_tokens=9)
    assert asked.job.messages == [Message("system", "be brief"), Message("user", "one\ntwo")]
    assert asked.job.max_tokens == 9
    assert not asked.stream


def test_nulls_count_as_left_out() -> None:
    nulls = dict.fromkeys("model stop stream stream_options user temperature seed max_tokens logprobs tools".split())
    assert understand(**nulls).job == understand().job


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert understand(prompt=["one"]).job.prompt == "one"
    assert refused(prompt=["one", "two"]).code == "unsupported_option"
    assert refused(prompt=[]).code == "empty_prompt"


@pytest.mark.parametrize("name", sorted(LATER_OPTIONS - {"n"}))
def test_a_later_option_is_refused_by_name(name: str) -> None:
    error = refused("chat", **{name: 1})
    assert (error.code, error.field) == ("unsupported_option", name)


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    error = refused(temprature=1)
    assert (error.code, error.field) == ("unknown_field", "temprature")
    assert "`temperature`" in error.message
    nested = refused("chat", messages=[{"role": "user", "contents": "hi"}])
    assert (nested.code, nested.field) == ("unknown_field", "messages[0].contents")
    assert refused("chat", messages=[{"role": "user", "content": "x", "tool_calls": []}]).field
    assert refused(stream=True, stream_options={"include_usages": True}).field == "stream_options.include_usages"


@pytest.mark.parametrize(
    ("kind", "body", "code", "field"),
    [
        ("completion", {"n": 2}, "unsupported_option", "n"),
        ("completion", {"temperature": "hot"}, "bad_type", "temperature"),
        ("completion", {"temperature": -1}, "bad_value", "temperature"),
        ("completion", {"temperature": True}, "bad_type", "temperature"),
        ("completion", {"top_p": 0}, "bad_value", "top_p"),
        ("completion", {"max_tokens": 0}, "bad_value", "max_tokens"),
        ("completion", {"max_tokens": 1.5}, "bad_type", "max_tokens"),
        ("completion", {"seed": -1}, "bad_value", "seed"),
        ("completion", {"stop": ["x"] * 17}, "bad_value", "stop"),
        ("completion", {"stop": [1]}, "bad_type", "stop[0]"),
        ("completion", {"prompt": ""}, "empty_prompt", "prompt"),
        ("completion", {"prompt": [1, 2]}, "bad_type", "prompt[0]"),
        ("completion", {"messages": TURNS}, "unknown_field", "messages"),
        ("completion", {"max_completion_tokens": 5}, "unknown_field", "max_completion_tokens"),
        ("completion", {"stream_options": {"include_usage": True}}, "bad_value", "stream_options"),
        ("chat", {"messages": []}, "empty_prompt", "messages"),
        ("chat", {"messages": "hi"}, "bad_type", "messages"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "bad_value", "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": None}]}, "bad_type", "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_value", None),
        ("chat", {"max_tokens": 4, "max_completion_tokens": 5}, "bad_value", "max_completion_tokens"),
    ],
)
def test_a_bad_body_is_refused_with_code_and_field(
    kind: Kind, body: dict[str, Any], code: str, field: str | None
) -> None:
    error = refused(kind, **body)
    assert error.code == code
    if field is not None:
        assert error.field == field
        assert "sampling." not in error.message


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(BadJob) as caught:
        read_request("completion", {}, job_id="a")
    assert (caught.value.code, caught.value.field) == ("missing_field", "prompt")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "malformed_json"),
        (b'{"prompt": ', "malformed_json"),
        (b"[]", "malformed_json"),
        (b"null", "malformed_json"),
        (b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "malformed_json"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"prompt": "\\ud800"}', "invalid_utf8"),
        (b'{"temperature": NaN}', "not_finite"),
        (b'{"temperature": -Infinity}', "not_finite"),
        (b'{"temperature": 1e999}', "not_finite"),
    ],
)
def test_hostile_json_is_refused_with_a_code(raw: bytes, code: str) -> None:
    with pytest.raises(BadJob) as caught:
        read_json(raw)
    assert caught.value.code == code


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from("model prompt messages n stop stream stream_options user temperature top_k seed tools".split())


@given(st.dictionaries(_NAMES | st.text(max_size=6), _VALUES, max_size=5), st.sampled_from(["chat", "completion"]))
def test_any_body_becomes_a_job_that_passes_the_door_or_a_bad_job(body: dict[str, Any], kind: Kind) -> None:
    try:
        job = read_request(kind, body, job_id="a").job
    except BadJob:
        return  # refused in our words, whatever it was
    assert read_job(encode_job(job)) == job


# --- answers -------------------------------------------------------------------------------------------------


def test_whole_answers() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    chat = Answer("chat", "a", "m", 5).whole("hi", "stop", usage)
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert chat["usage"]["total_tokens"] == 5
    plain = Answer("completion", "a", "m", 5).whole("hi", "length", usage)
    assert (plain["object"], plain["choices"][0]["text"]) == ("text_completion", "hi")
    assert plain["choices"][0]["finish_reason"] == "length"


def test_chunks_name_the_role_once_and_the_reason_last() -> None:
    answer = Answer("chat", "a", "m", 5)
    assert answer.chunk("hi", first=True)["choices"][0]["delta"] == {"role": "assistant", "content": "hi"}
    assert answer.chunk("ho")["choices"][0]["delta"] == {"content": "ho"}
    last = answer.chunk("", "stop")["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert answer.usage_chunk(Usage())["choices"] == []


def tokens(first: int, text: str) -> Tokens:
    return Tokens(first, [Token(1, piece) for piece in text])


def test_a_generation_that_says_the_same_again_is_shown_once() -> None:
    text = TextOnce()
    assert text.take(tokens(0, "abc")) == "abc"
    assert text.take(tokens(0, "ab")) == ""
    assert text.take(tokens(2, "cde")) == "de"
    text.check_end(5)


def test_a_generation_that_says_something_else_ends_the_text() -> None:
    text = TextOnce()
    text.take(tokens(0, "abc"))
    with pytest.raises(ArrieroError) as caught:
        text.take(tokens(1, "x"))
    assert caught.value.code == "stream_reset"
    with pytest.raises(ArrieroError):
        text.check_end(2)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadJob("x"), 400),
        (BadJob("x", code="unknown_model"), 404),
        (BadJob("x", code="job_too_large"), 413),
        (JobNotFound("x"), 404),
        (ConflictingDuplicate("x"), 409),
        (NoLiveWorker("x"), 503),
        (LogUnavailable("x"), 503),
        (BusUnavailable("x"), 503),
        (ArrieroError("x"), 500),
    ],
)
def test_errors_have_http_statuses(error: ArrieroError, status: int) -> None:
    shown = api_error(error)
    assert shown.status == status
    assert set(shown.body()["error"]) == {"message", "type", "code", "param"}
    assert msgspec.json.encode(shown.body())


@pytest.mark.parametrize(
    ("status", "code", "http"),
    [
        ("rejected", "prompt_too_long", 400),
        ("rejected", "unknown_model", 404),
        ("expired", "expired", 504),
        ("cancelled", None, 409),
        ("failed", "engine_error", 500),
        ("dead_lettered", "unknown_version", 500),
    ],
)
def test_outcomes_have_http_statuses(status: str, code: str | None, http: int) -> None:
    error = outcome_error(status, code, None)
    assert error is not None
    assert error.status == http
    assert outcome_error("completed", None, None) is None
