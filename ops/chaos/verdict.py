"""What has to hold when a fleet has been broken and has come to rest: counted from the log alone, and from what readers
were shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from arriero.ops.chaos.load import Asked, Transcript
from arriero.schemas.codec import decode_event
from arriero.schemas.event import (
    Cancelled,
    Completed,
    Duplicate,
    Event,
    Origin,
    Requeued,
    RetryScheduled,
    SettlingEvent,
    Terminal,
)
from arriero.schemas.job import read_job
from arriero.schemas.names import Names
from arriero.schemas.token import Token
from arriero.transports.log import JobLog, Record
from arriero.transports.reading import until_now

BREACHES_SHOWN = 20


class Verdict(msgspec.Struct, kw_only=True):
    """jobs: records that were accepted. tokens: shown to readers and compared with what was recorded."""

    jobs: int = 0
    tokens: int = 0
    readers: int = 0
    resets: int = 0
    unexplained: int = 0
    """Resets of readers of jobs that were published once: others may have watched the record that was not recorded."""
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    """Jobs whose recorded text is not what was asked for."""
    token_errors: int = 0
    """Readers that were shown an index twice or not at all, or another text than the recorded one."""
    audit: int = 0
    """Breaches that `arriero audit` found afterwards."""
    late_terminals: int = 0
    """Second terminal events of one id: ignored by all, and no second result; a record's second is `duplicated`."""
    breaches: list[str] = []

    @property
    def holds(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong or self.token_errors or self.audit)

    def breach(self, text: str) -> None:
        if len(self.breaches) < BREACHES_SHOWN:
            self.breaches.append(text)


class _Found(msgspec.Struct):
    """What the log holds: ids by origin, how often each origin was settled, first terminal events by id."""

    records: dict[Origin, str] = {}
    firsts: list[str] = []
    """Ids, once for each record of a first attempt."""
    settled: dict[Origin, int] = {}
    ends: dict[str, Terminal] = {}
    late: int = 0


async def judge(
    job_log: JobLog, names: Names, pool: str, asked: Mapping[str, Asked], transcripts: Mapping[str, Transcript]
) -> Verdict:
    """Reads the whole log. Call it when nothing is in flight any more."""
    found = await _read(job_log, names, pool)
    verdict = Verdict(jobs=len(found.records), readers=len(transcripts), late_terminals=found.late)
    for origin, job_id in found.records.items():
        times = found.settled.get(origin, 0)
        if times == 0:
            verdict.lost += 1
            verdict.breach(f"lost: {job_id} at {origin} has no settling event")
        elif times > 1:
            verdict.duplicated += 1
            verdict.breach(f"duplicated: {job_id} at {origin} was settled {times} times")
    for origin in found.settled.keys() - found.records.keys():
        verdict.duplicated += 1
        verdict.breach(f"an event settles {origin}, where no record is")
    for job_id in set(found.records.values()):
        _judge_result(verdict, asked[job_id], found.ends.get(job_id))
    once = {job_id for job_id, count in Counter(found.firsts).items() if count == 1}
    for job_id, transcript in transcripts.items():
        verdict.unexplained += transcript.resets if job_id in once else 0
        _judge_reader(verdict, job_id, transcript, found.ends.get(job_id))
    return verdict


def _judge_result(verdict: Verdict, asked: Asked, end: Terminal | None) -> None:
    prompt = asked.job.prompt or ""
    if end is None:
        verdict.lost += 1
        verdict.breach(f"lost: {asked.job.id} has no terminal event")
    elif isinstance(end, Completed):
        if end.output.text != prompt:
            verdict.wrong += 1
            verdict.breach(f"wrong: {asked.job.id} completed with {end.output.text!r} instead of {prompt!r}")
    elif not (isinstance(end, Cancelled) and asked.kind == "cancelled" and prompt.startswith(end.output.text)):
        verdict.wrong += 1
        verdict.breach(f"wrong: {asked.job.id} ended as {type(end).__name__}")


def _judge_reader(verdict: Verdict, job_id: str, transcript: Transcript, end: Terminal | None) -> None:
    verdict.resets += transcript.resets
    verdict.tokens += len(transcript.shown)
    expected: list[Token] = end.output.tokens if end is not None else []
    if transcript.end is None:
        verdict.token_errors += 1
        verdict.breach(f"reader of {job_id} was shown no end")
    elif transcript.gaps or transcript.shown != expected:
        verdict.token_errors += 1
        verdict.breach(
            f"reader of {job_id}: {transcript.gaps} wrong indices, {len(transcript.shown)} tokens of {len(expected)}"
        )


async def _read(job_log: JobLog, names: Names, pool: str) -> _Found:
    found = _Found()
    topics = [names.events, *names.job_topics(pool), *names.delay_topics(pool)]
    start = {(topic, number): 0 for topic in topics for number in range(await job_log.partitions(topic))}
    async with aclosing(until_now(job_log, start)) as batches:
        async for batch in batches:
            for record in batch:
                if record.topic == names.events:
                    _note_event(found, decode_event(record.value or b""))
                else:
                    _note_record(found, record)
    return found


def _note_record(found: _Found, record: Record) -> None:
    origin = Origin(record.topic, record.partition, record.offset, record.time_ms)
    job = read_job(record.value)
    found.records[origin] = job.id
    if job.attempt == 1:
        found.firsts.append(job.id)


def _note_event(found: _Found, event: Event) -> None:
    if not isinstance(event, SettlingEvent):
        return
    found.settled[event.origin] = found.settled.get(event.origin, 0) + 1
    if isinstance(event, Terminal):
        found.late += event.id in found.ends
        found.ends.setdefault(event.id, event)
    else:
        assert isinstance(event, Duplicate | RetryScheduled | Requeued), event
