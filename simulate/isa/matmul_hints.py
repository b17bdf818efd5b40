"""Hints of nc_matmul: operands that the kernel declares to have ones and zeros only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nkw.errors import RuleViolation, rule


def build_hint_rule(stationary: bool, moving: bool) -> Callable[..., None] | None:
    """Return a function that refuses declared operands with other values than 0 and 1; None if no operand is declared.

    The function takes the stationary and the moving operand's values.

    Args:
        stationary: Whether is_stationary_onezero was given.
        moving: Whether is_moving_onezero was given.
    """
    if not (stationary or moving):
        return None

    def check(weights: np.ndarray, rows: np.ndarray) -> None:
        for operand, values, hint in (("stationary", weights, stationary), ("moving", rows, moving)):
            if hint:
                holds_ones_and_zeros(operand, values)

    return check


@rule("NKW-MATMUL-ONEZERO", limit="0 and 1", hint="leave is_stationary_onezero and is_moving_onezero out")
def holds_ones_and_zeros(operand: str, values: np.ndarray) -> None:
    """is_stationary_onezero and is_moving_onezero declare that a tile has ones and zeros only.

    Raises RuleViolation if the values have another number; applied to an operand that is declared so.
    """
    wide = values.astype(np.float32)
    wrong = wide[(wide != 0) & (wide != 1)]
    if wrong.size:
        raise RuleViolation(holds_ones_and_zeros, f"{operand} has {wrong[0]:g}")
