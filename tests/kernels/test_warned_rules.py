"""The kernels of the package keep to the rules that only warn, since public kernels break them."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from simulate import Mode, World
from simulate.level import WARNED
from simulate.run.launcher import ToleratedRule
from tools.timelines import TARGETS, Case, cases

WARNING = rf"^\[({'|'.join(sorted(WARNED))})\]"


def launch(case: Case, target: str) -> None:
    """Launch a kernel without numbers. Raises ToleratedRule where it breaks a rule that warns."""
    World(target, case.ranks).launch(case.kernel, [(case.arguments, {})] * case.ranks, mode=Mode.dry)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_kernel_breaks_no_rule_that_warns(case: Case, target: str) -> None:
    launch(case, target)


def transposed_by_prepared_descriptors(x):
    tile = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=tile, src=x, dge_mode=nisa.dge_mode.none)
    return tile


def scaled_by_a_narrow_column(x):
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    column = nl.full((x.shape[0], 1), 2.0, nl.bfloat16)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=column)
    return tile


def counted_from_a_tile(x):
    nisa.register_alloc(nl.full((1, 1), 5, nl.int32))


@pytest.mark.parametrize(
    "kernel", [transposed_by_prepared_descriptors, scaled_by_a_narrow_column, counted_from_a_tile]
)
def test_a_kernel_that_breaks_a_rule_that_warns_fails_its_test(kernel) -> None:
    def stored(x):
        kernel(x)
        out = nl.ndarray((8, 8), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.zeros((8, 8), nl.float32))
        return out

    with pytest.raises(ToleratedRule, match=WARNING):
        launch(Case(stored, (np.ones((8, 8), np.float32),)), "trn2")
