"""Which jobs crash workers. Pure: from a job's crash reports to what is done with it.

Only crashes count that a supervisor has reported (signals that say a fault, the out-of-memory killer, its own
watchdog); kills, deploys, fencings and lost hosts blame nobody. A report names every job that was in the crashed
operation, so one report says little and several say much:

    innocent    until a second crash in a row, or a third in all
    suspect     decodes alone from then on: a crash alone has one cause
    convicted   two crashes alone: dead-lettered, so that the others may run

Tokens gained between two crashes say that the first was another's: the crashes in a row begin again, the others never
do. Company alone convicts nobody (a job may be beside two guilty ones for as many crashes as those take to be found),
but for a number that no innocent comes to.
"""

from __future__ import annotations

from typing import Final, Literal

from arriero.schemas.event import Error
from arriero.schemas.state import JobState

SUSPECT_IN_ROW: Final = 2
"""No job with fewer crashes in all is anything but innocent."""
SUSPECT_IN_ALL: Final = 3
CONVICT_ALONE: Final = 2
CONVICT_IN_ALL: Final = 8
WORKER_CRASHED: Final = "worker_crashed"
"""Reason and code of what is convicted."""

Verdict = Literal["innocent", "suspect", "convicted"]


def verdict(state: JobState | None) -> Verdict:
    """On a job, or a record, with this state."""
    if state is None:
        return "innocent"
    if state.crashes_alone >= CONVICT_ALONE or state.crashes >= CONVICT_IN_ALL:
        return "convicted"
    suspect = state.crashes_in_row >= SUSPECT_IN_ROW or state.crashes >= SUSPECT_IN_ALL
    return "suspect" if suspect else "innocent"


def conviction(state: JobState) -> Error:
    """What is told of one that is convicted."""
    return Error(
        WORKER_CRASHED,
        f"its workers crashed {state.crashes} times with it, {state.crashes_alone} of them with nothing else at work",
    )
