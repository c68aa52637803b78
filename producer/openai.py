"""The OpenAI dialect: from request bodies to jobs, from outcomes to response objects. Pure; for gateway and batch.

Chat and plain completions are spoken. A field that this version does not serve is refused by its name, never ignored;
an explicit null counts as left out. Beyond OpenAI's own fields `top_k`, `min_p`, `repeat_penalty` and `penalty_last_n`
are taken, as other servers take them; so are `grammar` and `json_schema`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from arriero.producer.follow import Tokens
from arriero.schemas.errors import (
    ArrieroError,
    BadJob,
    ConflictingDuplicate,
    JobNotFound,
    Undecodable,
)
from arriero.schemas.event import Usage
from arriero.schemas.job import LATER_OPTIONS, MAX_TOKENS_DEFAULT, BatchRef, Job, Message, Sampling, check_job
from arriero.schemas.token import FinishReason

Kind = Literal["chat", "completion"]
PATHS: Final[Mapping[str, Kind]] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_STATUS_BY_CODE: Final[Mapping[str, int]] = {
    "unknown_model": 404,
    "job_too_large": 413,
    "output_too_large": 413,
    "expired": 504,
    "cancelled": 409,
}
"""HTTP statuses of codes whose class of error does not say it."""


# --- from a body to a job ------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[Part]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    schema: dict[str, Any] = {}
    name: str = ""
    description: str = ""
    strict: bool = False
    """The output always follows the schema."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have."""

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    penalty_last_n: int | None = None
    logit_bias: dict[str, float] = {}
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[str]


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[Turn]
    max_completion_tokens: int | None = None


_BODIES: Final[Mapping[Kind, type[CompletionBody | ChatBody]]] = {"completion": CompletionBody, "chat": ChatBody}
_SAMPLING: Final = frozenset(Sampling.__struct_encode_fields__)


class Request(msgspec.Struct, frozen=True):
    """A request understood: the job to publish, and how its answer is wanted."""

    kind: Kind
    job: Job
    stream: bool
    include_usage: bool


def read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object by the strict rules. Raises BadJob: malformed_json, invalid_utf8, not_finite."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _json_fault(raw, error) from error
    if not isinstance(value, dict):
        raise BadJob("the body is not a JSON object", code="malformed_json")
    return value


def _json_fault(raw: bytes, error: Exception) -> BadJob:
    if isinstance(error, RecursionError):
        return BadJob("the body is nested too deeply", code="malformed_json")
    try:
        text = raw.decode()
    except UnicodeDecodeError as fault:
        return BadJob(f"the body is not UTF-8 (byte {fault.start})", code="invalid_utf8")
    constants: list[str] = []
    try:
        json.loads(text, parse_constant=constants.append)
    except (ValueError, RecursionError):
        return BadJob(f"the body is not JSON: {error}", code="malformed_json")
    if constants:
        return BadJob(f"{constants[0]} is not a number that JSON knows", code="not_finite")
    if "out of range" in str(error):
        return BadJob("the body has a number that is out of range", code="not_finite")
    return BadJob("the body has text that is not Unicode (a lone surrogate)", code="invalid_utf8")


def read_request(
    kind: Kind,
    body: Mapping[str, Any],
    *,
    job_id: str,
    deadline: float | None = None,
    batch: BatchRef | None = None,
) -> Request:
    """Understand a request's body. Raises BadJob, whose field is the body's."""
    given = _without_nulls(body)
    _check_names(given, _BODIES[kind])
    try:
        asked = msgspec.convert(given, _BODIES[kind])
    except msgspec.ValidationError as error:
        raise _type_fault(error) from error
    if asked.n != 1:
        raise BadJob("`n` must be 1: one answer a request", code="unsupported_option", field="n")
    if asked.stream_options is not None and not asked.stream:
        raise BadJob("`stream_options` goes with `stream`: true", field="stream_options")
    sampling = {name: value for name, value in given.items() if name in _SAMPLING}
    if (schema := _response_schema(asked)) is not None:
        sampling["json_schema"] = schema
    most = _max_tokens(asked)
    job = Job(
        id=job_id,
        model=asked.model,
        prompt=_prompt(asked),
        messages=_messages(asked),
        sampling=msgspec.convert(sampling, Sampling),
        stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
        metadata={} if asked.user is None else {"user": asked.user},
        deadline=deadline,
        batch=batch,
        max_tokens=MAX_TOKENS_DEFAULT if most is None else most,
    )
    try:
        check_job(job)
    except BadJob as error:
        field = (error.field or "").removeprefix("sampling.") or None
        raise BadJob(error.message.replace("`sampling.", "`", 1), code=error.code, field=field) from error
    except Undecodable as error:
        raise BadJob(error.message, code=error.code, field="id") from error
    return Request(kind, job, asked.stream, asked.stream_options is not None and asked.stream_options.include_usage)


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    if isinstance(options := given.get("stream_options"), dict):
        given["stream_options"] = {name: value for name, value in options.items() if value is not None}
    return given


def _check_names(given: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    refuse_unknown("", given, kind)
    if isinstance(options := given.get("stream_options"), dict):
        refuse_unknown("stream_options.", options, StreamOptions)
    turns = given.get("messages")
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        if isinstance(turn, dict):
            refuse_unknown(f"messages[{number}].", turn, Turn)
            parts = turn.get("content")
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and part.get("type") == "text":
                    refuse_unknown(f"messages[{number}].content.", part, Part)


def refuse_unknown(prefix: str, given: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raises BadJob for the first name that `kind` does not have: unsupported_option when later versions will."""
    known = kind.__struct_encode_fields__
    for name in given:
        if name in known:
            continue
        shown = prefix + name[:60]
        if name in LATER_OPTIONS:
            raise BadJob(f"`{shown}` is not supported by this version", code="unsupported_option", field=shown)
        nearest = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.5)
        hint = f"; did you mean `{prefix}{nearest[0]}`?" if nearest else ""
        raise BadJob(f"`{shown}` is not a field that is known here{hint}", code="unknown_field", field=shown)


def _type_fault(error: msgspec.ValidationError) -> BadJob:
    """What msgspec says, `... - at `$.field``, in our words."""
    what, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if "missing required field" in what:
        name = what.rpartition("field `")[2].rstrip("`")
        field = f"{field}.{name}" if field else name
        return BadJob(f"`{field}` is missing", code="missing_field", field=field)
    code = "bad_value" if what.startswith("Invalid enum value") else "bad_type"
    return BadJob(f"`{field}` does not fit: {what[:1].lower()}{what[1:]}", code=code, field=field or None)


def _max_tokens(asked: CompletionBody | ChatBody) -> int | None:
    most = asked.max_completion_tokens if isinstance(asked, ChatBody) else None
    if most is None or asked.max_tokens in (None, most):
        return asked.max_tokens if most is None else most
    raise BadJob("`max_tokens` and `max_completion_tokens` say different things", field="max_completion_tokens")


def _response_schema(asked: Body) -> dict[str, Any] | None:
    """What `response_format` asks for as a schema. Raises BadJob."""
    form = asked.response_format
    if form is None or form.type == "text":
        return None
    if asked.grammar is not None or asked.json_schema is not None:
        raise BadJob("`response_format` excludes `grammar` and `json_schema`", field="response_format")
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise BadJob("`response_format.json_schema` is missing", code="missing_field", field="response_format")
    return form.json_schema.schema


def _prompt(asked: CompletionBody | ChatBody) -> str | None:
    if isinstance(asked, ChatBody):
        return None
    if isinstance(asked.prompt, str):
        return asked.prompt
    if len(asked.prompt) > 1:
        raise BadJob("`prompt` must be one string: one answer a request", code="unsupported_option", field="prompt")
    return asked.prompt[0] if asked.prompt else ""


def _messages(asked: CompletionBody | ChatBody) -> list[Message] | None:
    """The turns; text parts of one turn are lines of it."""
    if not isinstance(asked, ChatBody):
        return None
    return [
        Message(
            turn.role,
            turn.content if isinstance(turn.content, str) else "\n".join(part.text for part in turn.content),
        )
        for turn in asked.messages
    ]


# --- from an outcome to an answer ----------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    """Response objects of one job. `created` is Unix seconds."""

    kind: Kind
    id: str
    model: str
    created: int

    def whole(self, text: str, finish_reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._object(kind, content, finish_reason) | {"usage": usage_object(usage)}

    def chunk(self, text: str, finish_reason: FinishReason | None = None, *, first: bool = False) -> dict[str, Any]:
        if self.kind == "completion":
            return self._object("text_completion", {"text": text}, finish_reason)
        delta = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        return self._object("chat.completion.chunk", {"delta": delta}, finish_reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that was asked for its usage."""
        return self.chunk("") | {"choices": [], "usage": usage_object(usage)}

    def _object(self, kind: str, content: dict[str, Any], finish_reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [choice]}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class TextOnce:
    """A stream's text for readers who cannot take anything back.

    A generation that begins again mostly says the same again, for its draws follow from seed and index: what has been
    shown is then not shown twice. Raises ArrieroError(stream_reset) at the first token that differs.
    """

    def __init__(self) -> None:
        self._shown: list[str] = []
        """Pieces by index."""

    def take(self, item: Tokens) -> str:
        """What is new in these tokens."""
        before = len(self._shown)
        for index, token in enumerate(item.tokens, item.first):
            if index == len(self._shown):
                self._shown.append(token.piece)
            elif self._shown[index] != token.piece:
                raise self._reset()
        return "".join(self._shown[before:])

    def check_end(self, count: int) -> None:
        if count < len(self._shown):
            raise self._reset()

    @staticmethod
    def _reset() -> ArrieroError:
        return ArrieroError(
            "the generation began again and says something else; its result can be read by the job's id",
            code="stream_reset",
        )


# --- errors --------------------------------------------------------------------------------------------------


class ApiError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as OpenAI's clients expect it."""

    status: int
    """HTTP's."""
    code: str
    message: str
    param: str | None = None
    retriable: bool = False
    """Whether the same request may succeed later. OpenAI's clients are told, for by themselves they repeat whatever
    ended with 409 or 5xx."""

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param}}


def api_error(error: ArrieroError) -> ApiError:
    """One of our errors."""
    if isinstance(error, BadJob | Undecodable):
        status = 400
    elif isinstance(error, JobNotFound):
        status = 404
    elif isinstance(error, ConflictingDuplicate):
        status = 409
    else:
        status = 503 if error.retriable else 500
    return ApiError(
        status=_STATUS_BY_CODE.get(error.code, status),
        code=error.code,
        message=error.message,
        param=getattr(error, "field", None),
        retriable=error.retriable,
    )


def outcome_error(status: str, code: str | None, message: str | None, param: str | None = None) -> ApiError | None:
    """The error in how a job ended; None when it was completed."""
    if status == "completed":
        return None
    code = code or status
    fallback = 400 if status == "rejected" else 500
    return ApiError(
        status=_STATUS_BY_CODE.get(code, fallback),
        code=code,
        message=message or f"the job ended as {status.replace('_', ' ')}",
        param=param,
    )
