"""A report for people."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from arriero.ops.audit.report import BREACHES, OUTCOMES, Account, Report
from arriero.schemas.job import CLASSES

ROWS_MAX = 30
"""Accounts with a row of their own; the smallest are shown together."""


def render(report: Report) -> RenderableType:
    """Accounts, breaches, what was excused, and the verdict."""
    parts: list[RenderableType] = [_accounts(report)]
    if report.breaches:
        parts += ["", _breaches(report)]
        parts += [Text(f"  {b.code}: {b.where} {b.job_id} {b.detail}".rstrip(), style="red") for b in report.shown]
    notes = [f"{name.replace('_', ' ')} {count:,}" for name, count in report.excused.items()]
    if report.sampled > 1:
        notes.append(f"1 of {report.sampled} jobs compared with the bus")
    if report.unconfirmed:
        notes.append(f"unconfirmed {report.unconfirmed:,}")
    if report.repaired:
        notes.append(f"states repaired {report.repaired:,}")
    if notes:
        parts += ["", Text("; ".join(notes), style="dim")]
    rate = (report.records + report.events) / report.took_s if report.took_s else 0.0
    verdict = "every promise holds" if report.holds else _count(sum(report.breaches.values()))
    parts += [
        "",
        Text(verdict, style="bold green" if report.holds else "bold red")
        + Text(
            f": {report.records:,} records, {report.events:,} events, {report.states:,} states, {report.streams:,} "
            f"streams with {report.tokens_streamed:,} tokens, in {report.took_s:.1f} s ({rate:,.0f} records/s)",
            style="default",
        ),
    ]
    return Group(*parts)


def _count(breaches: int) -> str:
    return f"{breaches:,} breach{'es' if breaches > 1 else ''}"


def show(report: Report, console: Console) -> None:
    console.print(render(report), highlight=False)


def _accounts(report: Report) -> Table:
    shown = [name for name in OUTCOMES if any(account.outcomes.get(name) for account in report.accounts)]
    table = Table(box=None, header_style="bold")
    table.add_column("class")
    table.add_column("tenant")
    for name in ("accepted", *shown, "in flight", "unaccounted"):
        table.add_column(name.replace("_", " "), justify="right")
    for account in _rows(report.accounts):
        counts = [account.accepted, *(account.outcomes.get(name, 0) for name in shown), account.in_flight]
        missing = account.unaccounted
        last = Text(f"{missing:,}", style="red" if missing else "dim")
        table.add_row(account.priority, account.tenant or "?", *(f"{count:,}" for count in counts), last)
    return table


def _rows(accounts: list[Account]) -> list[Account]:
    """By class; within it the largest first, and the sum of those that are too many."""
    rows: list[Account] = []
    for priority in CLASSES:
        of_class = sorted((a for a in accounts if a.priority == priority), key=lambda a: (-a.accepted, a.tenant))
        rows += of_class[: ROWS_MAX // len(CLASSES)]
        rest = of_class[ROWS_MAX // len(CLASSES) :]
        if rest:
            total = Account(priority=priority, tenant=f"({len(rest):,} more)")
            for account in rest:
                total.accepted += account.accepted
                total.in_flight += account.in_flight
                for name, count in account.outcomes.items():
                    total.outcomes[name] = total.outcomes.get(name, 0) + count
            rows.append(total)
    return rows


def _breaches(report: Report) -> Table:
    table = Table(box=None, header_style="bold red")
    table.add_column("breach")
    table.add_column("count", justify="right")
    table.add_column("what it means")
    for code, count in report.breaches.items():
        table.add_row(code, f"{count:,}", BREACHES[code])
    return table
