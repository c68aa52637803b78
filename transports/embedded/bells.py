"""Wake-ups between processes: one FIFO a process and interest, rung after the writer's COMMIT.

    bells/<interest>/<inode>     a FIFO that its listener keeps open; named by its inode, so no two ever meet

A FIFO whose listener has died refuses to be opened (ENXIO) and is removed by whoever rings. Nothing is polled: an
idle listener costs nothing. (inotify would fire before a commit is visible; Unix sockets have short paths.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DRAIN_BYTES: Final = 65_536
"""A FIFO's whole capacity on Linux: one read empties it, so that a hundred rings wake once."""


class Bell:
    """What a listener hears: a count that grows with each ring.

    Take `count`, look at the data, then `wait(count)`: a ring in between is not missed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiters: dict[asyncio.Future[None], None] = {}

    def strike(self) -> None:
        """Wake everyone who waits. For the loop's thread only."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, seen: int) -> None:
        """Returns when the bell has been rung since `count` was `seen`."""
        while self.count == seen:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)


class Doorbell:
    """The bells of one data folder, as one process of it uses them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bells"
        self._listening: dict[str, tuple[Fifo, set[Bell]]] = {}

    def ring(self, interest: str) -> None:
        """Wake every process that listens for this interest. May be called from any thread."""
        folder = self._folder / interest
        try:
            names = os.listdir(folder)  # noqa: PTH208 - no objects where a commit waits
        except OSError:
            return  # nobody has ever listened
        for name in names:
            if name.startswith("."):
                continue  # its listener has not opened it yet
            path = f"{folder}/{name}"
            try:
                fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    with contextlib.suppress(OSError):
                        Path(path).unlink()
                continue
            try:
                os.write(fifo, b"!")
            except (BlockingIOError, BrokenPipeError):
                pass  # full: it has been rung already; broken: its listener died this moment
            finally:
                os.close(fifo)

    @contextlib.contextmanager
    def listen(self, *interests: str, bell: Bell | None = None) -> Iterator[Bell]:
        """Hear the rings of these interests from now on, with a bell of one's own if need be. For the loop's thread;
        all listeners of one process share one FIFO an interest."""
        bell = bell or Bell()
        for interest in interests:
            if interest not in self._listening:
                fifo = Fifo(self._folder / interest)
                self._listening[interest] = fifo, set()
                asyncio.get_running_loop().add_reader(fifo.number, self._hear, interest)
            self._listening[interest][1].add(bell)
        try:
            yield bell
        finally:
            for interest in interests:
                fifo, bells = self._listening[interest]
                bells.discard(bell)
                if not bells:
                    del self._listening[interest]
                    asyncio.get_running_loop().remove_reader(fifo.number)
                    fifo.close()

    def _hear(self, interest: str) -> None:
        fifo, bells = self._listening[interest]
        with contextlib.suppress(BlockingIOError):
            os.read(fifo.number, DRAIN_BYTES)
        for bell in tuple(bells):
            bell.strike()


class Fifo:
    """A FIFO that lives as long as this process holds it. Opened for both ends, so that it never reads as ended
    here; its last end closes, for others to see, with `close` or with the process."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """`name`: one that nobody else ever uses; the inode's number when left out."""
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count():
            unready = folder / f".{os.getpid()}-{attempt}"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(unready)
                break
        self.number = os.open(unready, os.O_RDWR | os.O_NONBLOCK)
        # Visible under its own name only now that it is open: until then it would be taken for a dead one.
        self.path = folder / (name or str(os.fstat(self.number).st_ino))
        unready.rename(self.path)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.number)
