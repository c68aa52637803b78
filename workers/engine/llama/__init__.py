"""The llama.cpp backend, over llama-cpp-python's low-level calls.

gguf_check.py   a file's header, checked before llama.cpp sees it
model.py        loading: devices, memory, context
vocab.py        text to tokens, tokens to bytes; whose control tokens count
template.py     chat templates in a sandbox
batch.py        one step's tokens in llama.cpp's arrays
sampling.py     from logits to the next token
backend.py      all of it behind the seam
"""
