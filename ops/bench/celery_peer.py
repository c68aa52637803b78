"""The peer of `arriero bench queue`: Celery doing nothing, as safely as it can.

Run by Celery's own worker, so the addresses come from the environment: REDIS_BROKER and REDIS_RESULTS.
"""

from __future__ import annotations

import os

from celery import Celery

app = Celery("peer", broker=os.environ.get("REDIS_BROKER"), backend=os.environ.get("REDIS_RESULTS"))
app.conf.update(
    # A task is taken off the queue when it is done, and comes back when its process dies: what Arriero promises, too,
    # but for "exactly one result".
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_hijack_root_logger=False,
)


@app.task(name="echo")  # type: ignore[untyped-decorator]
def echo(prompt: str) -> str:
    """What the echo engine does."""
    return prompt
