"""Reading a stretch of the log that has an end: what is there now, and no more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from arriero.transports.log import JobLog, Positions, Record


async def until_now(job_log: JobLog, start: Mapping[tuple[str, int], int]) -> AsyncGenerator[list[Record], None]:
    """Committed records of these partitions, from these offsets to their present ends."""
    topics = sorted({topic for topic, _ in start})
    ends = await job_log.ends(topics)
    # Of a partition whose last record has expired nothing would ever come.
    behind = {
        place for place, at in start.items() if ends[place] > at and await job_log.fetch(*place, [ends[place] - 1])
    }
    positions = {place: start.get(place, end) for place, end in ends.items()}
    async with aclosing(_read(job_log, topics, positions, ends, behind)) as batches:
        async for batch in batches:
            yield batch


async def since(job_log: JobLog, topics: Sequence[str], time_s: float) -> AsyncGenerator[list[Record], None]:
    """Committed records of these topics, from a time (Unix seconds) to their present ends."""
    ends = await job_log.ends(topics)
    behind = {place for place, end in ends.items() if await _is_since(job_log, place, end - 1, time_s)}
    async with aclosing(_read(job_log, topics, time_s, ends, behind)) as batches:
        async for batch in batches:
            yield batch


async def _read(
    job_log: JobLog,
    topics: Sequence[str],
    start: Positions | float,
    ends: Mapping[tuple[str, int], int],
    behind: set[tuple[str, int]],
) -> AsyncGenerator[list[Record], None]:
    """Tail until none of the partitions is `behind` its end."""
    if not behind:
        return
    async with aclosing(job_log.tail(topics, start)) as batches:
        async for batch in batches:
            yield batch
            for record in batch:
                if record.offset >= ends[record.topic, record.partition] - 1:
                    behind.discard((record.topic, record.partition))
            if not behind:
                return


async def _is_since(job_log: JobLog, place: tuple[str, int], offset: int, time_s: float) -> bool:
    """Whether a partition's last record is there, and young enough for a tail from that time to meet it."""
    last = await job_log.fetch(*place, [offset]) if offset >= 0 else []
    return bool(last) and last[0].time_ms >= time_s * 1000
