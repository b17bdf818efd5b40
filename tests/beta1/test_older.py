"""Parameters of NKI 0.2 to 0.5 on the instructions of `nki.isa`."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest

import simulate.nki as nki
import simulate.nki.isa as nisa
import simulate.nki.language as nl
from nkw.errors import NkwError, RuleViolation
from simulate.nki.older import OLDER
from tests.beta1.kernels import whole_numbers

X = whole_numbers(64, 64)


def _copied(x, **older):
    tile, copy = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, x.dtype)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_copy(dst=copy, src=tile, **older)
    nisa.dma_copy(dst=out, src=copy)
    return out


@pytest.mark.parametrize("older", [{"dtype": "float32"}, {"dtype": "float16"}, {"mask": None}])
def test_an_older_parameter_warns_and_changes_nothing(older) -> None:
    with pytest.warns(DeprecationWarning, match=rf"tensor_copy\({next(iter(older))}=…\)"):
        result = nki.simulate(lambda x: _copied(x, **older))(X)
    assert result.dtype == np.float32 and np.array_equal(result, X)


def test_the_documented_call_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(nki.simulate(_copied)(X), X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refuses_an_older_value_that_has_no_equal() -> None:
    with pytest.raises(RuleViolation, match="has no masks"):
        nki.simulate(lambda x: _copied(x, mask=1))(X)

    def added(x, op):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x, dst_rmw_op=op, unique_indices=True)
        return out

    assert np.array_equal(nki.simulate(lambda x: added(x, None))(X), X)
    with pytest.raises(RuleViolation, match="does not read, modify and write"):
        nki.simulate(lambda x: added(x, nl.add))(X)


@pytest.mark.parametrize("name", ["imm", "is_moving_zero", "use_gpsimd_dma", "no_such_parameter"])
def test_refuses_a_parameter_of_another_instruction(name: str) -> None:
    with pytest.raises(NkwError, match="its parameters are dst, src, engine, name"):
        nki.simulate(lambda x: _copied(x, **{name: 1}))(X)


def test_renamed_parameters_stand_for_the_new_ones() -> None:
    def kernel(x):
        register = nisa.register_alloc()
        nisa.register_move(register, imm=42)
        cell, out = nl.ndarray((1, 1), nl.int32), nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        nisa.register_store(cell, register)
        nisa.dma_copy(dst=out, src=cell)
        return out

    with pytest.warns(DeprecationWarning, match="now: src="):
        assert nki.simulate(kernel)(X) == 42


@pytest.mark.parametrize("name", sorted(OLDER))
def test_signatures_are_the_documented_ones(name: str) -> None:
    instructions = OLDER[name].instructions or {"tensor_copy", "activation", "nc_matmul", "memset"}
    for instruction in instructions:
        assert name not in inspect.signature(getattr(nisa, instruction)).parameters
