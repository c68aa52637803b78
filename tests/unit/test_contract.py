"""The JSON contract that foreign clients hold on to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from arriero.schemas import contract, errors
from arriero.schemas.codec import encode
from arriero.schemas.event import CancelRequested, Completed, DeadRecord, Error, Origin, Output, Started
from arriero.schemas.job import Job, Sampling, encode_job
from arriero.schemas.state import fold, queued
from arriero.schemas.token import End, Frame, Look, StreamEnd, Token
from arriero.schemas.worker import WorkerInfo

DOC = Path(__file__).parents[2] / "docs" / "contract.md"
ORIGIN = Origin("arriero.jobs.default.standard", 0, 4, 1_000)


def check(name: str, value: bytes) -> None:
    schema = json.loads((contract.FOLDER / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(value))


def test_the_files_are_what_the_code_says() -> None:
    assert contract.differing() == []


@pytest.mark.parametrize("name", contract.SCHEMAS)
def test_every_file_is_a_schema(name: str) -> None:
    schema = json.loads((contract.FOLDER / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "job",
    [
        Job(id="a", prompt="hello"),
        Job(id="a", prompt="hello", sampling=Sampling(temperature=0, seed=7), stop=["\n"], priority="batch", attempt=2),
    ],
)
def test_jobs_as_the_client_writes_them_fit(job: Job) -> None:
    check("job", encode_job(job))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x"},
        {"id": "{a}", "prompt": "x"},
        {"id": "a", "prompt": 7},
        {"id": "a", "prompt": "x", "temperature": 1},
        {"id": "a", "messages": [{"role": "wizard", "content": "x"}]},
    ],
)
def test_jobs_that_no_door_lets_in_do_not_fit(fields: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check("job", json.dumps(fields).encode())


def test_events_states_and_messages_fit() -> None:
    owner: dict[str, Any] = {"id": "a", "time_ms": 2_000, "attempt": 1, "worker": "w", "fence": 9}
    owner |= {"root": str(ORIGIN), "origin": ORIGIN}
    output = Output([Token(5, "a"), Token(6, "")], "é", "1.9@0")
    state = queued(Job(id="a", prompt="x"), ORIGIN, "standard")
    for offset, event in enumerate(
        [Started(**owner), CancelRequested(id="a", time_ms=1), Completed(**owner, output=output, finish_reason="stop")]
    ):
        check("event", encode(event))
        state = fold(state, event, 0, offset)
    check("state", encode(state))
    for message in (Frame("r", "1.9", 0, ["5|a"]), End("r", "1.9@0", 2, "{}"), Look()):
        check("message", encode(message))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("end", StreamEnd("completed", 2, "é", "stop")),
        ("end", StreamEnd("failed", code="engine_error", error="it broke")),
        ("worker", WorkerInfo(worker="w", pool="default", models=["m"], slots=4, n_ctx_sequence=512)),
        (
            "dead",
            DeadRecord(reason="undecodable", error=Error("bad_id", "no id"), origin=ORIGIN, time_ms=1, raw=b"\xff"),
        ),
        ("dead", DeadRecord(reason="unknown_version", error=Error("unknown_version", "v9"), origin=ORIGIN, time_ms=1)),
    ],
)
def test_ends_workers_and_dead_records_fit(name: str, value: Any) -> None:
    check(name, encode(value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("event", {"type": "Celebrated", "id": "a", "time_ms": 1}),
        ("event", {"type": "CancelRequested", "id": "a"}),
        ("event", {"type": "Rejected", "id": "a", "time_ms": 1, "error": "too long"}),
        ("state", {"id": 5}),
        ("message", {"type": "frame", "root": "r", "epoch": "1.9", "first": 0, "tokens": [[5, "a"]]}),
        ("message", {"type": "glance"}),
        ("end", {"status": "completed", "finish_reason": "tired"}),
        ("worker", {"worker": "w", "pool": "default", "models": "m", "slots": 4, "n_ctx_sequence": 512}),
        ("dead", {"reason": "undecodable", "time_ms": 1}),
    ],
)
def test_what_nobody_writes_does_not_fit(name: str, value: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(name, json.dumps(value).encode())


def test_the_document_names_every_field_of_a_job() -> None:
    text = DOC.read_text()
    for struct in (Job, Sampling):
        for field in msgspec.structs.fields(struct):
            assert f"`{field.encode_name}`" in text, field.encode_name


def test_the_document_names_the_codes_of_a_refused_job() -> None:
    promised = re.search(r"Codes:\s+(.*?)\.\n", errors.BadJob.__doc__ or "", re.S)
    assert promised is not None
    table = DOC.read_text().partition("## What is refused")[2]
    assert set(re.split(r",\s+", promised[1])) <= set(re.findall(r"`([a-z0-9_]+)`", table))


def test_every_message_of_the_asyncapi_document_has_its_schema() -> None:
    document = json.loads((contract.FOLDER / "asyncapi.json").read_text())
    assert document["asyncapi"] == "3.0.0"
    for message in document["components"]["messages"].values():
        assert (contract.FOLDER / message["payload"]["$ref"]).is_file()
    for channel in document["channels"].values():
        for reference in channel["messages"].values():
            assert reference["$ref"].rpartition("/")[2] in document["components"]["messages"]
