"""The two databases that the embedded adapters stand on, simulated: shared by all hosts, with everything that can go
wrong between a call and its answer.

A write is a request that takes time, is applied in one moment, and is answered later; either may be lost. So a caller
that is told of a failure does not know what happened, one that dies may have written, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import apsw
import msgspec

from arriero.ops.simulation.loop import Host, VirtualLoop
from arriero.schemas.clock import Clock
from arriero.schemas.errors import ArrieroError
from arriero.transports.embedded.bells import Bell
from arriero.transports.embedded.peers import LEASE_S
from arriero.transports.embedded.writer import Work

T = TypeVar("T")

STALL_S: Final = 2.0
"""Shorter than a takeover waits for the bus (TAKE_PATIENCE_S): one that is silent for longer counts as lost."""
RING_LATE_S: Final = 0.3
EXIT_SEEN_S: Final = 0.002
"""How soon the end of a process shows to those that watch it."""


class Weather(msgspec.Struct):
    """How a database behaves now. Probabilities are those of each call; seconds are the longest latencies."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    away: bool = False
    latency_s: float = 0.002
    stall: float = 0.0
    """Of a call that takes as long as STALL_S."""
    ring_late: float = 0.02
    """Of a ring that takes as long as RING_LATE_S: a process that is busy, or was stopped, hears of the others late."""


class World:
    """What all hosts share beside their files."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.members: dict[str, tuple[Host, Callable[[], None]]] = {}
        """Members of groups, and what tells each that another has died."""

    def died(self, host: Host) -> None:
        for member_host, told in list(self.members.values()):
            if member_host is not host:
                self.loop.later(EXIT_SEEN_S, _tell, member_host, told)


def _tell(host: Host, told: Callable[[], None]) -> None:
    if not host.dead:
        told()


class File:
    """One database file. `after_write` sees the connection after each write that was applied."""

    def __init__(self, world: World, schema: str) -> None:
        self.world = world
        self.connection = apsw.Connection(":memory:")
        self.connection.execute(schema)
        self.weather = Weather()
        self.writes = 0
        """How many have arrived."""
        self.fates: dict[int, Literal["request lost", "reply lost"]] = {}
        """What becomes of single writes, by their number."""
        self.cut_off: set[str] = set()
        """Hosts that cannot reach it."""
        self.listeners: dict[str, list[tuple[Host, Bell]]] = {}
        self.after_write: Callable[[apsw.Connection], None] = lambda connection: None

    def apply(self, work: Work[T]) -> T:
        """One transaction."""
        self.connection.execute("SAVEPOINT work")
        try:
            answer = work(self.connection)
        except BaseException:
            self.connection.execute("ROLLBACK TO work; RELEASE work")
            raise
        self.connection.execute("RELEASE work")
        self.after_write(self.connection)
        return answer

    def ring(self, interests: Sequence[str]) -> None:
        for interest in dict.fromkeys(interests):
            for host, bell in self.listeners.get(interest, ()):
                if not host.dead:
                    self._ring_one(host, bell)

    def _ring_one(self, host: Host, bell: Bell) -> None:
        rng = self.world.rng
        late = host.frozen_since is not None or rng.random() < self.weather.ring_late
        delay_s = rng.uniform(0.0, RING_LATE_S if late else self.weather.latency_s)
        self.world.loop.later(delay_s, self._strike, host, bell)

    def _strike(self, host: Host, bell: Bell) -> None:
        if host.frozen_since is not None:
            host.thawed.append(lambda: self._ring_one(host, bell))
        elif not host.dead:
            bell.strike()


class SimulatedDatabase:
    """Stands where `Database` does, on one host."""

    def __init__(self, file: File, host: Host, unavailable: type[ArrieroError]) -> None:
        self.bells = _Bells(file, host)
        self._file = file
        self._host = host
        self._world = file.world
        self._unavailable = unavailable

    async def __aenter__(self) -> SimulatedDatabase:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def read(self, work: Work[T]) -> T:
        if self._is_lost():
            raise self._unavailable("the simulated file cannot be read")
        return work(self._file.connection)

    async def write(self, work: Work[T], *, rings: Sequence[str] = (), urgent: bool = False) -> T:
        return await asyncio.shield(self.submit(work, rings=rings, urgent=urgent))

    def submit(self, work: Work[T], *, rings: Sequence[str] = (), urgent: bool = False) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_mark_retrieved)
        if not self._host.dead:
            self._world.loop.later(self._latency_s(), self._arrive, work, rings, future)
        return future

    def peers(self, member: str, clock: Clock, died: Callable[[], None]) -> _Peers:
        return _Peers(self._world, self._host, member, died)

    def _arrive(self, work: Work[Any], rings: Sequence[str], future: asyncio.Future[Any]) -> None:
        """Whoever has died since may still have its request carried out."""
        weather, rng = self._file.weather, self._world.rng
        answer: Any = None
        error: BaseException | None = None
        fate = self._file.fates.get(self._file.writes)
        self._file.writes += 1
        if self._is_lost() or fate == "request lost":
            error = self._unavailable("the simulated file cannot be written")
        else:
            try:
                answer = self._file.apply(work)
            except Exception as raised:
                error = raised
            else:
                self._file.ring(rings)
                if rng.random() < weather.reply_lost or fate or self._host.name in self._file.cut_off:
                    error = self._unavailable("no answer; it may have been written")
        self._world.loop.later(self._latency_s(), _settle, future, answer, error)

    def _is_lost(self) -> bool:
        """Whether a request does not arrive."""
        file = self._file
        away = file.weather.away or self._host.name in file.cut_off
        return away or self._world.rng.random() < file.weather.request_lost

    def _latency_s(self) -> float:
        weather, rng = self._file.weather, self._world.rng
        stalls = weather.stall and rng.random() < weather.stall
        return rng.uniform(0.0, STALL_S if stalls else weather.latency_s)


class _Bells:
    def __init__(self, file: File, host: Host) -> None:
        self._file = file
        self._host = host

    @contextlib.contextmanager
    def listen(self, *interests: str, bell: Bell | None = None) -> Iterator[Bell]:
        bell = bell or Bell()
        listening = self._host, bell
        for interest in interests:
            self._file.listeners.setdefault(interest, []).append(listening)
        try:
            yield bell
        finally:
            for interest in interests:
                self._file.listeners[interest].remove(listening)


class _Peers:
    """Signs of life: an end is seen at once, a freeze when the lease is over."""

    def __init__(self, world: World, host: Host, member: str, died: Callable[[], None]) -> None:
        self._world = world
        self._host = host
        self._member = member
        self._died = died

    def __enter__(self) -> _Peers:
        self._world.members[self._member] = self._host, self._died
        self._watch()
        return self

    def __exit__(self, *exc: object) -> None:
        del self._world.members[self._member]

    def dead(self, others: set[str]) -> set[str]:
        now = self._world.loop.time()
        return {other for other in sorted(others) if self._is_dead(other, now)}

    def _is_dead(self, member: str, now: float) -> bool:
        if member not in self._world.members:
            return True
        host = self._world.members[member][0]
        return host.dead or (host.frozen_since is not None and now - host.frozen_since > LEASE_S)

    def _watch(self) -> None:
        """Look at the others' heartbeats, as the real one does while it is not stopped itself."""
        if self._host.dead or self._member not in self._world.members:
            return
        now = self._world.loop.time()
        if self._host.frozen_since is None and any(
            self._is_dead(member, now) for member in self._world.members if member != self._member
        ):
            self._died()
        self._world.loop.later(LEASE_S / 4, self._watch)


def _settle(future: asyncio.Future[Any], answer: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


NOWHERE: Final = Path("/simulated")
"""The folder of the adapters, which nothing is ever written to."""
