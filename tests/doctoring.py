"""Writing past the seams into a bus, as a person with a shell might."""

from __future__ import annotations

import apsw
from fleet import Fleet

from arriero.transports.bus import Position
from arriero.transports.embedded.bus import EmbeddedBus
from arriero.transports.redis.bus import RedisBus


async def edit_state(fleet: Fleet, state: bytes | None, job_id: str) -> None:
    if isinstance(fleet.bus, EmbeddedBus):
        job = fleet.names.channel(job_id)

        def edit(connection: apsw.Connection) -> None:
            if state is None:
                connection.execute("DELETE FROM jobs WHERE job = ?", (job,))
            else:
                connection.execute("UPDATE jobs SET state = ? WHERE job = ?", (state, job))

        await fleet.bus._db.write(edit)
        return
    assert isinstance(fleet.bus, RedisBus)
    key = fleet.names.job_key(job_id)
    await (fleet.bus._redis.delete(key) if state is None else fleet.bus._redis.hset(key, "state", state))


async def edit_stream(fleet: Fleet, job_id: str, at: int, token: str | None) -> None:
    """Put another token in the place of one; None cuts the last one off."""
    if isinstance(fleet.bus, EmbeddedBus):
        job = fleet.names.channel(job_id)

        def edit(connection: apsw.Connection) -> None:
            if token is None:
                last = "SELECT max(at) FROM tokens WHERE job = ?"
                connection.execute(f"DELETE FROM tokens WHERE job = ? AND at = ({last})", (job, job))
            else:
                connection.execute("UPDATE tokens SET token = ? WHERE job = ? AND at = ?", (token, job, at))

        await fleet.bus._db.write(edit)
    else:
        assert isinstance(fleet.bus, RedisBus)
        key = fleet.names.tokens_key(job_id)
        await (fleet.bus._redis.rpop(key) if token is None else fleet.bus._redis.lset(key, at, token))
    view = await fleet.bus.read(job_id, Position())
    assert view.status == "fin"
