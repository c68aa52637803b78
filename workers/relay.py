"""The relay: what waits in a pool's delay topics goes back into the queue when it is due.

    delay topic ──claim──▶ read ▸ wait until due ▸ one commit {the record on its class's topic, Requeued}

A topic holds one step's records in the order of their writing, so the next to be due is always the next to be read. A
record is due its step after the time that the log gave it. Claims, doubts and ambiguous commits are the worker's:
see commit.py. Several relays share the topics; one is enough.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from arriero.schemas.clock import Clock, now_ms
from arriero.schemas.errors import ArrieroError, LogError, Undecodable
from arriero.schemas.event import Requeued
from arriero.schemas.job import Job, read_job
from arriero.schemas.names import DELAY_STEPS, Names
from arriero.transports.log import Claim, JobLog, Outgoing, Record
from arriero.workers.claims import Claims, Partition
from arriero.workers.commit import Committer, OwnersEvent
from arriero.workers.door import origin_of, refusal
from arriero.workers.held import about
from arriero.workers.metrics import RelayMetrics

log = structlog.get_logger(__name__)

READ_MOST: Final = 256
"""Records of one batch; a claim bounds what is held of a partition."""


class Waiting(msgspec.Struct):
    """A record that is not due yet. Nothing of it has begun."""

    since_ms: int = 0


class Relay:
    """`run` it until it is cancelled."""

    def __init__(
        self,
        job_log: JobLog,
        *,
        names: Names,
        pool: str,
        name: str,
        clock: Clock,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._log = job_log
        self._names = names
        self._pool = pool
        self._name = name
        self._clock = clock
        self._metrics = RelayMetrics(registry or CollectorRegistry())
        self._steps = {names.delay(pool, step): (step, delay_s) for step, delay_s in DELAY_STEPS}
        self._claims = Claims[Waiting](begin=self._begin)

    async def run(self) -> None:
        """Raises LogUnavailable when it will never recover, and TopicFault."""
        group, topics = self._names.relay_group(self._pool), self._names.delay_topics(self._pool)
        try:
            async with self._log.join(group, topics, self._name, self._names.events) as membership:
                log.info("relay_joined", relay=self._name, pool=self._pool)
                async with asyncio.TaskGroup() as self._tasks:
                    await self._claims.follow(membership)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._claims.clear()

    async def _begin(self, claim: Claim) -> Partition[Waiting]:
        committer = Committer[Waiting](
            claim,
            names=self._names,
            worker=self._name,
            clock=self._clock,
            metrics=self._metrics,
            settled=self._count,
        )
        place = f"{claim.topic}/{claim.partition}"
        return Partition(
            claim,
            committer,
            intake=self._tasks.create_task(self._carry(committer), name=f"carry {place}"),
            commits=self._tasks.create_task(committer.run(), name=f"commits {place}"),
        )

    async def _carry(self, committer: Committer[Waiting]) -> None:
        """One partition's records, each when it is due."""
        while True:
            claim = await committer.claim()
            try:
                records = await claim.read(READ_MOST)
            except LogError as error:
                log.info("claim_unreadable", topic=claim.topic, partition=claim.partition, reason=error.code)
                committer.doubt(claim)
                continue
            # After a doubt what is in hand is read again.
            records = [record for record in records if record.offset not in committer.pending]
            committer.pending |= {record.offset: Waiting() for record in records}
            for record in records:
                await self._until_due(record)
                self._requeue(committer, record)

    async def _until_due(self, record: Record) -> None:
        """No longer than its step, whatever this machine's clock and the log's say of each other."""
        _, delay_s = self._steps[record.topic]
        wait_s = min(delay_s, record.time_ms / 1000 + delay_s - self._clock.time())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        else:
            self._metrics.lag.observe(-wait_s)

    def _requeue(self, committer: Committer[Waiting], record: Record) -> None:
        time_ms = now_ms(self._clock)
        try:
            job = read_job(record.value)
        except ArrieroError as error:
            log.warning("record_refused", topic=record.topic, offset=record.offset, code=error.code)
            event, copies = refusal(self._names, record, None, Undecodable(error.message, code=error.code), time_ms)
            committer.add(event, settles=record.offset, records=copies)
            return
        topic = self._names.jobs(self._pool, job.priority or "standard")
        again = Outgoing(topic, job.key.encode(), record.value or b"", record.headers)
        committer.add(_requeued(job, record, time_ms), settles=record.offset, records=[again])

    def _count(self, event: OwnersEvent) -> None:
        if isinstance(event, Requeued):
            self._metrics.requeued.labels(self._steps[event.origin.topic][0]).inc()


def _requeued(job: Job, record: Record, time_ms: int) -> Requeued:
    fields = about(job.id, origin_of(record), job.priority, time_ms)
    root = job.root or fields["root"]
    return Requeued(**fields | {"attempt": job.attempt, "root": root, "tenant": job.tenant})
