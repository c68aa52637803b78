"""The JSON contract, for clients in any language: JSON Schema files and an AsyncAPI document in contract/.

    python -m arriero.schemas.contract            write them anew
    python -m arriero.schemas.contract --check    exit with 1 when they differ from the code

They say what a record looks like. What a schema cannot say (finite numbers, one of `prompt` and `messages`, nothing
over 1 MiB) is in docs/contract.md and in `job.check_job`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from arriero.schemas.event import DeadRecord, Event
from arriero.schemas.job import CLASSES, ID_PATTERN, Job
from arriero.schemas.names import Names
from arriero.schemas.state import JobState
from arriero.schemas.token import Message, StreamEnd
from arriero.schemas.worker import WorkerInfo

FOLDER: Final = Path(__file__).parent / "contract"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: Final[dict[str, tuple[Any, str]]] = {
    "job": (Job, "A record of a job topic."),
    "event": (Event, "A record of the events topic."),
    "state": (JobState, "A job's state on the token bus, the fold of its events."),
    "message": (Message, "What is published on a job's channel."),
    "end": (StreamEnd, "How a stream ended: the `end` of an end message and of the stream's head."),
    "worker": (WorkerInfo, "What a live worker says of itself."),
    "dead": (DeadRecord, "A record of the dead-letter topic."),
}
ADDED: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "Job": {"id": {"pattern": f"^{ID_PATTERN.pattern.removesuffix(chr(92) + 'Z')}$"}},
}
"""Keywords for what the code checks beyond types, by struct and field."""


def documents() -> dict[str, str]:
    """Each file's text, by name."""
    files = {f"{name}.schema.json": _schema(name) for name in SCHEMAS}
    files["asyncapi.json"] = _asyncapi()
    return {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in files.items()}


def differing() -> list[str]:
    """Files that are not what the code says."""
    wanted = documents()
    there = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in differing():
        (FOLDER / name).unlink(missing_ok=True)
    for name, text in documents().items():
        (FOLDER / name).write_text(text)


def _schema(name: str) -> dict[str, Any]:
    kind, description = SCHEMAS[name]
    (schema,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for struct, fields in ADDED.items():
        for field, keywords in fields.items():
            if struct in definitions:
                definitions[struct]["properties"][field] |= keywords
    return {
        "$schema": DIALECT,
        "$id": f"arriero/{name}.schema.json",
        "description": description,
        **schema,
        "$defs": dict(sorted(definitions.items())),
    }


def _asyncapi() -> dict[str, Any]:
    names = Names()
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}

    def add(channel: str, address: str, messages: list[str], server: str, action: str, summary: str) -> None:
        channels[channel] = {
            "address": address,
            "servers": [{"$ref": f"#/servers/{server}"}],
            "messages": {message: {"$ref": f"#/components/messages/{message}"} for message in messages},
        }
        operations[f"{action}-{channel}"] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
            "summary": summary,
        }

    for priority in CLASSES:
        address = names.jobs("default", priority)
        add(f"jobs-{priority}", address, ["job"], "kafka", "send", f"Publish a job of the class {priority}.")
    add("events", names.events, ["event"], "kafka", "receive", "Follow what happens to jobs.")
    add("dead", names.dead, ["dead"], "kafka", "receive", "Read what nobody could run.")
    add("stream", names.channel("{id}"), ["message"], "redis", "receive", "Follow a job's tokens.")
    channels["stream"]["parameters"] = {"id": {"description": "The job's id. It stands in braces in the address."}}
    channels["stream"]["address"] = f"{names.namespace}:{{{{id}}}}"
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Arriero",
            "version": "1",
            "description": "Jobs in, tokens and events out. Topics and keys carry the namespace `arriero` and the pool "
            "`default` unless set otherwise. A job's record key is its affinity key, else its id; the partition is "
            "murmur2 of it.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "kafka": {"host": "localhost:9092", "protocol": "kafka"},
            "redis": {"host": "localhost:6379", "protocol": "redis"},
        },
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {
                name: {"name": name, "summary": description, "payload": {"$ref": f"./{name}.schema.json"}}
                for name, (_, description) in SCHEMAS.items()
                if name in ("job", "event", "dead", "message")
            }
        },
    }


def main() -> int:
    if "--check" in sys.argv[1:]:
        names = differing()
        if names:
            sys.stderr.write(f"the contract differs from the code: {', '.join(names)}; run: make contract\n")
        return 1 if names else 0
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
