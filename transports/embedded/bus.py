"""The token bus in one SQLite file of a data folder: disposable, so nothing in it waits for the disk.

Messages are rows under one running number: whoever follows anything hears the bell, reads what has come since in one
query and hands it out to its followers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw
import msgspec
import structlog

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.codec import decode_message
from arriero.schemas.errors import BusUnavailable
from arriero.schemas.names import Names
from arriero.schemas.token import Look
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
from arriero.transports.embedded.db import Database
from arriero.transports.embedded.streams import SCHEMA, R, Streams
from arriero.transports.inbox import Inbox
from arriero.transports.log import KEEP_RESULTS_S

LAYOUT: Final = 2
BELL: Final = "bus"
SWEEP_EVERY_S: Final = 20.0
SWEEP_ROWS: Final = 5_000
"""Rows of a kind that one sweep deletes: others wait for it."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


class EmbeddedBus:
    """See the seam's `TokenBus`."""

    def __init__(self, folder: Path, *, names: Names, clock: Clock, retention_s: float = KEEP_RESULTS_S) -> None:
        self._names = names
        self._clock = clock
        self._retention_ms = int(retention_s * 1000)
        self._db = Database(folder / "bus.db", schema=SCHEMA, version=LAYOUT, durable=False, unavailable=BusUnavailable)
        self._followers: dict[str, set[Inbox]] = {}
        self._hearing: asyncio.Task[None] | None = None
        self._heard: asyncio.Future[str | None] | None = None
        """Done once messages are handed out, or with the reason why they are not."""

    async def __aenter__(self) -> EmbeddedBus:
        await self._db.__aenter__()
        self._sweeping = asyncio.create_task(self._sweep(), name="bus sweep")
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [task for task in (self._sweeping, self._hearing) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks)
        finally:
            self._lose("it is closed")
            await self._db.__aexit__(*exc)

    async def check(self) -> None:
        self._db.read(lambda connection: connection.execute("SELECT 1").fetchall())

    # --- the owner's ---------------------------------------------------------------------------------------

    async def open(self, requests: Sequence[OpenRequest]) -> list[Opened]:
        return await self._write(lambda streams: streams.open(self._named(requests)), ring=True)

    async def append(self, requests: Sequence[AppendRequest]) -> list[Appended]:
        told = any(request.tokens for request in requests)
        return await self._write(lambda streams: streams.append(self._named(requests)), ring=told)

    # --- the reader's --------------------------------------------------------------------------------------

    async def read(self, job_id: str, position: Position) -> View:
        return self._read(lambda streams: streams.read(self._job(job_id), position))

    @contextlib.asynccontextmanager
    async def follow(self, job_id: str) -> AsyncIterator[Inbox]:
        subscription = Inbox()
        job = self._job(job_id)
        self._followers.setdefault(job, set()).add(subscription)
        try:
            await self._listen()
            yield subscription
        finally:
            followers = self._followers[job]
            followers.discard(subscription)
            if not followers:
                del self._followers[job]

    async def cancel(self, job_id: str) -> None:
        await self._write(lambda streams: streams.cancel(self._job(job_id), self._retention_ms))

    async def states(self, job_ids: Sequence[str]) -> list[bytes | None]:
        return self._read(lambda streams: [streams.state(self._job(job_id)) for job_id in job_ids])

    # --- the projector's -----------------------------------------------------------------------------------

    async def finish(self, requests: Sequence[FinishRequest]) -> list[Finished]:
        return await self._write(lambda streams: streams.finish(self._named(requests)), ring=True)

    async def note_queued(self, states: Sequence[tuple[str, bytes]]) -> None:
        def note(streams: Streams) -> None:
            for job_id, state in states:
                streams.note_queued(self._job(job_id), state, self._retention_ms)

        await self._write(note)

    async def put_states(self, writes: Sequence[StateWrite]) -> None:
        def put(streams: Streams) -> None:
            for write in writes:
                streams.put_state(self._job(write.job_id), write, self._retention_ms)

        await self._write(put)

    async def positions(self) -> bytes | None:
        select = "SELECT value FROM positions WHERE namespace = ?"
        row: Any = self._db.read(lambda connection: connection.execute(select, (self._names.namespace,)).fetchone())
        return None if row is None else row[0]

    async def put_positions(self, positions: bytes, *, first: bool) -> bool:
        def put(connection: apsw.Connection) -> bool:
            namespace = self._names.namespace
            if first:
                connection.execute("INSERT OR REPLACE INTO positions VALUES (?,?)", (namespace, positions))
                return True
            connection.execute("UPDATE positions SET value = ? WHERE namespace = ?", (positions, namespace))
            return connection.changes() == 1

        return await self._db.write(put)

    async def forget(self) -> None:
        delete = "DELETE FROM positions WHERE namespace = ?"
        await self._db.write(lambda connection: connection.execute(delete, (self._names.namespace,)).fetchall())

    # --- presence ------------------------------------------------------------------------------------------

    async def announce(self, pool: str, worker: str, info: bytes, ttl_s: float) -> None:
        row = (self._names.namespace, pool, worker, info, now_ms(self._clock) + int(ttl_s * 1000))
        insert = "INSERT OR REPLACE INTO workers VALUES (?,?,?,?,?)"
        await self._db.write(lambda connection: connection.execute(insert, row).fetchall())

    async def retire(self, pool: str, worker: str) -> None:
        delete = "DELETE FROM workers WHERE namespace = ? AND pool = ? AND worker = ?"
        row = (self._names.namespace, pool, worker)
        await self._db.write(lambda connection: connection.execute(delete, row).fetchall())

    async def pools(self) -> list[str]:
        select = "SELECT DISTINCT pool FROM workers WHERE namespace = ? ORDER BY pool"
        rows: Any = self._db.read(lambda connection: connection.execute(select, (self._names.namespace,)).fetchall())
        return [pool for (pool,) in rows]

    async def workers(self, pool: str) -> dict[str, bytes]:
        select = "SELECT worker, info FROM workers WHERE namespace = ? AND pool = ? AND expires > ? ORDER BY worker"
        row = (self._names.namespace, pool, now_ms(self._clock))
        rows: Any = self._db.read(lambda connection: connection.execute(select, row).fetchall())
        return dict(rows)

    # --- inside --------------------------------------------------------------------------------------------

    def _named(self, requests: Sequence[R]) -> list[tuple[str, R]]:
        return [(self._job(request.job_id), request) for request in requests]

    def _job(self, job_id: str) -> str:
        return self._names.channel(job_id)

    async def _write(self, work: Callable[[Streams], T], *, ring: bool = False) -> T:
        return await self._db.write(
            lambda connection: work(Streams(connection, now_ms(self._clock))), rings=(BELL,) if ring else ()
        )

    def _read(self, work: Callable[[Streams], T]) -> T:
        return self._db.read(lambda connection: _snapshot(connection, work, now_ms(self._clock)))

    async def _listen(self) -> None:
        """Returns once messages are handed out from now on. Raises BusUnavailable."""
        if self._heard is None or self._hearing is None or self._hearing.done():
            self._heard = asyncio.get_running_loop().create_future()
            self._hearing = asyncio.create_task(self._hear(self._heard), name="bus bell")
        reason = await asyncio.shield(self._heard)
        if reason is not None:
            raise BusUnavailable(f"nothing can be heard of the token bus: {reason}")

    async def _hear(self, heard: asyncio.Future[str | None]) -> None:
        """Hand new messages out to their followers, for as long as the bus is open and its file can be read."""
        reason = "it is closed"
        try:
            with self._db.bells.listen(BELL) as bell:
                seen = self._db.read(_newest)
                heard.set_result(None)
                while True:
                    count = bell.count
                    seen = self._hand_out(seen)
                    await bell.wait(count)
        except (BusUnavailable, OSError) as error:
            reason = str(error)
            log.warning("bus_connection_lost", error=reason)
        finally:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Nothing more will be heard, and something may have been missed: each follower starts over."""
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(reason)
        for followers in self._followers.values():
            for follower in followers:
                follower.lose()

    def _hand_out(self, seen: int) -> int:
        rows: Any = self._db.read(
            lambda connection: connection.execute(
                "SELECT number, job, message FROM messages WHERE number > ? ORDER BY number", (seen,)
            ).fetchall()
        )
        for number, job, message in rows:
            seen = number
            followers = self._followers.get(job)
            if followers:
                try:
                    decoded = decode_message(message)
                except msgspec.MsgspecError:
                    decoded = Look()
                for follower in followers:
                    follower.put(decoded)
        return seen

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                while await self._write(lambda streams: streams.sweep(SWEEP_ROWS)):
                    pass
            except BusUnavailable as error:
                log.warning("bus_sweep_failed", error=error.message)


def _newest(connection: apsw.Connection) -> int:
    row: Any = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'messages'").fetchone()
    return 0 if row is None else row[0]


def _snapshot(connection: apsw.Connection, work: Callable[[Streams], T], moment_ms: int) -> T:
    """Several selects of one call see one state of the file."""
    connection.execute("BEGIN")
    try:
        return work(Streams(connection, moment_ms))
    finally:
        connection.execute("COMMIT")
