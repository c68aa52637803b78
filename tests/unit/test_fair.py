"""The waiting lines: fair between tenants whatever comes, and nobody waits for ever."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from arriero.workers.fair import AGING_S, Lines, Ticket

NEVER = float("inf")
_keys = itertools.count()


def ticket(tenant: str, *, level: int = 0, deadline: float = NEVER) -> Ticket:
    key = next(_keys)
    return Ticket((deadline, float(key), key), tenant, level, level)


def take(lines: Lines, level: int = 0) -> Ticket | None:
    head = lines.head(level)
    if head is not None:
        lines.leave(head)
    return head


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50)), min_size=5, max_size=60))
def test_tenants_that_always_wait_are_served_alike(costs: list[tuple[int, int, int]]) -> None:
    """The bound of the paper (theorem 4.4): served amounts differ by no more than twice the largest single one."""
    lines = Lines(1)
    names = "abc"
    sizes: dict[int, int] = {}
    for row in costs:
        for name, size in zip(names, row, strict=True):
            one = ticket(name)
            sizes[one.key] = size
            lines.enter(one, 0.0)
    served = dict.fromkeys(names, 0)
    waiting = dict.fromkeys(names, len(costs))
    while min(waiting.values()) > 0:
        head = take(lines)
        assert head is not None
        lines.charge(head.tenant, sizes[head.key])
        served[head.tenant] += sizes[head.key]
        waiting[head.tenant] -= 1
        assert max(served.values()) - min(served.values()) <= 2 * 50


def test_a_tenant_that_was_away_has_earned_no_credit() -> None:
    lines = Lines(1)
    for _ in range(20):
        lines.enter(ticket("busy"), 0.0)
    for _ in range(10):
        assert take(lines)
        lines.charge("busy", 100)
    for _ in range(5):
        lines.enter(ticket("new"), 0.0)
    order = []
    for _ in range(6):
        head = take(lines)
        assert head is not None
        order.append(head.tenant)
        lines.charge(head.tenant, 100)
    assert order.count("busy") == order.count("new") == 3


def test_deadlines_order_the_work_of_one_tenant_and_not_of_two() -> None:
    lines = Lines(1)
    late, soon, other = ticket("a", deadline=9.0), ticket("a", deadline=1.0), ticket("b")
    for one in (late, soon, other):
        lines.enter(one, 0.0)
    assert take(lines) is soon
    lines.charge("a", 1)
    assert take(lines) is other


def test_who_has_waited_goes_up_a_class_and_keeps_its_place_there() -> None:
    lines = Lines(3)
    old = ticket("a", level=2)
    lines.enter(old, 0.0)
    lines.enter(ticket("a", level=1), 1.0)
    lines.age(AGING_S)
    assert take(lines, 1) is old
    assert lines.head(2) is None


def test_one_of_a_class_goes_up_at_a_time_and_up_to_the_top() -> None:
    lines = Lines(3)
    old = [ticket("a", level=2) for _ in range(3)]
    for one in old:
        lines.enter(one, 0.0)
    for second in range(int(3 * AGING_S)):
        lines.age(float(second))
    assert [one.level for one in old] == [0, 2, 2]
    assert take(lines) is old[0]
    lines.age(3 * AGING_S)
    assert [one.level for one in old] == [0, 2, 2], "the first one runs, and is not over"
    lines.forget(old[0])
    lines.age(3 * AGING_S)
    assert [one.level for one in old] == [0, 1, 2]


def test_who_comes_back_before_its_first_entry_has_come_up_stands_once() -> None:
    lines = Lines(2)
    first, second = ticket("a", level=1), ticket("a", level=1)
    for one in (first, second):
        lines.enter(one, 0.0)
    lines.leave(second)
    lines.enter(second, 1.0)
    assert take(lines, 1) is first
    assert take(lines, 1) is second
    assert take(lines, 1) is None


def test_tenants_that_come_once_are_forgotten() -> None:
    lines = Lines(1)
    for number in range(5_000):
        lines.enter(ticket(f"t{number}"), 0.0)
        lines.charge(f"t{number}", 1.0)
        assert take(lines)
    assert len(lines._served) <= 1_001
