"""What public kernels still write: enums by the value of a member."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.nki import isa as nisa
from simulate.nki import jit
from simulate.nki import language as nl


def copied(x, **how):
    tile, out = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x, **how)
    nisa.dma_copy(dst=out, src=tile)
    return out


@pytest.mark.parametrize("how", [{"dge_mode": 3}, {"oob_mode": 0}, {"dge_mode": nisa.dge_mode.none}])
def test_the_documented_number_of_a_member_stands_for_it(how) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(jit(copied)(x, **how), x)


@pytest.mark.parametrize("how", [{"dge_mode": 4}, {"dge_mode": True}, {"oob_mode": "skip"}])
def test_no_other_value_does(how) -> None:
    with pytest.raises(RuleViolation, match="NKW-ENUM"):
        jit(copied)(np.ones((3, 4), np.float32), **how)


def test_a_pattern_outside_the_storage_is_refused_where_it_is_used() -> None:
    def kernel(x, used):
        tile = nl.ndarray(x.shape, x.dtype)
        outside = tile.ap([[4, 3], [1, 4]], offset=1)
        nisa.dma_copy(dst=outside if used else tile, src=x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.tensor_copy(dst=tile, src=outside if used else tile)
        nisa.dma_copy(dst=out, src=tile)
        return out

    x = np.ones((3, 4), np.float32)
    assert np.array_equal(jit(kernel)(x, False), x)
    with pytest.raises(RuleViolation, match=r"NKW-BOUNDS.*\n.*elements 1 to 12"):
        jit(kernel)(x, True)


def test_generations_are_in_order() -> None:
    gen2, gen3, gen4 = nisa.nc_version.gen2, nisa.nc_version.gen3, nisa.nc_version.gen4
    assert gen2 < gen3 < gen4 and gen4 >= gen3 >= gen3 and not gen2 >= gen3
    with pytest.raises(TypeError):
        gen2 < 3  # noqa: B015
