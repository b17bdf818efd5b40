"""`neuronxcc.nki.isa`: instructions that return their result as a tile, with `dtype=` and `mask=`.

Each one rests on the planner of its name in the instruction book. Where Beta 1 names or orders parameters in
another way than NKI 0.6, the function here has Beta 1's. `**_` takes options of the compiler that change no
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from simulate.beta1.elementwise import elementwise
from simulate.beta1.isa_matmul import nc_matmul, nc_transpose
from simulate.beta1.isa_select import (
    affine_select,
    iota,
    memset,
    range_select,
    select_reduce,
    tensor_copy_predicated,
)
from simulate.beta1.isa_whole import (
    bn_aggr,
    bn_stats,
    dma_copy,
    dma_transpose,
    local_gather,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_stream_shuffle,
    sequence_bounds,
    tensor_partition_reduce,
    tensor_scalar_cumulative,
    tensor_tensor_scan,
)
from simulate.beta1.missing import not_in_beta1
from simulate.beta1.operators import operator
from simulate.beta1.reductions import reduce
from simulate.beta1.tile import Tile
from simulate.isa.enums import DgeMode, Engine, MatmulPerfMode, OobMode, ReduceCmd
from simulate.nki import constants
from simulate.run import current_core

engine = Engine
reduce_cmd = ReduceCmd
dge_mode = DgeMode
oob_mode = OobMode
matmul_perf_mode = MatmulPerfMode
tensor_engine, vector_engine, scalar_engine = Engine.tensor, Engine.vector, Engine.scalar
gpsimd_engine, unknown_engine = Engine.gpsimd, Engine.unknown


class nc_version(IntEnum):
    """The NeuronCore generations, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


def get_nc_version() -> nc_version:
    """The generation of the core that the kernel is specialised for."""
    return nc_version(current_core().hardware.generation)


def activation(
    op: Any,
    data: Tile,
    *,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Tile | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    mask: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """op(data * scale + bias) on the Scalar engine."""
    columns = {"bias": bias, "scale": scale, "reduce_res": reduce_res}
    attributes = {"op": op, "reduce_op": operator(reduce_op), "reduce_cmd": reduce_cmd, "name": name}
    return elementwise("activation", {"data": data}, columns, attributes, dtype, mask)


def activation_reduce(
    op: Any,
    data: Tile,
    *,
    reduce_op: Any = None,
    reduce_res: Tile | None = None,
    bias: Any = None,
    scale: Any = 1.0,
    mask: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """activation, with the sum of its results per partition in reduce_res."""
    columns = {"bias": bias, "scale": scale, "reduce_res": reduce_res}
    attributes = {"op": op, "reduce_op": operator(reduce_op), "name": name}
    return elementwise("activation_reduce", {"data": data}, columns, attributes, dtype, mask)


def tensor_tensor(
    data1: Tile,
    data2: Tile,
    op: Any,
    *,
    dtype: Any = None,
    mask: Any = None,
    engine: Engine = Engine.unknown,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """op(data1, data2), element by element."""
    attributes = {"op": operator(op), "engine": engine, "name": name}
    return elementwise("tensor_tensor", {"data1": data1, "data2": data2}, {}, attributes, dtype, mask)


def tensor_scalar(
    data: Tile,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
    engine: Engine = Engine.unknown,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """op1(op0(data, operand0), operand1) with numbers or (P, 1) tiles as operands."""
    columns = {"operand0": operand0, "operand1": operand1}
    attributes = {
        "op0": operator(op0),
        "reverse0": reverse0,
        "op1": operator(op1),
        "reverse1": reverse1,
        "engine": engine,
        "name": name,
    }
    return elementwise("tensor_scalar", {"data": data}, columns, attributes, dtype, mask)


def scalar_tensor_tensor(
    *,
    data: Tile,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Tile,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    mask: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """op1(op0(data, operand0), operand1) with a tile as operand1."""
    attributes = {
        "op0": operator(op0),
        "op1": operator(op1),
        "reverse0": reverse0,
        "reverse1": reverse1,
        "name": name,
    }
    tiles = {"data": data, "operand1": operand1}
    return elementwise("scalar_tensor_tensor", tiles, {"operand0": operand0}, attributes, dtype, mask)


def tensor_scalar_reduce(
    *,
    data: Tile,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Tile,
    reverse0: bool = False,
    dtype: Any = None,
    mask: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """op0(data, operand0), with its reduction over the free dims in reduce_res."""
    columns = {"operand0": operand0, "reduce_res": reduce_res}
    attributes = {"op0": operator(op0), "reduce_op": operator(reduce_op), "reverse0": reverse0, "name": name}
    return elementwise("tensor_scalar_reduce", {"data": data}, columns, attributes, dtype, mask)


def tensor_copy(
    src: Tile,
    *,
    mask: Any = None,
    dtype: Any = None,
    engine: Engine = Engine.unknown,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """A copy in SBUF."""
    return elementwise("tensor_copy", {"src": src}, {}, {"engine": engine, "name": name}, dtype, mask)


def reciprocal(data: Tile, *, dtype: Any = None, mask: Any = None, name: str | None = None, **_: Any) -> Tile:
    """1 / data on the Vector engine."""
    return elementwise("reciprocal", {"data": data}, {}, {"name": name}, dtype, mask)


def dropout(
    data: Tile, prob: Any, *, mask: Any = None, dtype: Any = None, name: str | None = None, **_: Any
) -> Tile:
    """data, with each element set to 0 with probability prob."""
    return elementwise("dropout", {"data": data}, {"prob": prob}, {"name": name}, dtype, mask)


def tensor_reduce(
    op: Any,
    data: Tile,
    axis: int | Sequence[int],
    *,
    mask: Any = None,
    dtype: Any = None,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """op over free dims of data."""
    return reduce(operator(op), data, axis, dtype, mask, negate, keepdims, name)


def __getattr__(name: str) -> Any:
    return not_in_beta1("neuronxcc.nki.isa", name)


__all__ = [
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "constants",
    "dma_copy",
    "dma_transpose",
    "dropout",
    "get_nc_version",
    "iota",
    "local_gather",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_stream_shuffle",
    "nc_transpose",
    "range_select",
    "reciprocal",
    "scalar_tensor_tensor",
    "select_reduce",
    "sequence_bounds",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
]
