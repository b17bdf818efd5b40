"""Marks cases of a test as `deep`: `make test` leaves them out, and `make deep` runs them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def deep_except(cases: Iterable[Any], kept: int | Container[Any]) -> list[Any]:
    """Return the cases of a test, all marked `deep` except those that `make test` runs too.

    Args:
        cases: Arguments of `pytest.mark.parametrize`; a tuple has the values of several parameters.
        kept: The cases that stay unmarked, or a number n that leaves every n-th case unmarked, beginning with the
            first.
    """
    marked = []
    for number, case in enumerate(cases):
        runs = number % kept == 0 if isinstance(kept, int) else case in kept
        if not hasattr(case, "marks"):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        marked.append(case if runs else case._replace(marks=(*case.marks, pytest.mark.deep)))
    return marked
