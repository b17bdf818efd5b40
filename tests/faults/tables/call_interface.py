"""Calls and operands that NKI does not have."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-OPERAND", ramp(4, 4), answer=lambda x: x + 1)
def array_as_operand(x, sick):
    """A numpy array is handed to an instruction."""
    tile = nl.load(x)
    ones = np.ones((4, 4), np.float32) if sick else nl.ones((4, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=ones, op=nl.add)  # blamed
    return copied_out(tile)


@fault("NKW-MUTATION", ramp(4, 4), answer=lambda x: x)
def assigned_instruction(x, sick):
    """The handle of an instruction is assigned to a part of a tile, as in Beta 1."""
    tile = nl.load(x)
    result = nl.ndarray((4, 4), dtype=nl.float32)
    copied = nisa.tensor_copy(dst=result, src=tile)
    if sick:
        result[:, 0:4] = copied  # blamed
    else:
        result[:, 0:4] = tile
    return copied_out(result)


@fault("NKW-REGION", ramp(4, 4), answer=lambda x: x)
def buffer_by_name(x, sick):
    """The memory is named by a string."""
    tile = nl.ndarray((4, 4), dtype=nl.float32, buffer="sbuf" if sick else nl.sbuf)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


@fault("NKW-TENSOR-OPERATOR", ramp(4, 4) - 8, answer=lambda x: np.maximum(x, 0))
def decided_by_a_value(x, sick):
    """An `if` reads an element of a tile."""
    tile = nl.load(x)
    if sick and tile[0:1, 0:1] > 0:  # blamed
        return copied_out(tile)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.maximum, operand0=0.0)
    return copied_out(tile)


@fault("NKW-DTYPE", ramp(4, 8), answer=lambda x: x)
def dtype_of_a_name(x, sick):
    """A dtype that NKI does not have."""
    result = nl.ndarray((4, 8), dtype="float64" if sick else "float32")  # blamed
    nisa.tensor_copy(dst=result, src=nl.load(x))
    return copied_out(result)


@fault("NKW-SHAPE", ramp(4, 8), answer=lambda x: x[:, 0:4])
def empty_tile(x, sick):
    """A tile without columns."""
    remainder = x.shape[1] % 4
    columns = remainder if sick else 4
    tile = nl.ndarray((4, columns), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[:, 0:columns])
    return copied_out(tile)


@fault("NKW-CALL", ramp(4, 8), answer=lambda x: 2 * x)
def misspelt_keyword(x, sick):
    """A keyword argument is misspelt."""
    tile = nl.load(x)
    extra = {"operand": 2.0} if sick else {"operand0": 2.0}
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, **extra)  # blamed
    return copied_out(tile)


@fault("NKW-ENUM", ramp(4, 8), answer=lambda x: x)
def mode_by_wrong_number(x, sick):
    """The mode of a DMA is given by a number that no mode has."""
    tile = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x, oob_mode=2 if sick else nisa.oob_mode.skip)  # blamed
    return copied_out(tile)


@fault("NKW-TENSOR-OPERATOR", ramp(8, 4), answer=lambda x: 2 * x)
def numpy_function_on_a_tile(x, sick):
    """A function of numpy is called on a tile."""
    tile = nl.load(x)
    result = np.exp(tile) if sick else nl.multiply(tile, 2.0)  # blamed
    return copied_out(result)


@fault("NKW-OPERATOR", ramp(4, 8), answer=lambda x: 2 * x)
def operator_of_numpy(x, sick):
    """The operator is numpy's function, as in Beta 1."""
    tile = nl.load(x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=np.hypot if sick else nl.add)  # blamed
    return copied_out(tile)


@fault("NKW-TENSOR-OPERATOR", ramp(4, 4), ramp(4, 4), answer=lambda x, y: x + y)
def python_operator(x, y, sick):
    """Tiles are added with +."""
    left, right = nl.load(x), nl.load(y)
    total = left + right if sick else nl.add(left, right)  # blamed
    return copied_out(total)


@fault("NKW-TENSOR-SCALAR-OPERAND1", ramp(4, 4), answer=lambda x: x + 1)
def unary_with_operand(x, sick):
    """An operator of one operand is given two."""
    tile = nl.load(x)
    second = 2.0 if sick else None
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0, operand1=second)  # blamed
    return copied_out(tile)
