"""The software pipeline of decode attention: the order in which the stages of its items are issued.

Each engine works in program order, so the stages of different groups alternate: while the Tensor engine scores one
group, the Vector engine finds the maximum of the one before, whose exponentials the product of a third one hides. Work
that has queries for several passes over a loaded group takes one item of the pipeline for each.
"""

from __future__ import annotations

from nki_kernels.decode.loads import transpose_next, write_keys, write_values
from nki_kernels.decode.stages import (
    CLEARED_EARLY,
    CLEARED_EARLY_STORED,
    CLEARED_IN,
    add_values,
    clear_piece,
    find_largest,
    score_keys,
    spread_largest,
    weigh,
)


def run(work):
    """The pipeline over all groups, once the new tokens are there."""
    behind = 2 if not work.sizes.keys_first else 1 + work.items
    early = CLEARED_EARLY_STORED if work.sizes.stored else CLEARED_EARLY
    for step in range(work.items + behind):
        if step < work.items:
            score_keys(work, step)
            transpose_next(work, step, 0)
        if 1 <= step <= work.items:
            find_largest(work, step - 1)
        for piece in range(early):
            clear_piece(work, step - behind + 1, piece)
        if 1 <= step <= work.items:
            spread_largest(work)
        if step == work.items + 1 and work.sizes.keys_first:
            write_keys(work)
        if step >= behind:
            add_values(work, step - behind)
        if 1 <= step <= work.items:
            weigh(work, step - 1)
        for piece in range(early, CLEARED_IN):
            clear_piece(work, step - behind + 1, piece)
        if step < work.items:
            transpose_next(work, step, 1)
    if not work.sizes.stored:
        write_values(work)
