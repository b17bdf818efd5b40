"""How far two evaluations of one thing in float32 may lie apart."""

from __future__ import annotations

import numpy as np


def rounding_bound(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> float:
    """Return how far two float32 evaluations of one attention output may lie apart.

    A score is a sum of `depth` products, off by at most depth + 2 roundings of the sum of their magnitudes; a
    weight is off by twice that, relatively, and by the roundings of exp, sum, correction and division; the output is
    a mean of values with these weights.
    """
    unit = 2.0**-24
    depth, keys = q.size, k.shape[0]
    score = (depth + 2) * unit * scale * float((np.abs(q) * np.abs(k)).sum(axis=1).max())
    return 2 * float(np.abs(v).max()) * (2 * score + (2 * keys + 16) * unit)
