"""What a live worker says of itself on the token bus, so that clients can tell a slow fleet from none."""

from __future__ import annotations

import msgspec


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    worker: str
    pool: str
    models: list[str]
    """Names that jobs may ask for."""
    slots: int
    n_ctx_sequence: int
    """Longest sequence, prompt and output together, in tokens."""
    chat: bool = True
    device: str = "cpu"
    started_ms: int = 0
    claims: int = 0
    """Partitions owned."""
    running: int = 0
    waiting: int = 0
