"""Outputs that are missing, incomplete or in the wrong memory, and inputs that change nothing."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp, sum_of_two
from tests.faults.table import fault


@fault("NKW-SHARED-ALLOCATION", ramp(8, 4), answer=lambda x: (x, x[:, 0:1]), cores=2)
def allocated_in_another_order(x, sick):
    """Core 1 allocates the two outputs in the opposite order; shared tensors are paired by order."""
    core = nl.program_id(0)
    shapes = [(8, 4), (8, 1)]
    if sick and core == 1:
        shapes.reverse()
    first, second = [
        nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm, name=f"out{shape[1]}")  # blamed
        for shape in shapes
    ]
    tile = nl.load(x[core * 4 : core * 4 + 4])
    nisa.dma_copy(dst=first[core * 4 : core * 4 + 4], src=tile)
    nisa.dma_copy(dst=second[core * 4 : core * 4 + 4], src=tile[:, 0:1])
    return first, second


@fault("NKW-OUTPUT-CONSTANT", ramp(8, 4), answer=lambda x: (x, x))
def constant(x, sick):
    """The tile of zeros is stored instead of the sum that began with it."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    start = nl.zeros((8, 4), dtype=nl.float32)
    total = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=start, data2=nl.load(x), op=nl.add)
    nisa.dma_copy(dst=out, src=start if sick else total)
    return out, copied_out(total)


@fault("NKW-OUTPUT-FORGOTTEN", ramp(8, 4), answer=lambda x: (x, x + x))
def forgotten(x, sick):
    """The kernel writes two outputs and returns one."""
    first = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="first")
    second = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="second")  # blamed
    tile = nl.load(x)
    nisa.dma_copy(dst=first, src=tile)
    nisa.dma_copy(dst=second, src=nl.add(tile, tile))
    return (first,) if sick else (first, second)


@fault("NKW-OUTPUT-PARTIAL", ramp(8, 4), answer=lambda x: x)
def half_written(x, sick):
    """The last block of rows is never stored."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    for block in range(1 if sick else 2):
        rows = nl.ds(block * 4, 4)
        nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))
    return out


@fault("NKW-OUTPUT-INPUT", ramp(8, 4), answer=lambda x: x + x)
def input_returned(x, sick):  # blamed
    """The kernel returns its input instead of the result, of which only the zeros at its start are left."""
    tile = nl.zeros((8, 4), dtype=nl.float32)
    if sick:
        return x
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    return copied_out(tile)


@fault("NKW-OUTPUT-UNWRITTEN", ramp(8, 4), answer=lambda x: x)
def never_written(x, sick):
    """The result is stored to a tensor that is not the one returned."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    other = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.private_hbm, name="other")
    nisa.dma_copy(dst=other if sick else out, src=nl.load(x))
    return out


@fault("NKW-OUTPUT-MEMORY", ramp(8, 4), answer=lambda x: x)
def on_chip(x, sick):
    """The kernel returns an SBUF tile."""
    tile = nl.ndarray((8, 4), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return tile if sick else copied_out(tile)


@fault("NKW-COLLECTIVE-UNREAD", ranks=[(ramp(4, 4),), (3 * ramp(4, 4),)], answer=sum_of_two)
def partial_sum_returned(x, sick):
    """The sum over the ranks is taken, and each rank's partial sum is returned."""
    partial_sum = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="partial_sum")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=partial_sum, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[partial_sum], dsts=[total], replica_group=group, op=nl.add)  # blamed
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=partial_sum if sick else total)
    return out


@fault("NKW-OUTPUT-PRIVATE", ramp(8, 4), answer=lambda x: x)
def private(x, sick):
    """The output lies in private HBM."""
    buffer = nl.private_hbm if sick else nl.shared_hbm
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=buffer, name="out")  # blamed
    nisa.dma_copy(dst=out, src=nl.load(x))
    return out


@fault("NKW-OUTPUT-PARTIAL", ramp(8, 10), answer=lambda x: x)
def ragged_column(x, sick):
    """A loop over whole tiles leaves the ragged last columns out."""
    out = nl.ndarray((8, 10), dtype=nl.float32, buffer=nl.shared_hbm, name="out")  # blamed
    last = 8 if sick else 10
    for start in range(0, last, 4):
        end = min(start + 4, last)
        nisa.dma_copy(dst=out[:, start:end], src=nl.load(x[:, start:end]))
    return out


@fault("NKW-INPUT-UNUSED", ramp(8, 4), ramp(8, 1), answer=lambda x, bias: x + bias)
def unused_input(x, bias, sick):  # blamed
    """The bias is a parameter that the kernel forgets."""
    tile = nl.load(x)
    if not sick:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=nl.load(bias))
    return copied_out(tile)


@fault(
    "NKW-INPUT-UNUSED",
    ranks=[(ramp(8, 4), ramp(8, 1)), (2 * ramp(8, 4), ramp(8, 1))],
    answer=lambda ranks: [ranks[0][0], ranks[1][0] + ranks[1][1]],
)
def unused_on_all_ranks(x, bias, sick):  # blamed
    """No rank adds the bias. In the healthy kernel rank 1 alone does."""
    tile = nl.load(x)

    def add(_):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=nl.load(bias))

    if not sick:
        nl.fori_loop(0, ncc.rank_id(), add)
    return copied_out(tile)


@fault("NKW-INPUT-WRITTEN", ramp(8, 4), ramp(8, 4), answer=lambda x, cache: (x, cache + x))
def cache_not_returned(x, cache, sick):
    """The kernel adds to an argument in place and returns another tensor only."""
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile, total = nl.load(x), nl.ndarray((8, 4), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=tile, data2=nl.load(cache), op=nl.add)
    nisa.dma_copy(dst=cache, src=total)  # blamed
    nisa.dma_copy(dst=out, src=tile)
    return (out,) if sick else (out, cache)


@fault("NKW-COLLECTIVE-IO", ranks=[(ramp(4, 4),), (3 * ramp(4, 4),)], answer=sum_of_two)
def collective_of_an_argument(x, sick):
    """The sum over the ranks is taken of the kernel's argument itself."""
    source = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="source")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    if not sick:
        nisa.dma_copy(dst=source, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[x if sick else source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(nl.load(total))


@fault("NKW-COLLECTIVE-IO", ranks=[(ramp(4, 4),), (3 * ramp(4, 4),)], answer=sum_of_two)
def collective_into_a_result(x, sick):
    """The sum over the ranks is written straight to the kernel's result."""
    source = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="source")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="total")
    nisa.dma_copy(dst=source, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return total if sick else copied_out(nl.load(total))


@fault("NKW-COLLECTIVE-IO", ranks=[(ramp(4, 4),), (3 * ramp(4, 4),)], answer=sum_of_two)
def collective_of_an_unnamed_tensor(x, sick):
    """The tensor from which the sum over the ranks is taken has no name."""
    name = None if sick else "source"
    source = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name=name)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=source, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(nl.load(total))
