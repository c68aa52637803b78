"""A stretch of the log up to ends that were taken before: so that several stretches make one picture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from arriero.transports.log import JobLog, Record

Places = dict[tuple[str, int], int]


async def stretch(
    job_log: JobLog, start: Mapping[tuple[str, int], int], ends: Places
) -> AsyncGenerator[list[Record], None]:
    """Committed records of all partitions in `ends`, before these ends, from `start` on (left out: from the first)."""
    # Of a partition whose last record has expired nothing would ever come.
    behind = {
        place
        for place, end in ends.items()
        if start.get(place, 0) < end and await job_log.fetch(place[0], place[1], [end - 1])
    }
    if not behind:
        return
    positions = {place: end for place, end in ends.items() if place not in behind}
    positions |= {place: start[place] for place in behind if place in start}
    topics = sorted({topic for topic, _ in ends})
    async with aclosing(job_log.tail(topics, positions)) as batches:
        async for batch in batches:
            yield [record for record in batch if record.offset < ends[record.topic, record.partition]]
            for record in batch:
                if record.offset >= ends[record.topic, record.partition] - 1:
                    behind.discard((record.topic, record.partition))
            if not behind:
                return
            await asyncio.sleep(0)  # the embedded log reads without waiting: others want a turn
