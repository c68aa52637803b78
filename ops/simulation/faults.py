"""What happens to a simulated fleet, drawn from a seed: each fault at a moment of the storm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from arriero.ops.simulation.files import File, Weather
from arriero.ops.simulation.fleet import POOL, SimulatedFleet

CLEAR: Final = Weather()
DOUBT_S: Final = 0.03
"""Enough for a commit to fail."""


class Drawn(msgspec.Struct, frozen=True):
    """One fault, for the trace."""

    at_s: float
    what: str


def storm(fleet: SimulatedFleet, length_s: float, count: int) -> list[Drawn]:
    """Schedule so many faults over so long a time; then the weather clears."""
    rng, drawn = fleet.rng, []
    kinds = [
        (_kill, 8),
        (_kill_at_step, 6),
        (_freeze, 4),
        (_freeze_in_doubt, 3),
        (_cut_off, 3),
        (_slow_down, 3),
        (_lose_replies, 4),
        (_go_away, 3),
        (_stall, 2),
        (_empty_bus, 2),
        (_forget_stream, 2),
        (_forget_group, 1),
        (_jump_clock, 2),
        (_fail_engine, 2),
    ]
    for _ in range(count):
        (fault,) = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        at_s = rng.uniform(0.0, length_s)
        what, act = fault(fleet)
        fleet.loop.later(at_s, act)
        drawn.append(Drawn(at_s, what))
    fleet.loop.later(length_s, _clear, fleet)
    return sorted(drawn, key=lambda one: one.at_s)


Act = tuple[str, Callable[[], object]]


def _is_worker(name: str) -> bool:
    return name.startswith("w")


def _some_worker(fleet: SimulatedFleet) -> str:
    return fleet.rng.choice([name for name in fleet.hosts if _is_worker(name)])


def _some_host(fleet: SimulatedFleet) -> str:
    workers = [name for name in fleet.hosts if _is_worker(name)]
    return fleet.rng.choice([*workers, *workers, "projector", "relay"])


def _kill(fleet: SimulatedFleet) -> Act:
    name = _some_host(fleet)
    return f"kill {name}", lambda: fleet.hosts[name].kill()


def _kill_at_step(fleet: SimulatedFleet) -> Act:
    """Before any of its next callbacks: between any two awaits."""
    name, ahead = _some_host(fleet), fleet.rng.randint(1, 400)

    def act() -> None:
        host = fleet.hosts[name]
        host.before[host.callbacks + ahead] = host.kill

    return f"kill {name} {ahead} callbacks later", act


def _freeze(fleet: SimulatedFleet) -> Act:
    name, length_s = _some_host(fleet), fleet.rng.uniform(0.1, 8.0)

    def act() -> None:
        host = fleet.hosts[name]
        host.freeze()
        fleet.loop.later(length_s, host.thaw)

    return f"freeze {name} for {length_s:.2f} s", act


def _freeze_in_doubt(fleet: SimulatedFleet) -> Act:
    """A worker whose commit is in doubt stands still until others have its partitions, which may be gone by then, too:
    when it goes on, it must not believe that nobody owned them in between."""
    name, length_s, others = _some_worker(fleet), fleet.rng.uniform(1.0, 6.0), fleet.rng.random() < 0.5

    def act() -> None:
        host = fleet.hosts[name]
        fleet.log_file.cut_off.add(name)

        def back() -> None:
            if others:
                for other, one in list(fleet.hosts.items()):
                    if other != name and _is_worker(other):
                        one.kill()
            host.thaw()

        fleet.loop.later(DOUBT_S, host.freeze)
        fleet.loop.later(DOUBT_S, fleet.log_file.cut_off.discard, name)
        fleet.loop.later(DOUBT_S + length_s, back)

    return f"freeze {name} in doubt for {length_s:.2f} s" + (", then kill the others" if others else ""), act


def _cut_off(fleet: SimulatedFleet) -> Act:
    (name, file), host, length_s = _file(fleet), _some_host(fleet), fleet.rng.uniform(0.05, 3.0)

    def act() -> None:
        file.cut_off.add(host)
        fleet.loop.later(length_s, file.cut_off.discard, host)

    return f"cut {host} off from the {name} for {length_s:.2f} s", act


def _slow_down(fleet: SimulatedFleet) -> Act:
    (name, file), length_s, latency_s = _file(fleet), fleet.rng.uniform(0.5, 4.0), fleet.rng.uniform(0.02, 0.3)
    return (
        f"{name} takes up to {latency_s:.3f} s for {length_s:.2f} s",
        lambda: _changed(fleet, file, length_s, latency_s=latency_s),
    )


def _file(fleet: SimulatedFleet) -> tuple[str, File]:
    return fleet.rng.choice([("log", fleet.log_file), ("bus", fleet.bus_file)])


def _changed(fleet: SimulatedFleet, file: File, length_s: float, **changes: float | bool) -> None:
    for name, value in changes.items():
        setattr(file.weather, name, value)

    def back() -> None:
        for name in changes:
            setattr(file.weather, name, getattr(CLEAR, name))

    fleet.loop.later(length_s, back)


def _lose_replies(fleet: SimulatedFleet) -> Act:
    (name, file), length_s = _file(fleet), fleet.rng.uniform(0.2, 3.0)
    request, reply = fleet.rng.choice([(0.0, 0.3), (0.2, 0.0), (0.1, 0.1)])
    return (
        f"{name} loses requests ({request}) and replies ({reply}) for {length_s:.2f} s",
        lambda: _changed(fleet, file, length_s, request_lost=request, reply_lost=reply),
    )


def _go_away(fleet: SimulatedFleet) -> Act:
    (name, file), length_s = _file(fleet), fleet.rng.uniform(0.1, 4.0)
    return f"{name} away for {length_s:.2f} s", lambda: _changed(fleet, file, length_s, away=True)


def _stall(fleet: SimulatedFleet) -> Act:
    (name, file), length_s = _file(fleet), fleet.rng.uniform(0.5, 3.0)
    return f"{name} stalls calls for {length_s:.2f} s", lambda: _changed(fleet, file, length_s, stall=0.05)


def _empty_bus(fleet: SimulatedFleet) -> Act:
    return "empty the bus", lambda: forget_everything(fleet)


def forget_everything(fleet: SimulatedFleet) -> None:
    """The bus begins anew."""
    fleet.bus_forgot = True
    for table in ("jobs", "heads", "tokens", "positions"):
        fleet.bus_file.connection.execute(f"DELETE FROM {table}")  # noqa: S608


def _forget_stream(fleet: SimulatedFleet) -> Act:
    """A few streams, whole or only the last of their tokens."""
    tail = fleet.rng.random() < 0.5
    some = "WITH some AS (SELECT job FROM heads WHERE finished = 0 ORDER BY job LIMIT 3)"
    ends = "SELECT job, max(at) FROM tokens WHERE job IN some GROUP BY job"

    def act() -> None:
        fleet.bus_forgot = True
        connection = fleet.bus_file.connection
        if tail:
            connection.execute(f"{some} DELETE FROM tokens WHERE (job, at) IN ({ends})")  # noqa: S608
        else:
            connection.execute(f"{some} DELETE FROM tokens WHERE job IN some")  # noqa: S608
            connection.execute(f"{some} DELETE FROM heads WHERE job IN some")  # noqa: S608

    return "forget the tails of streams" if tail else "forget streams", act


def _forget_group(fleet: SimulatedFleet) -> Act:
    return "forget the group's ledgers", lambda: forget_ledgers(fleet)


def forget_ledgers(fleet: SimulatedFleet) -> None:
    """The workers' ledgers are gone. Only a group without members can be deleted: they are killed first."""
    for name, host in list(fleet.hosts.items()):
        if _is_worker(name):
            host.kill()
    fleet.ledgers_forgot = True
    group = fleet.names.workers_group(POOL)
    fleet.log_file.connection.execute("DELETE FROM leases WHERE grp = ?", (group,))


def recreate(fleet: SimulatedFleet, topic: str, *, ledgers_too: bool) -> None:
    """A topic is deleted and made anew while no worker runs; what nobody had done yet is gone with it."""
    for name, host in list(fleet.hosts.items()):
        if _is_worker(name):
            host.kill()
    fleet.log_deleted = True
    connection = fleet.log_file.connection
    numbers = "SELECT number FROM partitions WHERE topic = ?"
    connection.execute(f"DELETE FROM records WHERE place >> 40 IN ({numbers})", (topic,))  # noqa: S608
    connection.execute("UPDATE partitions SET first = 0, next = 0 WHERE topic = ?", (topic,))
    if ledgers_too:
        connection.execute(f"DELETE FROM leases WHERE number IN ({numbers})", (topic,))  # noqa: S608


def _jump_clock(fleet: SimulatedFleet) -> Act:
    name, skew_s = _some_host(fleet), fleet.rng.uniform(-20.0, 20.0)

    def act() -> None:
        fleet.skews[name] = fleet.hosts[name].skew_s = skew_s

    return f"set the clock of {name} wrong by {skew_s:.1f} s", act


def _fail_engine(fleet: SimulatedFleet) -> Act:
    length_s = fleet.rng.uniform(0.2, 2.0)

    def act() -> None:
        fleet.failing = 0.05

        def back() -> None:
            fleet.failing = 0.0

        fleet.loop.later(length_s, back)

    return f"fail tokens for {length_s:.2f} s", act


def _clear(fleet: SimulatedFleet) -> None:
    fleet.failing = 0.0
    for file in (fleet.log_file, fleet.bus_file):
        file.weather = Weather()
        file.cut_off.clear()
    for host in fleet.hosts.values():
        host.before.clear()
        host.thaw()
