"""Small inputs on which every line and every branch of the shipped kernels runs, with what they have to return."""

from __future__ import annotations

from functools import lru_cache

from tools.mutants.cases.attention import attention
from tools.mutants.cases.case import Case
from tools.mutants.cases.experts import experts
from tools.mutants.cases.head import head
from tools.mutants.cases.largest import largest
from tools.mutants.cases.layer import layer
from tools.mutants.cases.other import gated_inputs, page_copies, products, rows, sums
from tools.mutants.cases.projections import projections


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """All cases, the quick ones of every kernel first."""
    return (
        *sums(),
        *rows(),
        *gated_inputs(),
        *page_copies(),
        *products(),
        *projections(),
        *attention(),
        *layer(),
        *experts(),
        *head(),
        *largest(),
    )
