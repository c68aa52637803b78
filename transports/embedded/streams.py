"""The bus's calls on SQLite: what `redis/bus.lua` does, in the same order. Each runs inside one transaction.

A job is named by its channel, so that namespaces share a file without meeting. Rows past their life count as gone
and are swept now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import apsw
import msgspec

from arriero.schemas.codec import encode
from arriero.schemas.token import End, Frame, Look, Message
from arriero.transports import lineage as lineages
from arriero.transports.bus import (
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
from arriero.transports.lineage import Segment

STREAM_LIFE_MS: Final = 900_000
"""How long a stream outlives its last append or its end."""
FRAME_BYTES: Final = 65_536
"""A larger frame goes out as `look`: readers fetch it once instead of all at once."""
MESSAGE_LIFE_MS: Final = 60_000
"""Readers take a message within milliseconds; one that was stopped for longer reads the stream instead."""

SCHEMA: Final = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, position INTEGER NOT NULL DEFAULT -1, cancelled INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0, terminal TEXT NOT NULL DEFAULT '', state BLOB, expires INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX jobs_by_expiry ON jobs (expires);
CREATE TABLE heads (
    job TEXT PRIMARY KEY, root TEXT NOT NULL, attempt INTEGER NOT NULL, fence INTEGER NOT NULL,
    lineage TEXT NOT NULL, digests TEXT NOT NULL, finished INTEGER NOT NULL DEFAULT 0,
    seal TEXT NOT NULL DEFAULT '', count INTEGER NOT NULL DEFAULT 0, ending TEXT NOT NULL DEFAULT '',
    expires INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE tokens (job TEXT NOT NULL, at INTEGER NOT NULL, token TEXT NOT NULL, PRIMARY KEY (job, at)) WITHOUT ROWID;
CREATE TABLE messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, message BLOB NOT NULL, expires INTEGER NOT NULL
);
CREATE TABLE workers (
    namespace TEXT NOT NULL, pool TEXT NOT NULL, worker TEXT NOT NULL, info BLOB NOT NULL, expires INTEGER NOT NULL,
    PRIMARY KEY (namespace, pool, worker)
) WITHOUT ROWID;
CREATE TABLE positions (namespace TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""

_ROWS: Final = """
SELECT asked.value, jobs.cancelled, jobs.crashes, jobs.terminal, (SELECT max(at) FROM tokens WHERE job = asked.value),
    heads.root, attempt, fence, lineage, digests, finished, seal, count, ending
FROM json_each(?1) AS asked
LEFT JOIN jobs ON jobs.job = asked.value AND jobs.expires > ?2
LEFT JOIN heads ON heads.job = asked.value AND heads.expires > ?2
"""

R = TypeVar("R", OpenRequest, AppendRequest, FinishRequest)


class _Job(msgspec.Struct, frozen=True):
    cancelled: bool = False
    crashes: int = 0
    terminal: str = ""


class _Head(msgspec.Struct, frozen=True):
    root: str
    attempt: int
    fence: int
    lineage: str
    digests: str
    finished: int
    seal: str
    count: int
    ending: str

    @property
    def owner(self) -> tuple[int, int]:
        return self.attempt, self.fence


class _Rows(msgspec.Struct, frozen=True):
    """A job, its stream's head, and how many tokens are there."""

    known: _Job
    head: _Head | None
    count: int


def _rows_of(
    cancelled: int | None, crashes: int, terminal: str, newest: int | None, root: str | None, *columns: Any
) -> _Rows:
    return _Rows(
        _Job() if cancelled is None else _Job(bool(cancelled), crashes, terminal),
        None if root is None else _Head(root, *columns),
        0 if newest is None else newest + 1,
    )


class Streams:
    """The calls, at one moment, on one connection."""

    def __init__(self, connection: apsw.Connection, now_ms: int) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._messages: list[str | bytes | int] = []

    # --- rows ----------------------------------------------------------------------------------------------

    def _rows(self, job: str) -> _Rows:
        """What is known of a job, by one statement: each gives the interpreter's lock away and must get it back."""
        return self._select([job])[job]

    def _select(self, jobs: Sequence[str]) -> dict[str, _Rows]:
        found: Any = self._connection.execute(_ROWS, (json.dumps(jobs), self._now_ms))
        return {job: _rows_of(*columns) for job, *columns in found}

    def _with_rows(self, requests: Sequence[tuple[str, R]]) -> Iterator[tuple[tuple[str, R], _Rows]]:
        """A call's requests, what they are about read at once; of a job that comes again, as it is by then."""
        found = self._select([job for job, _ in requests])
        for request in requests:
            job, _ = request
            yield request, found.pop(job) if job in found else self._rows(job)

    def _put_head(self, job: str, **columns: str | int) -> None:
        columns["expires"] = self._now_ms + STREAM_LIFE_MS
        names = ", ".join(f"{name} = ?" for name in columns)
        self._connection.execute(f"UPDATE heads SET {names} WHERE job = ?", (*columns.values(), job))  # noqa: S608 - names are ours

    def _new_head(self, job: str, root: str, attempt: int, fence: int, lineage: str, digests: str) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO heads (job, root, attempt, fence, lineage, digests, expires) "
            "VALUES (?,?,?,?,?,?,?)",
            (job, root, attempt, fence, lineage, digests, self._now_ms + STREAM_LIFE_MS),
        )

    def _tokens(self, job: str, start: int) -> list[str]:
        rows: Any = self._connection.execute(
            "SELECT token FROM tokens WHERE job = ? AND at >= ? ORDER BY at", (job, start)
        )
        return [row[0] for row in rows]

    def _push(self, job: str, start: int, tokens: Sequence[str]) -> None:
        if not tokens:
            return
        self._connection.executemany(
            "INSERT INTO tokens (job, at, token) VALUES (?,?,?)",
            ((job, at, token) for at, token in enumerate(tokens, start)),
        )

    def _cut(self, job: str, count: int) -> None:
        self._connection.execute("DELETE FROM tokens WHERE job = ? AND at >= ?", (job, count))

    def _publish(self, job: str, message: Message) -> None:
        self._messages += (job, encode(message), self._now_ms + MESSAGE_LIFE_MS)

    def _send(self) -> None:
        """Put the call's messages into the file, in their order."""
        if self._messages:
            rows = ",".join(["(?,?,?)"] * (len(self._messages) // 3))
            self._connection.execute(f"INSERT INTO messages (job, message, expires) VALUES {rows}", self._messages)  # noqa: S608
            self._messages.clear()

    # --- the calls -----------------------------------------------------------------------------------------

    def open(self, requests: Sequence[tuple[str, OpenRequest]]) -> list[Opened]:
        answers = [self._open(job, r, rows) for (job, r), rows in self._with_rows(requests)]
        self._send()
        return answers

    def _open(self, job: str, r: OpenRequest, rows: _Rows) -> Opened:
        known, head, count = rows.known, rows.head, rows.count

        def say(code: str, lineage: str = "", seal: str = "", digests: str = "", *, tokens: bool = False) -> Opened:
            return Opened(
                code=code,  # type: ignore[arg-type]
                cancelled=known.cancelled,
                crashes=known.crashes,
                lineage=lineage,
                seal=seal,
                digests=digests,
                tokens=self._tokens(job, 0) if tokens else [],
            )

        if known.terminal or (head is not None and head.finished):
            return say("finished")
        if head is None:
            if r.mode == "take":
                return say("none")
            if count:
                self._cut(job, 0)
            self._new_head(job, r.root, r.attempt, r.fence, r.lineage, r.digests)
            self._push(job, 0, r.tokens)
            self._publish(job, Look())
            return say("fresh", r.lineage, "", r.digests)
        if head.root != r.root:
            return say("foreign")
        if (r.attempt, r.fence) < head.owner:
            return say("fenced")
        if r.mode == "take" and count < r.least:
            return say("none")
        self._put_head(job, attempt=r.attempt, fence=r.fence)
        if r.mode == "restart":
            fresh = lineages.dump([Segment(r.epoch, 0)])
            self._cut(job, 0)
            self._put_head(job, lineage=fresh, digests=r.digests, seal="")
            self._publish(job, Look())
            return say("have", fresh, "", r.digests)
        shared = lineages.common(head.lineage, count, r.lineage, len(r.tokens))
        if r.mode == "mine":
            if head.lineage == r.lineage and count == len(r.tokens):
                return say("have", r.lineage, head.seal, head.digests)
            self._cut(job, shared)
            self._push(job, shared, r.tokens[shared:])
            self._put_head(job, lineage=r.lineage, seal="")
            self._publish(job, Look())
            return say("have", r.lineage, "", head.digests)
        if r.mode == "start" and count < len(r.tokens) and shared == count:
            self._push(job, count, r.tokens[count:])
            self._put_head(job, lineage=r.lineage, seal="")
            self._publish(job, Look())
            return say("have", r.lineage, "", head.digests, tokens=True)
        segments = [segment for segment in lineages.parse(head.lineage) if segment.start <= count]
        held, seal = head.lineage, head.seal
        if not segments or segments[-1].epoch != r.epoch:
            held = lineages.dump([*segments, Segment(r.epoch, count)])
            if seal and _seal_count(seal) != count:
                seal = ""
            self._put_head(job, lineage=held, seal=seal)
            self._publish(job, Look())
        return say("have", held, seal, head.digests, tokens=True)

    def append(self, requests: Sequence[tuple[str, AppendRequest]]) -> list[Appended]:
        answers = [self._append(job, r, rows) for (job, r), rows in self._with_rows(requests)]
        self._send()
        return answers

    def _append(self, job: str, r: AppendRequest, rows: _Rows) -> Appended:
        known, head, count = rows.known, rows.head, rows.count

        def say(code: str, following: int = 0) -> Appended:
            return Appended(code=code, cancelled=known.cancelled, next=following)  # type: ignore[arg-type]

        if head is None:
            return say("finished" if known.terminal else "gone")
        if head.finished:
            return say("finished", count)
        if head.root != r.root:
            return say("foreign")
        owner = (r.attempt, r.fence)
        if owner < head.owner:
            return say("fenced")
        if owner > head.owner or lineages.last_epoch(head.lineage) != r.epoch:
            return say("reopen")
        seal = head.seal
        if r.first == count:
            if r.tokens and not (seal and _seal_count(seal) <= count):
                self._push(job, count, r.tokens)
                count += len(r.tokens)
                if sum(len(token.encode()) for token in r.tokens) > FRAME_BYTES:
                    self._publish(job, Look())
                else:
                    self._publish(job, Frame(r.root, r.epoch, r.first, list(r.tokens)))
            if r.seal and _seal_count(r.seal) == count:
                seal = r.seal
        self._put_head(job, seal=seal)
        return say("ok", count)

    def finish(self, requests: Sequence[tuple[str, FinishRequest]]) -> list[Finished]:
        answers = [self._finish(job, r, rows) for (job, r), rows in self._with_rows(requests)]
        self._send()
        return answers

    def _finish(self, job: str, r: FinishRequest, rows: _Rows) -> Finished:
        head, held = rows.head, rows.count
        if head is not None and head.finished:
            return Finished("done")
        shared = lineages.common(head.lineage, held, r.lineage, r.count) if head and head.root == r.root else 0
        if r.base > shared:
            return Finished("need", shared)
        tokens = r.tokens[shared - r.base :]
        if shared < held:
            self._cut(job, shared)
        self._push(job, shared, tokens)
        self._new_head(job, r.root, 0, 0, r.lineage, "")
        self._put_head(job, finished=1, count=r.count, ending=r.end)
        if tokens or head is None or shared < held:
            self._publish(job, Look())
        else:
            self._publish(job, End(r.root, r.lineage, r.count, r.end))
        return Finished("ok", shared)

    def read(self, job: str, position: Position) -> View:
        p = position
        rows = self._rows(job)
        terminal, head = rows.known.terminal, rows.head
        if head is None:
            return View(status="none", start=p.count, terminal=terminal)
        if p.count and not head.finished and p.root == head.root and p.epoch:
            segments = lineages.parse(head.lineage)
            known = any(segment.epoch == p.epoch for segment in segments)
            if not known and lineages.order(p.epoch) > lineages.order(segments[-1].epoch):
                return View(status="stale", start=p.count, terminal=terminal)
        start = lineages.kept(head.lineage, head.root, p.root, p.epoch, p.count)
        if head.finished:
            start = min(start, head.count)
        return View(
            status="fin" if head.finished else "open",
            root=head.root,
            lineage=head.lineage,
            start=start,
            end=head.ending,
            terminal=terminal,
            tokens=self._tokens(job, start),
        )

    # --- jobs ----------------------------------------------------------------------------------------------

    def put_state(self, job: str, write: StateWrite, life_ms: int) -> None:
        w = write
        self._make_job(job, life_ms)
        self._connection.execute(
            "UPDATE jobs SET position = ?, state = ?, crashes = ?, cancelled = max(cancelled, ?), "
            "terminal = CASE ? WHEN '' THEN terminal ELSE ? END WHERE job = ? AND position < ?",
            (w.offset, w.state, w.crashes, int(w.cancelled), w.terminal, w.terminal, job, w.offset + w.again),
        )

    def note_queued(self, job: str, state: bytes, life_ms: int) -> None:
        self._make_job(job, life_ms)
        self._connection.execute("UPDATE jobs SET state = ? WHERE job = ? AND state IS NULL", (state, job))

    def cancel(self, job: str, life_ms: int) -> None:
        self._make_job(job, life_ms)
        self._connection.execute("UPDATE jobs SET cancelled = 1 WHERE job = ?", (job,))

    def _make_job(self, job: str, life_ms: int) -> None:
        """The job's row, and its life renewed; one past its life starts anew."""
        self._connection.execute("DELETE FROM jobs WHERE job = ? AND expires <= ?", (job, self._now_ms))
        self._connection.execute(
            "INSERT INTO jobs (job, expires) VALUES (?,?) ON CONFLICT (job) DO UPDATE SET expires = excluded.expires",
            (job, self._now_ms + life_ms),
        )

    def state(self, job: str) -> bytes | None:
        row: Any = self._connection.execute(
            "SELECT state FROM jobs WHERE job = ? AND expires > ?", (job, self._now_ms)
        ).fetchone()
        return None if row is None else row[0]

    def sweep(self, most: int) -> bool:
        """Delete what is past its life, at most so many rows of a kind; whether there may be more."""
        tokens_left = most
        ended: list[Any] = self._connection.execute(
            "SELECT job FROM heads WHERE expires <= ? LIMIT ?", (self._now_ms, most)
        ).fetchall()
        for (job,) in ended:
            self._connection.execute(
                "DELETE FROM tokens WHERE job = ? AND at IN (SELECT at FROM tokens WHERE job = ? LIMIT ?)",
                (job, job, tokens_left),
            )
            tokens_left -= self._connection.changes()
            if tokens_left == 0:
                break  # there may be more of them: the head stays until they are gone
            self._connection.execute("DELETE FROM heads WHERE job = ?", (job,))
        full = tokens_left == 0 or len(ended) == most
        for table, oldest in (
            ("jobs", "job IN (SELECT job FROM jobs WHERE expires <= ? LIMIT ?)"),
            # Messages are in the order of their expiry: only the oldest need to be looked at.
            ("messages", "expires <= ? AND number IN (SELECT number FROM messages ORDER BY number LIMIT ?)"),
        ):
            self._connection.execute(f"DELETE FROM {table} WHERE {oldest}", (self._now_ms, most))  # noqa: S608
            full = full or self._connection.changes() == most
        self._connection.execute("DELETE FROM workers WHERE expires <= ?", (self._now_ms,))
        return full


def _seal_count(seal: str) -> int:
    return int(seal.partition("|")[0])
