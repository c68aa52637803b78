"""A patrol's metrics, each described as the question it answers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from arriero.ops.audit.report import BREACHES, Report


class AuditMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        breaches = Gauge(
            "arriero_audit_breaches", "How many promises are broken, by breach?", ["breach"], registry=registry
        )
        self._breaches = {code: breaches.labels(code) for code in BREACHES}
        self._jobs = Gauge(
            "arriero_audit_jobs",
            "What became of the jobs whose records are still there, by class?",
            ["class", "outcome"],
            registry=registry,
        )
        self._suspicions = Gauge(
            "arriero_audit_suspicions", "What may be a breach, and waits to be confirmed?", registry=registry
        )
        self._lagging = Gauge(
            "arriero_audit_states_lagging", "How many states have not been projected yet?", registry=registry
        )
        self._last = Gauge(
            "arriero_audit_last_look_seconds", "When was the last look, in Unix seconds?", registry=registry
        )
        self._repaired = Counter("arriero_audit_repaired", "How many states were mended?", registry=registry)
        self._repaired_so_far = 0

    def show(self, report: Report) -> None:
        for code, gauge in self._breaches.items():
            gauge.set(report.breaches.get(code, 0))
        jobs: dict[tuple[str, str], int] = {}
        for account in report.accounts:
            for outcome, count in [*account.outcomes.items(), ("in_flight", account.in_flight)]:
                key = account.priority, outcome
                jobs[key] = jobs.get(key, 0) + count
        for key, count in jobs.items():
            self._jobs.labels(*key).set(count)
        self._suspicions.set(report.unconfirmed)
        self._lagging.set(report.excused.get("states_lagging", 0))
        self._last.set(report.at_ms / 1000)
        self._repaired.inc(report.repaired - self._repaired_so_far)
        self._repaired_so_far = report.repaired
