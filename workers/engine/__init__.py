"""The engine: from prepared work to tokens and text.

seam.py      what goes in, what comes out, what a model must be able to do
runner.py    the engine thread, its queue and its end
turns.py     what it does in one turn: plan, seat, step, text, limits
text.py      characters and stop strings across the borders of tokens
echo.py      a backend without a model, for tests and benchmarks
llama/       the llama.cpp backend

(What shares a step is decided in workers/schedule.py.)
"""
