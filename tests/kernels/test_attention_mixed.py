"""attention_mixed: what decodes and prompts in one launch get what each kind gets in a launch of its own."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import as_tuple, copied, normal, run
from tests.kernels.case import DTYPES, F32, KernelCase, KernelTests, Settings, refuse, vary
from tests.kernels.test_attention_prefill import attended

SINKS = normal(12, 1, 4)
PAGE = 16
CAPACITY = 128
"""Positions that the tables of what decodes name."""


def mixed(
    firsts: tuple[int, ...] = (0, 70, 125),
    new: int = 1,
    valid: tuple[int, ...] = (33, 0),
    tokens: int = 20,
    prefix: int = 48,
    heads: tuple[int, int] = (4, 2),
    depth: int = 16,
    dtype: Any = F32,
    **options: Any,
) -> tuple[Any, ...]:
    """Draw sequences that decode from some positions on and prompts behind others; an unread page pads tables."""
    (q_heads, kv_heads), pages_per_sequence = heads, CAPACITY // PAGE
    blocks = [pages_per_sequence] * len(firsts) + [
        -(-(max(prefix, start) + tokens) // PAGE) for start in valid
    ]
    count = sum(blocks) + 1
    pages = np.random.default_rng(7).permutation(count - 1)
    tables = np.split(pages, np.cumsum(blocks)[:-1])
    width = max(blocks[len(firsts) :])
    padded = [np.append(table, [count - 1] * (width - len(table))) for table in tables[len(firsts) :]]
    lengths = [(first, new) for first in firsts] + [(first, tokens) for first in valid]
    positions = [first + np.arange(length) for first, length in lengths]
    slots = [
        table[token_positions // PAGE] * PAGE + token_positions % PAGE
        for table, token_positions in zip(tables, positions)
    ]
    caches = [normal(seed, count, PAGE, kv_heads, depth, dtype=dtype) for seed in (8, 9)]
    for table, (first, _) in zip(tables, lengths):
        for cache in caches:
            behind = cache[table].reshape(-1, kv_heads, depth)
            behind[first:] = np.nan
            cache[table] = behind.reshape(len(table), PAGE, kv_heads, depth)
    rows = sum(length for _, length in lengths)
    q, k, v = (
        normal(seed, rows, head_count * depth, dtype=dtype)
        for seed, head_count in enumerate((q_heads, kv_heads, kv_heads))
    )
    first_tables, last_tables = np.stack(tables[: len(firsts)]), np.stack(padded)
    return (
        *(q, *caches, _column(positions), depth**-0.5, new * len(firsts), k, v, kv_heads, _column(slots)),
        *(first_tables.astype(np.int32), last_tables.astype(np.int32), prefix),
        *(options.get(name) for name in ("window", "softcap", "sinks")),
    )


def _column(numbers: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(numbers)[:, None].astype(np.int32)


def stored(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a second layer, which reads what the first one wrote to the caches."""
    _, *caches = kernels.attention_mixed_reference(*copied(inputs))
    return inputs[0], *caches, *inputs[3:6], None, None, *inputs[8:]


def apart(inputs: tuple[Any, ...], target: str) -> tuple[np.ndarray, ...]:
    """Return the outputs of two launches, one for each kind of rows."""
    q, *caches, positions, scale, rows, k, v, kv_heads, slots, tables, prompts, prefix, window, cap, sinks = (
        copied(inputs[:16])
    )
    step_rows = [None if new_rows is None else new_rows[:rows] for new_rows in (k, v)]
    prompt_rows = [None if new_rows is None else new_rows[rows:] for new_rows in (k, v)]
    kernel_window = None if window is None or window >= CAPACITY else window
    decoded = run(
        kernels.attention_decode,
        (q[:rows], *caches, positions[:rows], scale, *step_rows, kv_heads, *(None,) * 4, 0.0)
        + (None if k is None else slots[:rows], tables, kernel_window, cap, sinks),
        target,
    )
    first, *caches = as_tuple(decoded) if k is not None else (decoded, *caches)
    length = prefix + (len(q) - rows) // len(prompts)
    kernel_window = None if window is None or window >= length else window
    last = run(
        kernels.attention_prefill,
        (
            q[rows:],
            *caches,
            scale,
            *prompt_rows,
            kv_heads,
            positions[rows:],
            prefix,
            slots[rows:],
            prompts,
            kernel_window,
            cap,
            sinks,
        ),
        target,
    )
    o, *caches = as_tuple(last)
    return np.concatenate([first, o]), *caches


MASKS: list[Settings] = [
    dict(new=3) | options for options in ({"window": 30}, {"window": 100}, {"softcap": 2.0}, {"sinks": SINKS})
]
"""A window of 100 positions is one to what decodes, and none to the prompts, of 68 keys."""


class TestAttentionMixed(KernelTests):
    case = KernelCase(
        kernels.attention_mixed,
        mixed,
        values=[
            *vary(firsts=(5,), valid=(7,), tokens=[1, 127, 128, 129, 200], prefix=16),
            *vary(
                firsts=[tuple(range(rows)) for rows in (1, 43, 127, 128)],
                valid=(3,),
                tokens=3,
                prefix=0,
                heads=(1, 1),
                depth=8,
            ),
        ],
        every_chip=vary(dtype=[*DTYPES]) + MASKS,
        refusals=[
            refuse("decoding is 0 of 43 rows; there have to be rows of both kinds", decoding=lambda _: 0),
            refuse("decoding is 43 of 43 rows; there have to be rows of both kinds", decoding=lambda _: 43),
            refuse("positions have to be [43, 1], not (42, 1)", positions=lambda positions: positions[1:]),
            refuse("slots have to be [43, 1], not None", slots=lambda _: None),
            refuse("slots have to be [43, 1], not (42, 1)", slots=lambda slots: slots[1:]),
            refuse("give block_tables and prompt_tables", block_tables=lambda _: None),
            refuse("give block_tables and prompt_tables", prompt_tables=lambda _: None),
        ],
        tolerance=attended,
        replays=False,
    )


@wraps(mixed)
def draw_second_layer(**settings: Any) -> tuple[Any, ...]:
    """Draw the arguments of a layer that reads the caches which another one wrote."""
    return stored(mixed(**settings))


class TestAttentionMixedOfStoredKeys(KernelTests):
    case = KernelCase(
        kernels.attention_mixed, draw_second_layer, every_chip=vary(new=2, dtype=[*DTYPES]), replays=False
    )


class TestAttentionMixedOnTwoCores(KernelTests):
    case = KernelCase(
        kernels.attention_mixed,
        mixed,
        two_sums=vary(firsts=[(9,), (9, 70, 125)], heads=[(4, 2), (4, 1), (1, 1)]),
        tolerance=attended,
        seeds=4,
    )


@pytest.mark.parametrize("settings", MASKS + vary(dtype=[*DTYPES]))
def test_both_kinds_of_rows_get_what_their_own_launches_give(settings: Settings) -> None:
    case = TestAttentionMixed.case
    arguments = case.arguments(settings)
    for together, alone in zip(case.run(arguments), apart(tuple(arguments.values()), "trn2"), strict=True):
        assert np.array_equal(together, alone, equal_nan=True)
