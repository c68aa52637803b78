"""The fleet side's metrics, each described as the question it answers. Names follow vLLM's where they mean the same.

A registry is handed in: one process may hold several workers, as tests do.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from arriero.schemas.job import CLASSES

_SPANS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds, from a commit to a long queue."""
_STEPS: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Seconds, parts of a step."""
_FILL: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class CommitMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.commit_time = Histogram(
            "arriero_commit_seconds", "How long does the log take for a commit?", buckets=_SPANS, registry=registry
        )
        self.commit_items = Histogram(
            "arriero_commit_events", "How many events share a commit?", buckets=_FILL, registry=registry
        )


class WorkerMetrics(CommitMetrics):
    """Labels are bounded: a class, an outcome, a part of a step; never a job or a tenant. Children of hot metrics are
    looked up once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        queue_time = Histogram(
            "arriero_request_queue_time_seconds",
            "How long do jobs wait from their record's time to a slot?",
            ["class"],
            buckets=_SPANS,
            registry=registry,
        )
        self.queue_time = {name: queue_time.labels(name) for name in CLASSES}
        ttft = Histogram(
            "arriero_time_to_first_token_seconds",
            "How long does a caller wait from publishing to the first token?",
            ["class"],
            buckets=_SPANS,
            registry=registry,
        )
        self.ttft = {name: ttft.labels(name) for name in CLASSES}
        self.inter_token = Histogram(
            "arriero_inter_token_latency_seconds",
            "How steady do tokens follow each other once a job decodes?",
            buckets=_STEPS,
            registry=registry,
        )
        step_time = Histogram(
            "arriero_step_time_seconds",
            "Where does a step's time go: the model (decode), picking (sample), our own work (rest)?",
            ["part"],
            buckets=_STEPS,
            registry=registry,
        )
        self.decode_time, self.sample_time, self.rest_time = map(step_time.labels, ("decode", "sample", "rest"))
        self.batch_fill = Histogram(
            "arriero_batch_sequences",
            "How full is the batch?",
            buckets=_FILL,
            registry=registry,
        )
        self.running = Gauge("arriero_num_requests_running", "How many jobs hold a slot?", registry=registry)
        self.waiting = Gauge(
            "arriero_num_requests_waiting", "How many jobs has this worker read that hold no slot?", registry=registry
        )
        self.kv_used = Gauge(
            "arriero_kv_cache_tokens", "How many cells of the KV cache do running jobs hold?", registry=registry
        )
        self.kv_retained = Gauge(
            "arriero_kv_cache_retained_tokens",
            "How many cells are kept of finished jobs, for prompts that begin like them?",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "arriero_prefix_cache_hit_tokens", "How many prompt tokens needed no prefill?", registry=registry
        )
        self.prompt_tokens = Counter(
            "arriero_prompt_tokens", "How many prompt tokens have been prefilled?", registry=registry
        )
        self.generation_tokens = Counter(
            "arriero_generation_tokens", "How many tokens have been decoded?", registry=registry
        )
        self.draft_tokens = Counter(
            "arriero_spec_decode_num_draft_tokens", "How many tokens have been guessed?", registry=registry
        )
        self.accepted_tokens = Counter(
            "arriero_spec_decode_num_accepted_tokens", "How many guesses were right?", registry=registry
        )
        self.preemptions = Counter(
            "arriero_num_preemptions", "How often did a job lose its slot to a more urgent one?", registry=registry
        )
        self.suspects = Counter(
            "arriero_suspects", "How often has a job run alone, because workers had crashed with it?", registry=registry
        )
        jobs = Counter(
            "arriero_jobs", "How do jobs end? Counted once recorded.", ["outcome", "class"], registry=registry
        )
        self.ended = cache(jobs.labels)
        self.claims = Gauge("arriero_claims", "How many partitions does this worker own?", registry=registry)
        self.retries = Counter(
            "arriero_retries", "How many attempts have failed for a reason that may pass?", ["step"], registry=registry
        )
        self.dead_letters = Counter(
            "arriero_dead_letters", "How many jobs were given up, and why?", ["reason"], registry=registry
        )
        self.bus_lag = Histogram(
            "arriero_bus_lag_seconds",
            "How long do decoded tokens take to the bus?",
            buckets=_SPANS,
            registry=registry,
        )
        self.bus_away = Gauge("arriero_bus_unavailable", "Is the bus out of this worker's reach?", registry=registry)


class RelayMetrics(CommitMetrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requeued = Counter(
            "arriero_requeued", "How many retries are back in the queue?", ["step"], registry=registry
        )
        self.lag = Histogram(
            "arriero_relay_lag_seconds", "How late is a retry that was due?", buckets=_SPANS, registry=registry
        )


class ProjectorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Histogram(
            "arriero_projector_lag_seconds",
            "How long after its record's time is an event projected? That is the latency of `done`.",
            buckets=_SPANS,
            registry=registry,
        )
        self.events = Counter("arriero_projected_events", "How many events have been projected?", registry=registry)
        self.rebuilds = Counter(
            "arriero_projector_rebuilds", "How often was everything projected from the beginning?", registry=registry
        )
        self.unreadable = Counter(
            "arriero_unreadable_events",
            "How many events could not be projected, of a later release (unknown_version) or of none (unreadable)?",
            ["code"],
            registry=registry,
        )
        self.crashes = Counter(
            "arriero_reported_crashes",
            "How often was a job in hand when a worker crashed, doing what, and what ended the worker?",
            ["operation", "cause"],
            registry=registry,
        )
        self.late_terminals = Counter(
            "arriero_late_terminals", "How many jobs ended a second time, and were ignored?", registry=registry
        )
