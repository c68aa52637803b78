"""Signs of life between the members of a group.

Each member holds a FIFO open, of which the others read the other end: it ends when the process dies, however it
dies, and the others know at once. A process that is only stopped is found by its heartbeat, a monotonic time in a
file beside: written to memory only, so it costs no transaction and no disk.

    members/<member>  members/<member>.beat
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Callable, Set
from pathlib import Path
from typing import Final

from arriero.schemas.clock import Clock
from arriero.transports.embedded.bells import Fifo

BEAT_S: Final = 0.5
LEASE_S: Final = 2.0
"""A member that has not beaten for so long is taken for dead. Its commits fail then, so being wrong only costs work."""

_BEAT: Final = struct.Struct("<d")


class Peers:
    """One member's own signs of life, and its view of the others. `died` is called when another's have ended."""

    def __init__(self, folder: Path, member: str, clock: Clock, died: Callable[[], None]) -> None:
        self._folder = folder
        self._member = member
        self._clock = clock
        self._died = died
        self._watched: dict[str, int] = {}
        self._dead: set[str] = set()

    def __enter__(self) -> Peers:
        self._loop = asyncio.get_running_loop()
        self._fifo = Fifo(self._folder, self._member)
        self._beat_file = os.open(self._beat_path(self._member), os.O_RDWR | os.O_CREAT, 0o644)
        self._beaten = self._clock.monotonic()
        self._beat()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        for member in [*self._watched]:
            self._unwatch(member)
        os.close(self._beat_file)
        self._beat_path(self._member).unlink(missing_ok=True)
        self._fifo.close()

    def dead(self, others: Set[str]) -> set[str]:
        """Which of the group's other members are dead. They are watched from now on, and nobody else."""
        for member in self._watched.keys() - others:
            self._unwatch(member)
        for member in others - self._watched.keys():
            self._watch(member)
        self._dead &= others
        return set(self._dead)

    def found_dead(self, member: str) -> None:
        self._dead.add(member)
        self._died()

    def _beat(self) -> None:
        """Say that we live, and see whether the others still do."""
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        now, before = self._clock.monotonic(), self._beaten
        self._beaten = now
        with contextlib.suppress(OSError):
            os.pwrite(self._beat_file, _BEAT.pack(now), 0)
        if now - before > LEASE_S / 2:
            return  # we have been stopped ourselves, and perhaps all of us: give the others time to beat again
        for member in self._watched.keys() - self._dead:
            with contextlib.suppress(OSError, struct.error):  # it is leaving; its FIFO tells
                (beat,) = _BEAT.unpack(self._beat_path(member).read_bytes())
                if now - beat > LEASE_S:
                    self.found_dead(member)

    def _watch(self, member: str) -> None:
        try:
            fifo = os.open(self._folder / member, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self._dead.add(member)
            return
        self._watched[member] = fifo
        self._loop.add_reader(fifo, self._look, member)
        if _has_ended(fifo):  # before it was opened: that raises no event
            self._dead.add(member)

    def _look(self, member: str) -> None:
        fifo = self._watched[member]
        if _has_ended(fifo):
            self._loop.remove_reader(fifo)
            self.found_dead(member)

    def _unwatch(self, member: str) -> None:
        fifo = self._watched.pop(member)
        self._loop.remove_reader(fifo)
        os.close(fifo)

    def _beat_path(self, member: str) -> Path:
        return self._folder / f"{member}.beat"


def _has_ended(fifo: int) -> bool:
    try:
        return not os.read(fifo, 1)
    except BlockingIOError:
        return False
