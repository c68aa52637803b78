"""From a job to the record that lies in its topic."""

from __future__ import annotations

import random

import msgspec

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.job import Job, PriorityClass, check_job, encode_job
from arriero.schemas.names import Names
from arriero.transports.log import Outgoing

_ID_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(clock: Clock, rng: random.Random) -> str:
    """A job id that sorts by time and never meets another: 48 bits of milliseconds, 77 random bits, base 32 (as in
    ULIDs, in lower case)."""
    number = (now_ms(clock) << 77) | rng.getrandbits(77)
    digits = ""
    for _ in range(25):
        number, digit = divmod(number, 32)
        digits = _ID_DIGITS[digit] + digits
    return digits


def outgoing(job: Job, names: Names, pool: str, priority: PriorityClass) -> Outgoing:
    """The job's record. Raises BadJob, Undecodable (its id): whatever would be refused behind this door is refused
    here."""
    job = msgspec.structs.replace(job, priority=None)  # the topic says it
    check_job(job)
    return Outgoing(names.jobs(pool, priority), job.key.encode(), encode_job(job))
