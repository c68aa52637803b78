"""What must hold when all faults are over and everything has ended."""

from __future__ import annotations

from contextlib import aclosing

from arriero.ops.chaos.load import Transcript
from arriero.ops.simulation.fleet import POOL, SimulatedFleet
from arriero.ops.simulation.load import MixedLoad, Wanted
from arriero.ops.simulation.watch import Watch
from arriero.schemas.errors import ArrieroError
from arriero.schemas.event import Cancelled, Completed, DeadLettered, Expired, Failed, Rejected, Terminal
from arriero.schemas.job import read_job
from arriero.transports.log import JobLog
from arriero.transports.reading import until_now
from arriero.workers.blame import WORKER_CRASHED
from arriero.workers.door import origin_of


async def judge(job_log: JobLog, fleet: SimulatedFleet, watch: Watch, load: MixedLoad) -> str:
    """The first promise that does not hold; empty when all do."""
    accepted: dict[str, None] = {}
    names = fleet.names
    topics = [*names.job_topics(POOL), *names.delay_topics(POOL)]
    start = {(topic, number): 0 for topic in topics for number in range(await job_log.partitions(topic))}
    async with aclosing(until_now(job_log, start)) as batches:
        async for batch in batches:
            for record in batch:
                if origin_of(record) not in watch.settled:
                    return f"lost: no event settles {origin_of(record)}"
                try:
                    accepted[read_job(record.value).id] = None
                except ArrieroError as error:
                    accepted |= {job_id: None for job_id in [getattr(error, "job_id", None)] if job_id}
    for job_id in accepted:
        end = watch.ends.get(job_id)
        if end is None:
            return f"lost: {job_id} has no end"
        if not _is_expected(load.wanted[job_id], end):
            return f"wrong: {job_id}, {load.wanted[job_id].kind}, has ended as {end}"
    # A fence exceeds the last one by the ledger, the events or the clock. Without all three the new owner of a stream
    # is taken for a former one, its tokens go unseen, and readers are reset at the end.
    may_be_reset = fleet.bus_forgot or (fleet.ledgers_forgot and bool(fleet.skews))
    for job_id, transcript in load.transcripts.items():
        if fleet.log_deleted and job_id not in watch.ends:
            continue
        if broken := _judge_reader(transcript, watch.ends.get(job_id), may_be_reset=may_be_reset):
            return f"reader of {job_id}: {broken}"
    return ""


def _is_expected(wanted: Wanted, end: Terminal) -> bool:
    whole = isinstance(end, Completed) and end.output.text in wanted.prompts
    part = any(prompt.startswith(end.output.text) for prompt in wanted.prompts)
    match wanted.kind:
        case "cancelled":
            return whole or (isinstance(end, Cancelled) and part)
        case "late":
            # A passing fault with no time left for another attempt fails it.
            return whole or (isinstance(end, Expired | Failed) and part)
        case "bad":
            return isinstance(end, Rejected)
        case "deadly":
            # One that is too short never comes to its fatal token.
            return whole or (isinstance(end, DeadLettered) and end.reason == WORKER_CRASHED)
        case _:
            return whole


def _judge_reader(transcript: Transcript, end: Terminal | None, *, may_be_reset: bool) -> str:
    if transcript.end is None:
        return "was shown no end"
    if transcript.gaps:
        return f"was shown {transcript.gaps} wrong indices"
    # Who is convicted before its stream is read is recorded without its output.
    if transcript.resets and not may_be_reset and not isinstance(end, DeadLettered):
        return f"was reset {transcript.resets} times although the bus has forgotten nothing"
    expected = end.output.tokens if end is not None else []
    if transcript.shown != expected:
        return f"was shown {len(transcript.shown)} tokens that are not the {len(expected)} recorded"
    return ""
