"""The gateway's metrics, each described as the question it answers. Labels are bounded: routes, statuses, classes."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from arriero.schemas.job import CLASSES

_SPANS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds, from an answer out of memory to a long generation."""


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "arriero_http_requests", "How are requests answered?", ["route", "status"], registry=registry
        )
        self.request_time = Histogram(
            "arriero_http_request_seconds",
            "How long does an answer take, to its last byte?",
            ["route"],
            buckets=_SPANS,
            registry=registry,
        )
        ttft = Histogram(
            "arriero_http_time_to_first_token_seconds",
            "How long does an HTTP caller wait for the first text of a stream?",
            ["class"],
            buckets=_SPANS,
            registry=registry,
        )
        self.ttft = {name: ttft.labels(name) for name in CLASSES}
        self.streams = Gauge("arriero_http_streams", "How many event streams are open?", registry=registry)
        self.abandoned = Counter(
            "arriero_http_abandoned", "How many jobs were cancelled because their caller hung up?", registry=registry
        )
