"""Requests of many clients, whoever sends them."""

from __future__ import annotations

import random
from typing import Any

LEAVES = 3
"""Every third request is left by its client."""


def arguments(number: int) -> dict[str, Any]:
    """Return the arguments of the request of a number."""
    draw = random.Random(number)
    return {
        "prompt": "Tom had" + " a big dog" * draw.randrange(12),
        "max_tokens": draw.randrange(2, 40),
        "temperature": draw.choice([0.0, 0.7]),
        "seed": number,
    }
