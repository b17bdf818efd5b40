"""Tiles and calls for the instruction tests: planning without a machine, and carrying out one instruction.

`tile` makes an operand of any shape, dtype and memory that holds no bytes: enough to plan with. `execute` runs one
instruction in a kernel of its own, on operands given as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nkw.errors import NkwError
from nkw.targets import GENERATIONS
from simulate.hardware import hardware
from simulate.isa import INSTRUCTIONS, Plan, plan_for
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.numerics import as_dtype
from simulate.world import launch

TARGETS = tuple(GENERATIONS.values())
PARTITIONS = (1, 127, 128)
SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
HBM, SHARED_HBM = MemoryRegion.private_hbm, MemoryRegion.shared_hbm


def tile(
    shape: tuple[int, ...], dtype: str = "float32", buffer: MemoryRegion = SBUF, start_partition: int = 0
) -> NkiTensor:
    """Make an operand without bytes; on chip it starts at partition `start_partition` of its allocation."""
    element = as_dtype(dtype)
    storage = Storage(
        (shape[0] + start_partition, *shape[1:]), element, buffer, "", array=np.empty(0, np.uint8), fresh=True
    )
    allocation = NkiTensor(storage.shape, element, storage)
    return NkiTensor.from_storage(
        shape, element, storage, allocation.strides, start_partition * allocation.strides[0]
    )


def plan(target: str, name: str, **arguments: Any) -> Plan:
    """Return the plan of one call."""
    return plan_for(name, hardware(target), **arguments)


def refuses(code: str, target: str, name: str, **arguments: Any) -> NkwError:
    """Assert that a call is refused with `code`; returns the error."""
    with pytest.raises(NkwError) as caught:
        plan(target, name, **arguments)
    assert caught.value.code == code, str(caught.value)
    return caught.value


def twins(
    target: str,
    name: str,
    call: Callable[..., dict[str, Any]],
    *rows: tuple[str, dict[str, Any], dict[str, Any]],
) -> Callable[..., None]:
    """Make a test of refusals, each with its accepted twin: rows of a code and the changes in `call`, bad and good."""

    @pytest.mark.parametrize(("code", "bad", "good"), rows)
    def test(code: str, bad: dict[str, Any], good: dict[str, Any]) -> None:
        plan(target, name, **call(**good))
        refuses(code, target, name, **call(**bad))

    return test


def like(value: NkiTensor, **changes: Any) -> NkiTensor:
    """Return an operand with the shape, dtype and memory of another, but for the changes."""
    arguments = {"shape": value.shape, "dtype": str(value.dtype), "buffer": value.buffer, **changes}
    return tile(arguments.pop("shape"), **arguments)


@dataclass(frozen=True)
class Given:
    """An operand with values: where it lies, and its dtype where the array's does not tell (tfloat32, bool_, x4)."""

    values: np.ndarray
    buffer: MemoryRegion = SBUF
    dtype: str | None = None


@dataclass(frozen=True)
class Fresh:
    """A destination without values."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    buffer: MemoryRegion = SBUF


def execute(target: str, name: str, **arguments: Any) -> dict[str, np.ndarray]:
    """Carry out one instruction; the contents of its `Fresh` and of its written `Given` operands afterwards.

    An array stands for a tile in SBUF that holds it.
    """
    return execute_all(target, [(name, arguments)])


def execute_all(target: str, calls: list[tuple[str, Mapping[str, Any]]]) -> dict[str, np.ndarray]:
    """Carry out instructions one after the other; operands of one name are one tile, made by the first that has it."""
    operands: dict[str, Given | Fresh] = {}
    for _, arguments in calls:
        for key, value in arguments.items():
            made = Given(value) if isinstance(value, np.ndarray) else value
            if isinstance(made, (Given, Fresh)):
                operands.setdefault(key, made)
    arrays = {key: o.values for key, o in operands.items() if isinstance(o, Given)}

    def kernel(tensors: dict[str, NkiTensor]) -> dict[str, NkiTensor]:
        tiles = {key: _placed(operand, tensors.get(key)) for key, operand in operands.items()}
        written: dict[str, NkiTensor] = {}
        for name, arguments in calls:
            getattr(nisa, name)(**{key: tiles.get(key, value) for key, value in arguments.items()})
            for key in arguments:
                if key in RESULTS and key in tiles:
                    written[key] = tiles[key]
        return {key: _stored(t) for key, t in written.items()}

    outputs: dict[str, np.ndarray] = launch(kernel, [((arrays,), {})], hardware(target)).outputs[0]
    return outputs


RESULTS = ("dst", "reduce_res", "dst_idx")
"""The parameters that instructions write to."""


def _placed(operand: Given | Fresh, tensor: NkiTensor | None) -> NkiTensor:
    if isinstance(operand, Fresh):
        return nl.ndarray(operand.shape, operand.dtype, operand.buffer)
    assert tensor is not None
    dtype = operand.dtype or tensor.dtype
    if operand.buffer in (HBM, SHARED_HBM):
        return tensor.view(dtype)
    loaded = nl.load(tensor)
    if operand.buffer is SBUF:
        return loaded.view(dtype)
    placed = nl.ndarray(tensor.shape, dtype, PSUM)
    nisa.tensor_copy(dst=placed.view(tensor.dtype), src=loaded)
    return placed


def _stored(result: NkiTensor) -> NkiTensor:
    bits = result.view(str(result.dtype.storage))
    if result.buffer is PSUM:
        copied = nl.ndarray(bits.shape, bits.dtype)
        nisa.tensor_copy(dst=copied, src=bits)
        bits = copied
    out = nl.ndarray(bits.shape, bits.dtype, SHARED_HBM)
    nisa.dma_copy(dst=out, src=bits)
    return out


def _accumulating(p: int) -> dict[str, Any]:
    return {
        "dst": tile((p, 8)),
        "data": tile((p, 8)),
        "op": nl.copy,
        "bias": tile((p, 1)),
        "scale": tile((p, 1)),
        "reduce_op": nl.add,
        "reduce_res": tile((p, 1)),
    }


HEALTHY: dict[str, Callable[[int], dict[str, Any]]] = {
    "activation": lambda p: {**_accumulating(p), "reduce_cmd": nisa.reduce_cmd.reset_reduce},
    "activation_reduce": _accumulating,
    "affine_select": lambda p: {
        "dst": tile((p, 8)),
        "pattern": [[1, 8]],
        "channel_multiplier": 1,
        "on_true_tile": tile((p, 8)),
        "on_false_value": 0.0,
    },
    "iota": lambda p: {"dst": tile((p, 8), "int32"), "pattern": [[1, 8]]},
    "max8": lambda p: {"dst": tile((p, 8)), "src": tile((p, 16))},
    "memset": lambda p: {"dst": tile((p, 8)), "value": 1},
    "nc_find_index8": lambda p: {
        "dst": tile((p, 8), "uint32"),
        "data": tile((p, 16)),
        "vals": tile((p, 8)),
    },
    "nc_match_replace8": lambda p: {
        "dst": tile((p, 16)),
        "data": tile((p, 16)),
        "vals": tile((p, 8)),
        "imm": 0.0,
        "dst_idx": tile((p, 8), "uint32"),
    },
    "nc_matmul": lambda p: {
        "dst": tile((8, 16), buffer=PSUM),
        "stationary": tile((p, 8)),
        "moving": tile((p, 16)),
    },
    "nc_transpose": lambda p: {"dst": tile((8, p), buffer=PSUM), "data": tile((p, 8))},
    "reciprocal": lambda p: {"dst": tile((p, 8)), "data": tile((p, 8))},
    "scalar_tensor_tensor": lambda p: {
        "dst": tile((p, 8)),
        "data": tile((p, 8)),
        "op0": nl.add,
        "operand0": tile((p, 1)),
        "op1": nl.multiply,
        "operand1": tile((p, 8)),
    },
    "tensor_copy": lambda p: {"dst": tile((p, 8)), "src": tile((p, 8))},
    "tensor_reduce": lambda p: {"dst": tile((p, 1)), "op": nl.add, "data": tile((p, 8)), "axis": 1},
    "tensor_scalar": lambda p: {
        "dst": tile((p, 8)),
        "data": tile((p, 8)),
        "op0": nl.multiply,
        "operand0": tile((p, 1)),
        "op1": nl.add,
        "operand1": tile((p, 1)),
    },
    "tensor_tensor": lambda p: {
        "dst": tile((p, 8)),
        "data1": tile((p, 8)),
        "data2": tile((p, 8)),
        "op": nl.add,
    },
}
"""A call that every chip accepts, for each instruction on tiles, with `p` partitions."""

for _name in list(HEALTHY):
    assert _name in INSTRUCTIONS
TILE_OPERANDS = [
    (name, operand)
    for name, call in HEALTHY.items()
    for operand, value in call(8).items()
    if isinstance(value, NkiTensor)
]
"""Every (instruction, operand) that is a tile."""


def healthy(name: str, p: int = 8, /, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a healthy call with some replaced."""
    return {**HEALTHY[name](p), **changes}
