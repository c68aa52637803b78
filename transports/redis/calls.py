"""Each call of the bus as a function call on the server, and its answer read back. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from arriero.schemas.names import Names
from arriero.transports.bus import (
    APPEND_MAX_TOKENS,
    Appended,
    AppendRequest,
    Finished,
    FinishRequest,
    Opened,
    OpenRequest,
    Position,
    StateWrite,
    View,
)

STREAM_LIFE_S: Final = 900.0
"""How long a stream outlives its last append or its end: time for a reader to come (back) and read it."""

_SOURCE: Final = (Path(__file__).parent / "bus.lua").read_text()
LIBRARY: Final = "arriero_" + hashlib.sha256(_SOURCE.encode()).hexdigest()[:8]
"""Releases with other functions live side by side on one server."""
LIBRARY_CODE: Final = f"#!lua name={LIBRARY}\n" + _SOURCE.replace("@_", LIBRARY + "_")


class Call(NamedTuple):
    """A function call: FCALL function, number of keys, keys and arguments."""

    function: str
    keys: Sequence[str]
    arguments: Sequence[str | bytes | int]


class Calls:
    """Builds the calls of one namespace."""

    def __init__(self, names: Names, retention_s: float) -> None:
        self._names = names
        self._retention_ms = int(retention_s * 1000)

    def _stream(self, function: str, job_id: str, *arguments: str | int) -> Call:
        names = self._names
        keys = (names.job_key(job_id), names.head_key(job_id), names.tokens_key(job_id))
        return Call(function, keys, (names.channel(job_id), int(STREAM_LIFE_S * 1000), *arguments))

    def _job(self, function: str, job_id: str, *arguments: str | bytes | int) -> Call:
        return Call(function, (self._names.job_key(job_id),), (self._retention_ms, *arguments))

    def open(self, request: OpenRequest) -> Call:
        r = request
        return self._stream(
            "open",
            r.job_id,
            *(r.root, r.attempt, r.fence, r.epoch, r.mode, r.least, r.lineage, r.digests),
            *r.tokens,
        )

    def append(self, request: AppendRequest) -> Call:
        r = request
        assert len(r.tokens) <= APPEND_MAX_TOKENS, "the caller splits"
        return self._stream("append", r.job_id, r.root, r.attempt, r.fence, r.epoch, r.first, r.seal, *r.tokens)

    def finish(self, request: FinishRequest) -> Call:
        r = request
        return self._stream("finish", r.job_id, r.root, r.lineage, r.count, r.end, r.base, *r.tokens)

    def read(self, job_id: str, position: Position) -> Call:
        return self._stream("read", job_id, position.root, position.epoch, position.count)

    def put_state(self, write: StateWrite) -> Call:
        w = write
        said = (w.offset, w.state, w.root, "1" if w.cancelled else "", w.crashes, w.terminal, int(w.again))
        return self._job("put_state", w.job_id, *said)

    def note_queued(self, job_id: str, state: bytes) -> Call:
        return self._job("note_queued", job_id, state)

    def cancel(self, job_id: str) -> Call:
        return self._job("cancel", job_id)


def opened(answer: Any) -> Opened:
    code, cancelled, crashes, lineage, seal, digests, *tokens = answer
    return Opened(
        code=code,
        cancelled=cancelled == "1",
        crashes=int(crashes),
        lineage=lineage,
        seal=seal,
        digests=digests,
        tokens=tokens,
    )


def appended(answer: Any) -> Appended:
    code, cancelled, following = answer
    return Appended(code=code, cancelled=cancelled == "1", next=int(following))


def finished(answer: Any) -> Finished:
    code, base = answer
    return Finished(code, int(base))


def view(answer: Any) -> View:
    status, root, lineage, start, end, terminal, *tokens = answer
    return View(status=status, root=root, lineage=lineage, start=int(start), end=end, terminal=terminal, tokens=tokens)
