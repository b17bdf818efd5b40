"""Works of a decoder's cross attention on one rank: Whisper large-v3, 20 heads of 64 over 1500 encoder positions.

Each sequence has the keys and values of its encoder output in one row of the caches, which have as many rows as
sequences run at once. A prompt of 4 tokens (start, language, task, no timestamps) writes keys and values; a decode
step reads them.
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
    """Return a tensor argument of a name and shape, bfloat16 unless `dtype` is given."""
    return Value(name, sizes, dtype)


def speech_works() -> Iterator[Work]:
    """Yield the works of cross attention: a prompt's, then the decode steps'."""
    yield _work(f"prefill cross attention, Whisper large-v3, T={PROMPT}", 1, PROMPT)
    for sequences in SEQUENCES:
        yield _work(f"decode cross attention, Whisper large-v3, B={sequences}", sequences, 1)


def _work(name: str, sequences: int, tokens: int) -> Work:
    """Return the work of cross attention for `tokens` new tokens of each sequence: a prompt if more than one."""
    rows, width = sequences * tokens, HEADS * DEPTH
    q = _value("q", rows, width)
    window_bytes = 2 * sequences * POSITIONS * width * BFLOAT16.itemsize
    arguments: dict[str, Argument] = {
        "q": q,
        "k": None,
        "v": None,
        "k_cache": _value("keys", ROWS, HEADS, DEPTH, POSITIONS),
        "v_cache": _value("values", ROWS, HEADS, POSITIONS, DEPTH),
        "scale": DEPTH**-0.5,
        "num_kv_heads": HEADS,
        "cache_rows": _value("rows", sequences, 1, dtype=INT32),
    }
    if tokens > 1:
        arguments["k"] = _value("new_keys", sequences * POSITIONS, width)
        arguments["v"] = _value("new_values", sequences * POSITIONS, width)
        arguments["causal"] = False
        kernel, passes = "attention_prefill", 2
    else:
        arguments["positions"] = _value("last", sequences, 1, dtype=INT32)
        kernel, passes = "attention_decode", 1
    least = LeastWork(4.0 * rows * width * POSITIONS, float(2 * q.nbytes + passes * window_bytes))
    return Work(name, None, 0, least, (Launch(kernel, arguments, ("o",), least, rows),))
