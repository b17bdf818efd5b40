"""The ALU operators once more, over Python numbers one by one, and dtypes to try them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# Each of these is exact, or correctly rounded to float32 when float64 is rounded once more (53 >= 2 * 24 + 2 bits).
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "maximum": lambda x, y: x if x > y else y,
    "minimum": lambda x, y: x if x < y else y,
    "equal": lambda x, y: float(x == y),
    "not_equal": lambda x, y: float(x != y),
    "greater": lambda x, y: float(x > y),
    "greater_equal": lambda x, y: float(x >= y),
    "less": lambda x, y: float(x < y),
    "less_equal": lambda x, y: float(x <= y),
    "logical_and": lambda x, y: float(x != 0 and y != 0),
    "logical_or": lambda x, y: float(x != 0 or y != 0),
    "logical_xor": lambda x, y: float((x != 0) != (y != 0)),
}
BITS: dict[str, Callable[[int, int, int], int]] = {
    "bitwise_and": lambda x, y, width: x & y,
    "bitwise_or": lambda x, y, width: x | y,
    "bitwise_xor": lambda x, y, width: x ^ y,
    "left_shift": lambda x, y, width: x << y if y < width else 0,
    "right_shift": lambda x, y, width: x >> y if y < width else 0,
}
DTYPES = [
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float16", "float32", "float8_e5m2"),
    ("float8_e4m3", "bfloat16", "float16"),
    ("int32", "float32", "int32"),
    ("uint8", "int8", "uint8"),
    ("int16", "uint8", "float8_e4m3"),
]
SHAPES = [(1, 5), (127, 3, 7), (128, 9)]


def scalar_by_scalar(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    flat = [np.broadcast_to(a, arrays[0].shape).reshape(-1).tolist() for a in arrays]
    return np.array([function(*values) for values in zip(*flat)], np.float64).reshape(arrays[0].shape)


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def by_bits(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    width = 8 * x.dtype.itemsize
    pairs = zip(
        bits_of(x).reshape(-1).tolist(), bits_of(np.broadcast_to(y, x.shape).copy()).reshape(-1).tolist()
    )
    words = [BITS[name](a, b, width) % 2**width for a, b in pairs]
    return np.array(words, f"u{x.dtype.itemsize}").view(x.dtype).reshape(x.shape)
