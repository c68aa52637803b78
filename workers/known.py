"""What is known of jobs before they are touched: whose an id is, and which may have crashed a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import structlog

from arriero.schemas.codec import decode_state
from arriero.schemas.errors import BusUnavailable
from arriero.schemas.state import JobState
from arriero.transports.bus import TokenBus

log = structlog.get_logger(__name__)


class KnownJobs:
    """States by the bus; crashes also by what this worker's supervisor remembers, for a bus that is away or behind."""

    def __init__(self, bus: TokenBus, crashes: Mapping[str, JobState]) -> None:
        self._bus = bus
        self._crashes = crashes

    def __contains__(self, job_id: str) -> bool:
        """Whether forerunners of this worker have crashed with it in hand."""
        return job_id in self._crashes

    async def states(self, ids: Iterable[str]) -> dict[str, JobState]:
        """Of these jobs, and of records by their origin's text, as far as anything is known."""
        wanted = list(dict.fromkeys(ids))
        known = {one: self._crashes[one] for one in wanted if one in self._crashes}
        for job_id, state in (await self._on_bus(wanted)).items():
            remembered = known.get(job_id)
            if remembered is not None and remembered.crashes > state.crashes:
                counts = ("crashes", "crashes_in_row", "crashes_alone", "crash_tokens")
                state = msgspec.structs.replace(state, **{name: getattr(remembered, name) for name in counts})
            known[job_id] = state
        return known

    async def _on_bus(self, wanted: Sequence[str]) -> dict[str, JobState]:
        """Nothing while it is away: a duplicate is then decoded, not recorded."""
        if not wanted:
            return {}
        try:
            found = await self._bus.states(wanted)
        except BusUnavailable:
            return {}
        known = {}
        for job_id, state in zip(wanted, found, strict=True):
            if state is not None:
                try:
                    known[job_id] = decode_state(state)
                except msgspec.MsgspecError:
                    log.warning("state_unreadable", job_id=job_id)
        return known
