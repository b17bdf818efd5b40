"""Small launches on which every line and branch of the shipped kernels runs, each with a judge of its outputs."""

from __future__ import annotations

from functools import lru_cache

from tools.mutants.cases.attention import attention
from tools.mutants.cases.case import Case
from tools.mutants.cases.convolution import convolutions, poolings
from tools.mutants.cases.delta import delta
from tools.mutants.cases.experts import experts
from tools.mutants.cases.head import head
from tools.mutants.cases.largest import largest
from tools.mutants.cases.latent import latent
from tools.mutants.cases.layer import layer
from tools.mutants.cases.other import gated_inputs, page_copies, passed_on, products, rows, sums
from tools.mutants.cases.projections import projections
from tools.mutants.cases.recurrent import recurrent


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """Return all cases; those that run quickly come first."""
    return (
        *sums(),
        *passed_on(),
        *rows(),
        *gated_inputs(),
        *page_copies(),
        *products(),
        *convolutions(),
        *poolings(),
        *projections(),
        *attention(),
        *latent(),
        *layer(),
        *experts(),
        *delta(),
        *recurrent(),
        *head(),
        *largest(),
    )
