"""Cases of a test that `make test` leaves to `make deep`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def deep_except(cases: Iterable[Any], kept: int | Container[Any]) -> list[Any]:
    """Return the cases of a test, marked `deep` but for those that `make test` runs too.

    Args:
        cases: arguments of `pytest.mark.parametrize`; a tuple holds the values of several parameters.
        kept: the cases that keep their marks, or a number n that keeps every n-th case, beginning with the first.
    """
    marked = []
    for number, case in enumerate(cases):
        runs = number % kept == 0 if isinstance(kept, int) else case in kept
        if not hasattr(case, "marks"):
            case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        marked.append(case if runs else case._replace(marks=(*case.marks, pytest.mark.deep)))
    return marked
