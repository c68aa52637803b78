"""A SQLite file that several processes write."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import apsw
import pytest

from arriero.schemas.errors import BusUnavailable, Fenced, LogUnavailable, SetupError
from arriero.transports.embedded import db as db_module
from arriero.transports.embedded import shared
from arriero.transports.embedded.db import Database
from arriero.transports.embedded.writer import RESERVE_BYTES

SCHEMA = "CREATE TABLE things (number INTEGER PRIMARY KEY, body BLOB) STRICT"


def database(folder: Path, *, durable: bool = True, version: int = 1) -> Database:
    return Database(folder / "log.db", schema=SCHEMA, version=version, durable=durable, unavailable=LogUnavailable)


def put(connection: apsw.Connection, number: int = 1, size: int = 1) -> None:
    connection.execute("INSERT INTO things VALUES (?, zeroblob(?))", (number, size))


def numbers(connection: apsw.Connection) -> list[int]:
    return [int(number) for (number,) in connection.execute("SELECT number FROM things ORDER BY number")]


async def test_a_write_answers_what_its_work_returned(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        assert await db.write(numbers) == []
        await db.write(put)
        assert db.read(numbers) == [1]


async def test_works_that_are_pending_share_a_transaction(tmp_path: Path) -> None:
    async with database(tmp_path) as db, database(tmp_path) as other:
        seen: set[int] = set()
        before = other.read(lambda connection: connection.pragma("data_version"))
        waiting = [db.submit(partial(put, number=number)) for number in range(200)]
        while not all(each.done() for each in waiting):
            seen.add(other.read(lambda connection: connection.pragma("data_version")))
            await asyncio.sleep(0)
        seen.add(other.read(lambda connection: connection.pragma("data_version")))
        assert len(other.read(numbers)) == 200
        assert len(seen - {before}) < 50


async def test_a_work_that_raises_undoes_itself_alone(tmp_path: Path) -> None:
    def fenced(connection: apsw.Connection) -> None:
        put(connection, 2)
        raise Fenced("another has it")

    async with database(tmp_path) as db:
        one, two, three = (
            db.submit(put),
            db.submit(fenced),
            db.submit(partial(put, number=3)),
        )
        await asyncio.wait({one, two, three})
        assert isinstance(two.exception(), Fenced)
        assert db.read(numbers) == [1, 3]


async def test_a_caller_that_gives_up_does_not_stop_its_work(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        writing = asyncio.ensure_future(db.write(put))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait({writing})
        await db.write(partial(put, number=2))
        assert db.read(numbers) == [1, 2]


async def test_closing_writes_what_is_pending(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        waiting = db.submit(put)
    await waiting
    async with database(tmp_path) as db:
        assert db.read(numbers) == [1]


async def test_a_closed_file_is_unavailable(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        pass
    with pytest.raises(LogUnavailable):
        await db.write(put)
    with pytest.raises(LogUnavailable):
        db.read(numbers)


# the lock

HOLDER = """
import asyncio, os, signal, sys, time
from pathlib import Path
from arriero.schemas.errors import LogUnavailable
from arriero.transports.embedded.db import Database

def stop(connection):
    connection.execute("INSERT INTO things VALUES (7, NULL)")
    print("holds", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # another thread takes the signal; this one must not have gone on when it does

async def main():
    db = Database(Path(sys.argv[1]) / "log.db", schema="", version=1, durable=True, unavailable=LogUnavailable)
    async with db:
        await db.write(stop)

asyncio.run(main())
"""


@asynccontextmanager
async def stopped_holder(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is stopped inside a transaction."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(folder), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"holds\n"
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process
    finally:
        with suppress(ProcessLookupError):  # one that was let go on has ended
            process.kill()
        await process.wait()


async def test_who_opens_behind_a_stopped_process_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database(tmp_path):
        pass
    async with stopped_holder(tmp_path) as holder:
        monkeypatch.setattr(db_module, "LOCK_WAIT_S", 0.2)
        with pytest.raises(LogUnavailable, match=rf"process {holder.pid} was stopped .*kill -CONT {holder.pid}"):
            await database(tmp_path).__aenter__()


async def test_what_waits_too_long_for_the_lock_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database(tmp_path) as db:
        await db.write(put)
    monkeypatch.setattr(db_module, "LOCK_WAIT_S", 0.5)
    async with database(tmp_path) as db, stopped_holder(tmp_path) as holder:
        with pytest.raises(LogUnavailable, match=f"process {holder.pid} was stopped"):
            await db.write(partial(put, number=2))
        assert db.read(numbers) == [1]  # readers are not held up
        monkeypatch.undo()
        holder.send_signal(signal.SIGCONT)
        await db.write(partial(put, number=3))
        assert db.read(numbers) == [1, 3, 7]


# a full disk


async def test_a_full_disk_is_said_and_outlived_on_the_same_connection(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        await db.write(put)
        pages = await db.write(lambda connection: connection.pragma("max_page_count", 20))
        assert pages == 20
        with pytest.raises(LogUnavailable, match="full: make room"):
            await db.write(partial(put, number=2, size=200_000))
        assert db.read(numbers) == [1]
        await db.write(lambda connection: connection.pragma("max_page_count", 10_000))
        await db.write(partial(put, number=2, size=200_000))
        assert db.read(numbers) == [1, 2]


async def test_the_reserve_is_given_to_what_frees_space(tmp_path: Path) -> None:
    reserve = tmp_path / "log.db.reserve"
    async with database(tmp_path) as db:
        await db.write(put)
        assert reserve.stat().st_size == RESERVE_BYTES
        await db.write(lambda connection: connection.pragma("max_page_count", 20))
        with pytest.raises(LogUnavailable):
            await db.write(partial(put, number=2, size=200_000))
        during: list[int] = []
        urgent = db.submit(lambda _: during.append(reserve.stat().st_size), urgent=True)
        other = db.submit(lambda _: during.append(reserve.stat().st_size))
        await asyncio.wait({urgent, other})
        assert during == [0, RESERVE_BYTES]


# folders and files that cannot be used


async def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SetupError, match="data folder") as caught:
            await database(folder).__aenter__()
        assert caught.value.code == "data_folder_unwritable"


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.db").write_bytes(b"these are not the pages that you are looking for" * 100)
    with pytest.raises(SetupError, match="not a database"):
        await database(tmp_path).__aenter__()


async def test_a_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    async with database(tmp_path):
        pass
    with pytest.raises(SetupError, match="another release"):
        await database(tmp_path, version=2).__aenter__()


async def test_too_old_a_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(SetupError, match="apsw"):
        await database(tmp_path).__aenter__()


async def test_a_disposable_file_is_emptied_after_a_boot_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_bus() -> Database:
        return Database(tmp_path / "bus.db", schema=SCHEMA, version=1, durable=False, unavailable=BusUnavailable)

    async with open_bus() as db:
        await db.write(put)
    async with open_bus() as db:
        assert db.read(numbers) == [1]
    monkeypatch.setattr(shared, "boot_id", lambda: "another")
    async with open_bus() as db:
        assert db.read(numbers) == []


# bells


async def test_a_bell_rings_in_another_connection_after_the_commit(tmp_path: Path) -> None:
    async with database(tmp_path) as db, database(tmp_path) as other:
        with other.bells.listen("things") as bell:
            for number in range(3):
                seen = bell.count
                await db.write(partial(put, number=number), rings=["things"])
                await asyncio.wait_for(bell.wait(seen), 5)
                assert number in other.read(numbers)


async def test_a_ring_before_the_wait_is_not_missed(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        with db.bells.listen("things", "others") as bell, db.bells.listen("others") as witness:
            seen = bell.count
            await db.write(put, rings=["others"])
            await asyncio.wait_for(witness.wait(0), 5)
            await asyncio.wait_for(bell.wait(seen), 5)


async def test_a_work_that_raised_rings_nothing(tmp_path: Path) -> None:
    def fail(_: apsw.Connection) -> None:
        raise Fenced("no")

    async with database(tmp_path) as db:
        with db.bells.listen("things") as bell, db.bells.listen("after") as after:
            seen = bell.count
            with pytest.raises(Fenced):
                await db.write(fail, rings=["things"])
            await db.write(put, rings=["after"])
            await asyncio.wait_for(after.wait(0), 5)
            assert bell.count == seen


async def test_bells_leave_nothing_behind(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        with db.bells.listen("things"), db.bells.listen("things", "others"):
            assert len([*(tmp_path / "bells").rglob("*")]) == 4
        assert [path for path in (tmp_path / "bells").rglob("*") if not path.is_dir()] == []


async def test_a_dead_listeners_bell_is_removed_by_who_rings(tmp_path: Path) -> None:
    async with database(tmp_path) as db:
        (tmp_path / "bells" / "things").mkdir(parents=True)
        dead = tmp_path / "bells" / "things" / "12345"
        os.mkfifo(dead)
        await db.write(put, rings=["things"])
        await db.write(partial(put, number=2), rings=["things"])
        assert not dead.exists()
