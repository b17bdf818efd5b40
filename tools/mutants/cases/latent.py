"""Cases of latent attention: decode steps on the latents, and keys and values of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.kernels.test_latent_attention import batch, expansion
from tools.mutants.cases.case import BF16, Case, by_reference, two_cores


def clamped(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments whose rotary tables have 70 positions, so that later tokens use the last row."""
    kv, cache, positions, norm, eps, cos, sin, *weights = arguments
    return (kv, cache, np.minimum(positions, 69), norm, eps, cos[:70], sin[:70], *weights)


def latent() -> list[Case]:
    """Return decode steps on the latents, and expansions of latents to keys and values of prompts."""
    small, wide = (3, 24, 8, 16, 12), (4, 136, 8, 16, 20)
    decode = [
        ("trn2", batch([0, 130], small, 172)),
        ("trn1", batch([0, 3, 100], small, 300, 3)),
        ("trn2", batch([200, 17], wide, 384, block=16)),
        ("trn2", batch([200, 17], small, 256, block=1)),
        ("trn2", batch([1200], small, 1300)),
        ("trn2", batch([1100], small, 1152, block=64)),
        ("trn2", batch([5, 9], (17, 512, 8, 8, 4), 12)),
        ("trn3", batch([300], (5, 136, 8, 16, 300), 384, 2, dtype=BF16, block=128)),
        ("trn2", batch([20, 7], (70, 24, 8, 122, 4), 2304, dtype=BF16, weight_dtype=np.float32)),
    ]
    prompts: list[tuple[str, Any]] = [
        ("trn2", expansion(batch([0, 0], small, 172, 140), 3)),
        ("trn1", expansion(batch([60, 128], wide, 256, 60, block=16), 4, 128)),
        (
            "trn2",
            expansion(
                batch([5, 9], (40, 136, 8, 122, 20), 100, 70, dtype=BF16, weight_dtype=np.float32), 40, 10
            ),
        ),
        ("trn2", expansion(batch([20], small, 100, 70), 3, 100)),
        ("trn2", expansion(batch([0], small, 640, 520, block=16), 3)),
        ("trn2", expansion(batch([300], small, 640, 40, block=16), 3, 600)),
        ("trn2", expansion(batch([500], small, 1024, 30, block=2), 3, 500)),
        ("trn2", clamped(expansion(batch([0], small, 128, 100, block=16), 3))),
    ]
    # Without a prefix no page is read, and positions are those of the rows of tables that are long enough.
    unread = {4: ("block_tables", "positions"), 7: ("block_tables",)}
    cases = [by_reference("latent_attention_decode", target, *arguments) for target, arguments in decode]
    cases += [
        replace(by_reference("latent_keys_values", target, *arguments), unread=unread.get(number, ()))
        for number, (target, arguments) in enumerate(prompts)
    ]
    return [*cases, two_cores(cases[0]), two_cores(cases[-1])]
