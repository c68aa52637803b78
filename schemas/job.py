"""The job: what a client asks for, as it lies in a job topic.

A job record is one JSON object. `read_job` is the only way in: client, gateway and worker all call it, so a
job that passes one door passes the next. What depends on a model (its name, its context) is checked where
the model is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import msgspec

from arriero.schemas.errors import BadJob, Undecodable, UnknownVersion

PriorityClass = Literal["interactive", "standard", "batch"]
CLASSES: Final[tuple[PriorityClass, ...]] = get_args(PriorityClass)
"""Most urgent first."""

VERSION: Final = 1
JOB_MAX_BYTES: Final = 1 << 20
"""Largest job record that is accepted; fleet topics allow 4 MiB so that retry and dead-letter records,
which wrap a job, always fit."""
FLEET_MAX_BYTES: Final = 2 * JOB_MAX_BYTES
"""Largest record of a later attempt: the job once more, with the fleet's own fields, and numbers written out."""
ID_PATTERN: Final = re.compile(r"[A-Za-z0-9._:~-]{1,200}\Z")
"""Ids are part of keys and channels of the token bus: no braces, no spaces, bounded."""
STOP_MAX_STRINGS: Final = 16
STOP_MAX_CHARS: Final = 500
MAX_TOKENS_DEFAULT: Final = 512
MAX_TOKENS_LIMIT: Final = 1_000_000
MAX_ATTEMPTS_LIMIT: Final = 100
LATEST_DEADLINE: Final = 32_503_680_000.0
"""Unix seconds, the year 3000: a later one was meant to be milliseconds."""

BIASES_MAX: Final = 1_024
LATER_OPTIONS: Final = frozenset(
    "logprobs top_logprobs n best_of echo suffix tools tool_choice "
    "functions function_call typical_p mirostat mirostat_tau mirostat_eta dry_multiplier xtc_probability "
    "dynatemp_range lora adapter reasoning_effort modalities audio prediction".split()
)
"""Options that other servers know and this version does not: refused by name, never ignored."""


ALIASES: Final = {"priority": "class", "max_completion_tokens": "max_tokens", "n_predict": "max_tokens"}
"""What others call a field of ours, where spelling would lead astray."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat; the model file's own template turns a list of them into a prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the next token is picked. `temperature` 0 is greedy and ignores the rest but the penalties."""

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k likeliest; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Drop what is less likely than this share of the likeliest."""
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    """How many of the last tokens the penalties look at."""
    logit_bias: dict[str, float] = {}
    """By token id, in decimal digits: what is added to its logit, -100 to 100."""
    grammar: str | None = None
    """GBNF that the output follows."""
    json_schema: dict[str, Any] | None = None
    """JSON schema that the output follows."""
    seed: int | None = None
    """Left out, it is derived from the job's id, so that a resumed job draws what it would have drawn."""


class BatchRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an offline job came from: digest of the input file, line counted from 1."""

    id: str
    line: int


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A job record. Exactly one of `prompt` and `messages` is given."""

    id: str
    v: int = VERSION
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    sampling: Sampling = Sampling()
    max_tokens: int = MAX_TOKENS_DEFAULT
    stop: list[str] = []
    priority: PriorityClass | None = msgspec.field(name="class", default=None)
    """The topic's class; stored only where the topic does not say it (delay and dead-letter topics)."""
    tenant: str = "default"
    deadline: float | None = None
    """Unix seconds; past it the job ends as expired, wherever it is."""
    affinity: str | None = None
    """Jobs with one key meet in one partition, so in one worker and one prefix cache."""
    metadata: dict[str, Any] = {}
    """The client's own bag; carried, never read."""
    batch: BatchRef | None = None
    max_attempts: int | None = None
    """Runs that a transient error may cost before the job is dead-lettered; None leaves it to the fleet."""

    # Set by the fleet.
    attempt: int = 1
    root: str | None = None
    """Origin of the job's first record, when this is a later one (`topic/partition/offset`)."""
    streamed: int = 0
    """Tokens that earlier attempts have decoded and streamed: this one goes on after them."""
    started_ms: int = 0
    """When the first attempt began, in the time of the events topic: no event of the job that matters is older."""
    replay_of: str | None = None

    @property
    def key(self) -> str:
        """The partition key."""
        return self.affinity or self.id


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Job)


def encode_job(job: Job) -> bytes:
    """The job record's bytes. Raises BadJob(job_too_large, invalid_utf8)."""
    try:
        value = _encoder.encode(job)
    except UnicodeEncodeError as error:
        raise BadJob("the job holds text that is not Unicode (a lone surrogate)", code="invalid_utf8") from error
    check_size(value, job.id)
    return value


def fleet_record(job: Job) -> bytes:
    """The bytes of a record that the fleet writes of an accepted job: its own fields may make it longer than a client's
    may be."""
    return _encoder.encode(job)


def check_id(job_id: str) -> None:
    """Raises BadJob(bad_id) for what can be no job's id."""
    if not ID_PATTERN.match(job_id):
        raise BadJob("a job's id is 1 to 200 of the characters A-Z a-z 0-9 . _ : ~ -", code="bad_id", field="id")


def check_size(value: bytes, job_id: str | None = None) -> None:
    if len(value) > JOB_MAX_BYTES:
        raise BadJob(
            f"the job is {len(value):,} bytes long; at most {JOB_MAX_BYTES:,} are accepted",
            code="job_too_large",
            job_id=job_id,
        )


def read_job(value: bytes | None) -> Job:
    """Decode and validate a job record.

    Raises BadJob (with the job's id) when the job breaks the contract, UnknownVersion when it was written
    for a later release, Undecodable when not even a valid id can be read.
    """
    try:
        if value is not None and len(value) <= FLEET_MAX_BYTES:
            job = _decoder.decode(value)
            if job.attempt == 1:
                check_size(value, job.id)
            check_job(job)
            return job
    except msgspec.MsgspecError:
        pass  # what is wrong is found out below, once, off the fast path
    except (UnicodeDecodeError, RecursionError):
        pass
    raise _diagnose(value)


def body_digest(job: Job) -> str:
    """What the client asked for, as 16 hex digits: two records of one id with different digests conflict."""
    body = msgspec.structs.replace(job, attempt=1, root=None, streamed=0, started_ms=0, replay_of=None, priority=None)
    return hashlib.blake2b(_encoder.encode(body), digest_size=8).hexdigest()


def job_seed(job: Job) -> int:
    """The seed of the job's draws: its own, else one derived from its id."""
    if job.sampling.seed is not None:
        return job.sampling.seed
    return int.from_bytes(hashlib.blake2b(job.id.encode(), digest_size=8).digest(), "big") >> 1


def check_job(job: Job) -> None:
    """Everything about a well-typed job that no model is needed for. Raises BadJob."""

    def refuse(field: str, message: str, code: str = "bad_value") -> BadJob:
        return BadJob(f"`{field}` {message}", code=code, field=field, job_id=job.id)

    if not ID_PATTERN.match(job.id):
        raise Undecodable("`id` must be 1 to 200 of the characters A-Z a-z 0-9 . _ : ~ -", code="bad_id")
    if job.v != VERSION:
        raise UnknownVersion(
            f"job version {job.v} is unknown here (this release reads version {VERSION}); "
            "upgrade the workers, then replay it",
            field="v",
            job_id=job.id,
        )
    if (job.prompt is None) == (job.messages is None):
        raise refuse("prompt", "or `messages` must be given, and not both", "missing_field")
    if job.prompt == "" or job.messages == []:
        raise refuse("prompt" if job.messages is None else "messages", "is empty", "empty_prompt")
    if not ID_PATTERN.match(job.tenant):
        raise refuse("tenant", "must be 1 to 200 of the characters A-Z a-z 0-9 . _ : ~ -")
    if job.affinity is not None and not 1 <= len(job.affinity) <= 500:
        raise refuse("affinity", "must be 1 to 500 characters long")
    if not 1 <= job.max_tokens <= MAX_TOKENS_LIMIT:
        raise refuse("max_tokens", f"must be between 1 and {MAX_TOKENS_LIMIT:,}")
    if len(job.stop) > STOP_MAX_STRINGS:
        raise refuse("stop", f"has {len(job.stop)} strings; at most {STOP_MAX_STRINGS} are accepted")
    if any(not 1 <= len(text) <= STOP_MAX_CHARS for text in job.stop):
        raise refuse("stop", f"strings must be 1 to {STOP_MAX_CHARS} characters long")
    if job.deadline is not None:
        if not math.isfinite(job.deadline):
            raise refuse("deadline", "must be a finite number", "not_finite")
        if not 0 < job.deadline < LATEST_DEADLINE:
            raise refuse("deadline", "must be a time in Unix seconds")
    if not 1 <= job.attempt <= 1000:
        raise refuse("attempt", "must be between 1 and 1000")
    if job.max_attempts is not None and not 1 <= job.max_attempts <= MAX_ATTEMPTS_LIMIT:
        raise refuse("max_attempts", f"must be between 1 and {MAX_ATTEMPTS_LIMIT}")
    if not 0 <= job.streamed <= MAX_TOKENS_LIMIT:
        raise refuse("streamed", f"must be between 0 and {MAX_TOKENS_LIMIT:,}")
    if not 0 <= job.started_ms < LATEST_DEADLINE * 1000:
        raise refuse("started_ms", "must be a time in Unix milliseconds")
    _check_sampling(job.sampling, refuse)


_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0.0, 10.0),
    ("top_k", 0, 1_000_000),
    ("min_p", 0.0, 1.0),
    ("repeat_penalty", 0.01, 10.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("penalty_last_n", 0, 65_536),
)


def _check_sampling(sampling: Sampling, refuse: Any) -> None:
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if not math.isfinite(value):
            raise refuse(f"sampling.{name}", "must be a finite number", "not_finite")
        if not low <= value <= high:
            raise refuse(f"sampling.{name}", f"must be between {low:,} and {high:,}")
    if not math.isfinite(sampling.top_p):
        raise refuse("sampling.top_p", "must be a finite number", "not_finite")
    if not 0.0 < sampling.top_p <= 1.0:
        raise refuse("sampling.top_p", "must be more than 0 and at most 1")
    if len(sampling.logit_bias) > BIASES_MAX:
        raise refuse("sampling.logit_bias", f"has more than {BIASES_MAX:,} tokens")
    for token, bias in sampling.logit_bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 9):
            raise refuse("sampling.logit_bias", "has keys that are no token ids")
        if not math.isfinite(bias):
            raise refuse("sampling.logit_bias", "must hold finite numbers", "not_finite")
        if not -100.0 <= bias <= 100.0:
            raise refuse("sampling.logit_bias", "must be between -100 and 100 for each token")
    if sampling.grammar is not None and sampling.json_schema is not None:
        raise refuse("sampling.grammar", "and `sampling.json_schema` exclude each other")
    if sampling.seed is not None and not 0 <= sampling.seed < 1 << 63:
        raise refuse("sampling.seed", "must be between 0 and 2^63 - 1")


# --- finding out what is wrong -----------------------------------------------------------------------------


def _diagnose(value: bytes | None) -> BadJob | Undecodable:
    """The error for a record that did not decode, as exact as can be, with the job's id where there is one."""
    if value is None:
        return Undecodable("the record has no value", code="null_value")
    found: BadJob | None = None
    if len(value) > JOB_MAX_BYTES:
        try:
            check_size(value)
        except BadJob as error:
            found = error
    raw, found = _parse(value, found)
    if not isinstance(raw, dict):
        found = found or BadJob("the record is not a JSON object", code="malformed_json")
        return Undecodable(found.message, code=found.code)
    job_id = raw.get("id")
    if not isinstance(job_id, str) or not ID_PATTERN.match(job_id):
        if "id" not in raw:
            return Undecodable("`id` is missing", code="missing_field")
        return Undecodable("`id` must be 1 to 200 of the characters A-Z a-z 0-9 . _ : ~ -", code="bad_id")
    if found is None:
        found = _find_fault(raw)
    found.job_id = job_id
    return found


def _parse(value: bytes, found: BadJob | None) -> tuple[Any, BadJob | None]:
    """The JSON value behind `value`, read as leniently as an id can be read, and the first fault met."""
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        text = value.decode(errors="replace")
        found = found or BadJob(f"the record is not UTF-8 (byte {error.start})", code="invalid_utf8")
    not_finite: list[str] = []
    try:
        raw = json.loads(text, parse_constant=not_finite.append, parse_int=_parse_int)
    except RecursionError:
        return None, found or BadJob("the record is nested too deeply", code="malformed_json")
    except ValueError as error:
        return None, found or BadJob(f"the record is not JSON: {error}", code="malformed_json")
    if not_finite:
        found = found or BadJob(f"{not_finite[0]} is not a number that JSON knows", code="not_finite")
    return raw, found


def _parse_int(digits: str) -> int:
    """Python refuses to read numbers of thousands of digits; a value that is absurd stays so when it is cut."""
    return int(digits[:400])


def _find_fault(raw: dict[str, Any]) -> BadJob:
    """The fault in a JSON object that is no valid job."""
    version = raw.get("v", VERSION)
    if version != VERSION:
        return UnknownVersion(
            f"job version {str(version)[:40]} is unknown here (this release reads version {VERSION}); "
            "upgrade the workers, then replay it",
            field="v",
        )
    sampling = raw.get("sampling")
    for prefix, given, known in (
        ("", raw, _field_names(Job)),
        ("sampling.", sampling if isinstance(sampling, dict) else {}, _field_names(Sampling)),
    ):
        for name in given:
            if name not in known:
                return _unknown_field(prefix, name, known)
    try:
        check_job(msgspec.convert(raw, Job))
    except msgspec.ValidationError as error:
        reason = str(error)
        code = "missing_field" if "missing required field" in reason else "bad_type"
        return BadJob(f"the job does not fit the contract: {reason}", code=code)
    except BadJob as error:
        return error
    except Undecodable as error:
        return BadJob(error.message, code=error.code)
    return BadJob("the record is not strict JSON", code="malformed_json")


def _unknown_field(prefix: str, name: str, known: Iterable[str]) -> BadJob:
    shown = name[:60]
    if name in LATER_OPTIONS:
        return BadJob(
            f"`{prefix}{shown}` is not supported by this version", code="unsupported_option", field=prefix + shown
        )
    nearest = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(shown, list(known), n=1, cutoff=0.5)
    hint = f"; did you mean `{prefix}{nearest[0]}`?" if nearest else ""
    if not prefix and name in _field_names(Sampling):
        hint = f"; did you mean `sampling.{name}`?"
    return BadJob(f"`{prefix}{shown}` is not a field of a job{hint}", code="unknown_field", field=prefix + shown)


def _field_names(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return struct.__struct_encode_fields__
