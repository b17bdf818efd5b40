"""How `.indirect` operands are drawn: another draw's operands, gathered from or scattered into larger tiles (gen4)."""

from __future__ import annotations

import numpy as np

from simulate.isa.rules import first_partition
from tests.oracle.draw import Draw, Tile
from tests.oracle.formats import FORMATS
from tests.oracle.machine import Operand
from tests.oracle.streams.common import DRAWS, PLAIN, Arguments

GATHERED = {
    "tensor_copy": ("src",),
    "tensor_copy_predicated": ("predicate",),
    "tensor_tensor": ("data1",),
    "tensor_scalar": ("data",),
    "tensor_reduce": ("data",),
    "tensor_scalar_cumulative": ("src",),
    "tensor_scalar_reduce": ("data",),
    "activation": ("data",),
    "activation_reduce": ("data",),
    "activate2": ("data",),
    "exponential": ("src",),
    "nc_matmul": ("stationary", "moving"),
    "nc_matmul_mx": (),  # the simulator scatters its result, and refuses to gather data and scales by one index
}
"""The operands that may be gathered."""
_LEADS = {"nc_matmul_mx": "stationary"}
"""Whose partition a scattered dst's index starts on, where that is not the first of those."""
_TENSOR_ENGINE = ("nc_matmul", "nc_matmul_mx")
_SCALAR_ENGINE = ("activation", "activation_reduce", "activate2")


def drawn(d: Draw, name: str) -> Arguments | None:
    """Draw a call of an instruction, now and then with `.indirect` operands."""
    if d.generation >= 4 and name == "dma_copy" and d.chance(0.15):
        return _dma(d)
    if d.generation < 4 or name not in GATHERED or not d.chance(0.2):
        return DRAWS[name](d)
    usual, d.partitions = d.partitions, [16, 32, d.pick((8, 64, 128))]
    arguments = DRAWS[name](d)
    d.partitions = usual
    if arguments is not None and _takes_indirect(name, arguments):
        _put_in(d, name, arguments)
    return arguments


def _takes_indirect(name: str, call: Arguments) -> bool:
    if name == "nc_matmul":
        usual = "perf_mode" not in call and not call.get("is_transpose") and "tile_size" not in call
        return usual and call["stationary"].oracle.format.bytes < 4
    if name == "tensor_scalar":
        return not {call["dst"].dtype, call["data"].dtype} <= {"int32", "uint32"}
    if name == "tensor_reduce":
        return len(call["data"].shape) == 2
    return not (name == "tensor_copy" and call.get("engine") == "gpsimd")


def _put_in(d: Draw, name: str, call: Arguments) -> None:
    group = 32 if name in _TENSOR_ENGINE else 16
    for key in GATHERED[name]:
        if d.chance(0.7) and _fits(call[key], group):
            call[key] = _indirect(d, call[key], group, int(first_partition(call[key].simulated)), True)
    on_scalar = name in _SCALAR_ENGINE or call.get("engine") == "scalar"
    dst, leader = call["dst"], call[_LEADS.get(name) or GATHERED[name][0]]
    indexed = leader.oracle.offsets is not None
    start = int(first_partition(leader.simulated.dynamic.index if indexed else leader.simulated))
    starts = range(0, 128, 32 if dst.shape[0] <= 32 else 64 if dst.shape[0] <= 64 else 128)
    in_reach = start in starts and not (on_scalar and dst.buffer == "psum")
    if d.chance(0.5) and _fits(dst, group) and in_reach:
        call["dst"] = _indirect(d, dst, group, start, False)
        if name in _TENSOR_ENGINE:
            call["accumulate"] = d.pick((None, False))


def _dma(d: Draw) -> Arguments:
    """Draw a DMA between a tile and a listed one, whose offsets may be out of range: refused or skipped."""
    p, f, dtype = d.pick((16, 32, 64, 128)), d.upto(40), d.dtype()
    other = d.tile(p, f, dtype if d.chance(0.7) else d.dtype(PLAIN), "hbm" if d.chance(0.5) else "sbuf")
    start = d.pick(
        [partition for partition in (0, 32, 64) if partition + p <= 128 and (p <= 32 or partition % 64 == 0)]
    )
    skip, gathered = d.chance(0.5), d.chance(0.5)
    beyond = (0.2 if skip else 0.002) if d.chance(0.7) else 0.0
    like = Tile(None, Operand(other.oracle.memory, FORMATS[dtype], np.zeros((p, f), np.int64)))
    listed = _indirect(d, like, 16, start, gathered, "sbuf", beyond)
    dst, src = (other, listed) if gathered else (listed, other)
    return {"dst": dst, "src": src, "oob_mode": "skip" if skip else "error"}


def _fits(tile: Tile, group: int) -> bool:
    """Return whether groups of that many partitions can list the tile's elements in a few columns of an index."""
    partial = tile.shape[0] % group
    return tile.free_size <= (partial or 4 * group)


def _indirect(
    d: Draw,
    tile: Tile,
    group: int,
    start: int,
    gathered: bool,
    buffer: str | None = None,
    beyond: float | None = None,
) -> Tile:
    """Draw a tile of the same partitions, size and dtype whose elements lie where an index says.

    `start` is where the index begins and what is gathered. A share `beyond` of the offsets is out of range; by default
    now and then one of those that are gathered.
    """
    partitions, count = tile.shape[0], tile.free_size
    width = count + d.upto(8)
    columns = -(-count // group) + int(d.random.integers(2))
    lists = np.zeros((partitions, columns), np.int64)
    for first in range(0, partitions, group):
        rows = min(group, partitions - first)
        if gathered:
            lists[first : first + rows] = d.random.integers(0, width, (rows, columns))
        else:  # each element once: the result of duplicates is not documented
            offsets = np.resize(d.random.permutation(width), rows * columns)
            lists[first : first + rows] = offsets.reshape(columns, rows).T
    if beyond is not None:
        lists = np.where(d.random.random(lists.shape) < beyond, width + d.upto(3), lists)
    elif gathered and d.chance(0.03):
        lists[0, 0] = width
    settings = {"start": start, "apart_from": (), "reuse": 0.0}
    index_dtype = d.pick(("uint16", "uint32", "int32"))
    index = d.tile(partitions, columns, index_dtype, values=lists, shape=(partitions, columns), **settings)
    same_start = gathered or beyond is not None
    base = d.lockstep.allocate(
        (start + partitions if same_start else partitions, width), tile.dtype, buffer or tile.buffer
    )
    if same_start:
        base = d.rows(base, start, partitions)
    if gathered or d.chance(0.5):
        d.lockstep.fill(base, d.contents(base.oracle.format, partitions * width))
    return d.lockstep.listed(base, index, count)
