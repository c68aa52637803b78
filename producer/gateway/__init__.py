"""The HTTP door: OpenAI's completions, and jobs with their streams. Thin: what it knows, the client knows.

app.py           routes, limits, errors, serving
completions.py   /v1/completions and /v1/chat/completions, whole or streamed
jobs.py          /v1/jobs: state, event stream, cancel
fleet.py         /v1/models, /healthz, /readyz, /metrics
sse.py           server-sent events
gate.py          what the handlers share
metrics.py       the gauges
"""

from arriero.producer.gateway.app import make_app, serve

__all__ = ["make_app", "serve"]
