"""The works of a decoder's attention to an encoder on one rank: Whisper large-v3, 20 heads of 64 over 1500 positions.

Each sequence has its window in a row of the caches, of which an engine has as many as sequences at once. A prompt of 4
tokens (start, language, task, no timestamps) writes keys and values; a decode step reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.kernels.works import BFLOAT16, Work
from model.layers.launch import INT32, Argument, Launch, LeastWork, Value

HEADS, DEPTH, POSITIONS = 20, 64, 1500
PROMPT = 4
SEQUENCES = (1, 4, 16)
ROWS = max(SEQUENCES)


def _value(name: str, *sizes: int, dtype: np.dtype = BFLOAT16) -> Value:
    return Value(name, sizes, dtype)


def speech_works() -> Iterator[Work]:
    """A prompt, then steps."""
    yield _work(f"prefill cross attention, Whisper large-v3, T={PROMPT}", 1, PROMPT)
    for sequences in SEQUENCES:
        yield _work(f"decode cross attention, Whisper large-v3, B={sequences}", sequences, 1)


def _work(name: str, sequences: int, tokens: int) -> Work:
    rows, width = sequences * tokens, HEADS * DEPTH
    q = _value("q", rows, width)
    caches = _value("keys", ROWS, HEADS, DEPTH, POSITIONS), _value("values", ROWS, HEADS, POSITIONS, DEPTH)
    scale, held = DEPTH**-0.5, _value("rows", sequences, 1, dtype=INT32)
    window_bytes = 2 * sequences * POSITIONS * width * BFLOAT16.itemsize
    arguments: tuple[Argument, ...]
    if tokens > 1:
        new = (_value(each, sequences * POSITIONS, width) for each in ("new_keys", "new_values"))
        arguments = (q, *new, *caches, scale, HEADS, None, 0, *(None,) * 5, False, None, held)
        kernel, passes = "attention_prefill", 2
    else:
        last = _value("last", sequences, 1, dtype=INT32)
        arguments = (
            q,
            None,
            None,
            *caches,
            last,
            scale,
            HEADS,
            *(None,) * 4,
            1e-6,
            *(None,) * 7,
            1,
            None,
            held,
        )
        kernel, passes = "attention_decode", 1
    least = LeastWork(4.0 * rows * width * POSITIONS, float(2 * q.nbytes + passes * window_bytes))
    return Work(name, None, 0, least, (Launch(kernel, arguments, ("o",), least, rows),))
