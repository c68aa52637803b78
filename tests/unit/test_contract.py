"""The JSON contract that foreign clients hold on to."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from arriero.schemas import contract
from arriero.schemas.codec import encode
from arriero.schemas.event import CancelRequested, Completed, Origin, Output, Started
from arriero.schemas.job import Job, Sampling, encode_job
from arriero.schemas.state import fold, queued
from arriero.schemas.token import End, Frame, Look, Token

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


def test_every_message_of_the_asyncapi_document_has_its_schema() -> None:
    document = json.loads((contract.FOLDER / "asyncapi.json").read_text())
    assert document["asyncapi"] == "3.0.0"
    for message in document["components"]["messages"].values():
        assert (contract.FOLDER / message["payload"]["$ref"]).is_file()
    for channel in document["channels"].values():
        for reference in channel["messages"].values():
            assert reference["$ref"].rpartition("/")[2] in document["components"]["messages"]
