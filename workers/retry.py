"""What becomes of a job whose attempt has failed for a reason that may pass, and of one that is given up. Pure.

failed, retriable ──▶ attempts left, and time ──▶ RetryScheduled, and the job as a record of a delay topic
                 └──▶ none ──▶ DeadLettered, and the whole job in the dead-letter topic
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from arriero.schemas.codec import encode
from arriero.schemas.event import DeadLettered, DeadRecord, Error, Failed, RetryScheduled
from arriero.schemas.job import Job, fleet_record
from arriero.schemas.names import DELAY_STEPS, Names
from arriero.transports.log import Outgoing
from arriero.workers.held import Held

EXHAUSTED: Final = "attempts_exhausted"


def after_failure(
    held: Held, error: Error, *, names: Names, pool: str, max_attempts: int, time_ms: int
) -> tuple[RetryScheduled | DeadLettered | Failed, Sequence[Outgoing]]:
    """The event that settles a failed attempt, and the record that becomes true with it.

    error: of a kind that may pass. max_attempts: the fleet's; the job's own goes before it. A job whose deadline comes
    before another attempt could begin fails with this error now: waiting would not help it.
    """
    job = held.job
    if job.attempt >= (job.max_attempts or max_attempts):
        return dead_letter(held, EXHAUSTED, error, names=names, time_ms=time_ms)
    step, delay_s = DELAY_STEPS[min(job.attempt, len(DELAY_STEPS)) - 1]
    due_ms = time_ms + int(delay_s * 1000)
    if job.deadline is not None and job.deadline * 1000 <= due_ms:
        return held.failed(time_ms, error), ()
    event = held.retry_scheduled(time_ms, error, step=step, due_ms=due_ms)
    return event, [Outgoing(names.delay(pool, step), job.key.encode(), fleet_record(next_attempt(held)))]


def next_attempt(held: Held) -> Job:
    """The job as its next attempt finds it: it goes on after what has been streamed."""
    return msgspec.structs.replace(
        held.job,
        attempt=held.job.attempt + 1,
        root=held.root,
        priority=held.priority,
        streamed=len(held.tokens),
        started_ms=held.since_ms,
    )


def dead_letter(
    held: Held, reason: str, error: Error, *, names: Names, time_ms: int
) -> tuple[DeadLettered, Sequence[Outgoing]]:
    """The event that ends a job that is given up, and its copy in the dead-letter topic."""
    job = msgspec.structs.replace(held.job, priority=held.priority)
    dead = DeadRecord(
        reason=reason, error=error, origin=held.origin, time_ms=time_ms, job=msgspec.Raw(fleet_record(job))
    )
    copy = Outgoing(names.dead, held.job.id.encode(), encode(dead))
    return held.dead_lettered(time_ms, reason, error), [copy]
