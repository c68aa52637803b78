"""Every topic, group, header, key and channel, built here and nowhere else."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from arriero.schemas.errors import SetupError
from arriero.schemas.job import CLASSES, PriorityClass

NAMESPACE_DEFAULT: Final = "arriero"
POOL_DEFAULT: Final = "default"
TRACEPARENT: Final = "traceparent"
"""The one header that is read, and it is optional."""

DELAY_STEPS: Final[tuple[tuple[str, float], ...]] = (("1s", 1.0), ("10s", 10.0), ("60s", 60.0), ("300s", 300.0))
"""A retry's delay topics, name and seconds: one topic a step keeps each of them in order of due time."""

MAX_ATTEMPTS: Final = len(DELAY_STEPS) + 1
"""Runs that a transient error may cost a job that does not say: one, and one behind each step, six minutes in all."""

_WORD: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\Z")


class Names(msgspec.Struct, frozen=True):
    """The names of one namespace. Namespace and pool are lower-case words, so a topic splits at its dots."""

    namespace: str = NAMESPACE_DEFAULT

    def __post_init__(self) -> None:
        check_word("namespace", self.namespace)

    # topics
    def jobs(self, pool: str, priority: PriorityClass) -> str:
        return f"{self.namespace}.jobs.{check_word('pool', pool)}.{priority}"

    def job_topics(self, pool: str) -> tuple[str, ...]:
        """A pool's topics, most urgent first."""
        return tuple(self.jobs(pool, priority) for priority in CLASSES)

    @property
    def events(self) -> str:
        return f"{self.namespace}.events"

    @property
    def dead(self) -> str:
        return f"{self.namespace}.dead"

    def delay(self, pool: str, step: str) -> str:
        return f"{self.namespace}.delay.{check_word('pool', pool)}.{step}"

    def delay_topics(self, pool: str) -> tuple[str, ...]:
        """A pool's delay topics, the shortest step first."""
        return tuple(self.delay(pool, step) for step, _ in DELAY_STEPS)

    # consumer groups
    def workers_group(self, pool: str) -> str:
        return f"{self.namespace}.{pool}.workers"

    def relay_group(self, pool: str) -> str:
        return f"{self.namespace}.{pool}.relay"

    @property
    def projector_group(self) -> str:
        return f"{self.namespace}.projector"

    # token bus; the braces make a job's keys meet in one slot of a Redis Cluster
    def job_key(self, job_id: str) -> str:
        return f"{self.namespace}:{{{job_id}}}:job"

    def head_key(self, job_id: str) -> str:
        return f"{self.namespace}:{{{job_id}}}:head"

    def tokens_key(self, job_id: str) -> str:
        return f"{self.namespace}:{{{job_id}}}:tokens"

    def channel(self, job_id: str) -> str:
        return f"{self.namespace}:{{{job_id}}}"

    def worker_key(self, pool: str, worker: str) -> str:
        return f"{self.namespace}:{{workers.{pool}}}:{worker}"

    def workers_key(self, pool: str) -> str:
        return f"{self.namespace}:{{workers.{pool}}}"

    @property
    def pools_key(self) -> str:
        return f"{self.namespace}:pools"

    @property
    def positions_key(self) -> str:
        """Where the projector has read to."""
        return f"{self.namespace}:projector"


class TopicName(msgspec.Struct, frozen=True):
    """A job topic taken apart."""

    pool: str
    priority: PriorityClass


def parse_job_topic(topic: str) -> TopicName:
    """Pool and class of `<ns>.jobs.<pool>.<class>`. Raises ValueError for any other topic."""
    parts = topic.split(".")
    for priority in CLASSES:
        if len(parts) == 4 and parts[1] == "jobs" and parts[3] == priority:
            return TopicName(parts[2], priority)
    raise ValueError(f"{topic} is not a job topic")


def check_word(what: str, word: str) -> str:
    if not _WORD.match(word):
        raise SetupError(f"{what} {word!r} must be 1 to 61 lower-case letters, digits or hyphens", code="bad_setting")
    return word
