"""The llama.cpp backend, over llama-cpp-python's low-level calls.

gguf_check.py   a file's header, checked before llama.cpp sees it
plan.py         memory, before anything is loaded
model.py        loading: devices, memory, context
vocab.py        text to tokens, tokens to bytes; whose control tokens count
template.py     chat templates in a sandbox
batch.py        one step's tokens in llama.cpp's arrays
grammar.py      output that has a form
sampling.py     from logits to the next token
backend.py      all of it behind the seam
"""
