"""What can happen to a fleet. Each fault is injected once by a call, which returns when the fleet is whole again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from arriero.ops.chaos.arena import Arena, PairName
from arriero.ops.chaos.processes import Process
from arriero.transports.failpoints import POINTS

TAKEOVER_MAX_S: Final = 60.0
FAILPOINT_MAX_S: Final = 10.0
"""A point that is not reached by then is given up; the process is killed all the same."""
FROZEN_S: Final = {"embedded": 4.0, "real": 8.0}
"""Longer than a lease, and than a session: another worker has taken over by then."""


class Injected(msgspec.Struct):
    """kills: processes ended by SIGKILL. recovery_s: for each worker killed or frozen, until its partitions were
    another's."""

    kills: int = 0
    recovery_s: list[float] = []


class Fault(msgspec.Struct, frozen=True):
    inject: Callable[[Arena], Awaitable[Injected]]
    told: str
    """What it is, in the matrix."""
    pairs: Sequence[PairName] = ("embedded", "real")
    resets: bool = False
    """Whether readers may be reset: bus and worker are lost together."""


async def _kill_workers(arena: Arena) -> Injected:
    """One or several side by side; each starts again at once."""
    count = arena.rng.randint(1, len(arena.workers))
    victims = arena.rng.sample(arena.workers, count)
    return await _kill(arena, victims)


async def _kill(arena: Arena, victims: Sequence[Process]) -> Injected:
    former = await _owned(arena, victims)
    await asyncio.gather(*(victim.kill() for victim in victims))
    for victim in victims:
        await victim.start()
    took_s = await arena.taken_over(former, TAKEOVER_MAX_S) if former else None
    return Injected(len(victims), [] if took_s is None else [took_s])


async def _owned(arena: Arena, workers: Sequence[Process]) -> dict[tuple[str, int], str]:
    names = {worker.name for worker in workers}
    return {place: owner for place, owner in (await arena.owners()).items() if owner.partition("/")[0] in names}


async def _fail_at_point(arena: Arena) -> Injected:
    """A worker that ends itself between two steps of the protocol."""
    points = [point for point in POINTS if not point.startswith("projector.")]
    other = "write." if not arena.embedded else ("commit.", "take.")
    point = arena.rng.choice([point for point in points if not point.startswith(other)])
    return await _fail(arena, arena.rng.choice(arena.workers), point, arena.rng.choice([1, 1, 2, 5, 20]))


async def _fail_projector_at_point(arena: Arena) -> Injected:
    point = arena.rng.choice([point for point in POINTS if point.startswith("projector.")])
    return await _fail(arena, arena.projector, point, arena.rng.choice([1, 2, 5, 20]))


async def _fail(arena: Arena, victim: Process, point: str, count: int) -> Injected:
    await victim.kill()
    await victim.start(failpoints=f"{point}:{count}")
    try:
        async with asyncio.timeout(FAILPOINT_MAX_S):
            await victim.died()
    except TimeoutError:
        await victim.kill()
    await victim.start()
    return Injected(2)


async def _freeze_worker(arena: Arena) -> Injected:
    """Beyond its session, so that another takes over; then it goes on as if nothing had happened."""
    victim = arena.rng.choice(arena.workers)
    former = await _owned(arena, [victim])
    victim.signal(signal.SIGSTOP)
    took_s = None
    if former and len(arena.workers) > 1:
        took_s = await arena.taken_over(former, TAKEOVER_MAX_S)
    else:
        await asyncio.sleep(FROZEN_S["embedded" if arena.embedded else "real"])
    await asyncio.sleep(arena.rng.uniform(0.0, 1.0))
    victim.signal(signal.SIGCONT)
    return Injected(0, [] if took_s is None else [took_s])


async def _empty_bus(arena: Arena) -> Injected:
    await arena.empty_bus()
    return Injected()


async def _empty_bus_and_kill(arena: Arena) -> Injected:
    victims = arena.rng.sample(arena.workers, arena.rng.randint(1, len(arena.workers)))
    injected, _ = await asyncio.gather(_kill(arena, victims), arena.empty_bus())
    return injected


async def _kill_broker(arena: Arena) -> Injected:
    """In mid-transaction, as there is always one under way."""
    broker = arena.servers.broker
    assert broker is not None
    broker.kill()
    await asyncio.sleep(arena.rng.uniform(0.0, 3.0))
    broker.launch()
    await asyncio.to_thread(broker.wait)
    return Injected(1)


async def _cut_network(arena: Arena) -> Injected:
    """Between all workers and the broker, shorter or longer than a session."""
    assert arena.servers.proxy is not None
    await arena.servers.proxy.cut()
    await asyncio.sleep(arena.rng.choice([0.2, 2.0, 9.0]))
    arena.servers.proxy.mend()
    return Injected()


async def _slow_network(arena: Arena) -> Injected:
    assert arena.servers.proxy is not None
    arena.servers.proxy.delay_s = arena.rng.uniform(0.05, 0.5)
    await asyncio.sleep(arena.rng.uniform(2.0, 6.0))
    arena.servers.proxy.mend()
    return Injected()


async def _fill_disk(arena: Arena) -> Injected:
    """No process of the fleet can write to its files for a while."""
    for process in arena.processes:
        process.limit_files(4_096)
    await asyncio.sleep(arena.rng.uniform(0.5, 4.0))
    for process in arena.processes:
        process.limit_files(None)
    return Injected()


async def _kill_projector(arena: Arena) -> Injected:
    return await _kill_beside(arena.projector)


async def _kill_relay(arena: Arena) -> Injected:
    return await _kill_beside(arena.relay)


async def _kill_beside(process: Process) -> Injected:
    await process.kill()
    await process.start()
    return Injected(1)


FAULTS: Final[dict[str, Fault]] = {
    "worker-kill": Fault(_kill_workers, "kill -9 of one or several workers"),
    "worker-point": Fault(_fail_at_point, "a worker ends between two steps of the protocol"),
    "worker-freeze": Fault(_freeze_worker, "a worker frozen beyond its session, then thawed"),
    "bus-emptied": Fault(_empty_bus, "the token bus loses everything"),
    "bus-and-worker": Fault(_empty_bus_and_kill, "bus and workers lost together", resets=True),
    "projector-kill": Fault(_kill_projector, "kill -9 of the projector"),
    "projector-point": Fault(_fail_projector_at_point, "the projector ends between two of its writes"),
    "relay-kill": Fault(_kill_relay, "kill -9 of the relay"),
    "disk-full": Fault(_fill_disk, "no file can grow", pairs=("embedded",)),
    "broker-kill": Fault(_kill_broker, "kill -9 of Kafka in mid-transaction", pairs=("real",)),
    "network-cut": Fault(_cut_network, "the network between workers and Kafka cut", pairs=("real",)),
    "network-slow": Fault(_slow_network, "the same network slowed", pairs=("real",)),
}
