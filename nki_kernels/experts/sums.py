"""The weighted sum of what the experts of each token gave, with residual and biases: the end of `experts_prefill`."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.places import out_of_range
from nki_kernels.experts.weights import load_numbers, rows_at
from nki_kernels.experts_decode import over_ranks
from nki_kernels.tiles import BANK, PARTITIONS, load, ranges

MOST_AHEAD = 4096
"""Elements of a row of which two tiles more have room in SBUF."""


def first_ready(y, x, choices, biases):
    """What `store_sums` begins with, made ready before there are results: see `ready`."""
    ahead = 2 if y.shape[1] <= MOST_AHEAD else 1
    prepared = []
    for tile in ranges(0, y.shape[0])[0:ahead]:
        prepared.append(ready(y, x, choices, biases, tile))
    return prepared, added(prepared[0][0])


def store_sums(y, x, choices, results, places, biases, prepared, replica_group, absent):
    """y [T, H] = x, if given, + sum over ranks of the weighted results at `places` [128, tile, K], plus biases.

    choices: weights and ids [T, K] @ HBM. biases: those of all experts as `resident_biases` gives them, or None.
    absent: places may lie behind all results, which count as zeros. What does not follow from results is made ready one
    or two tiles ahead, so that no engine waits for it; `prepared` as `first_ready` gives it.
    """
    tiles = ranges(0, y.shape[0])
    prepared, before = prepared
    ahead = len(prepared)
    for number in range(len(tiles)):
        first, last = tiles[number]
        if number + ahead < len(tiles):
            prepared.append(ready(y, x, choices, biases, tiles[number + ahead]))
        weights = prepared[number][1]
        own = places[0 : last - first, number, :]
        if replica_group is None:
            result = weighted_sum(results, weights, own, before, y.dtype, absent)
        else:
            partial = weighted_sum(results, weights, own, None, nl.float32, absent)
            result = over_ranks(partial, y.dtype, replica_group)
            if before is not None:
                nisa.tensor_tensor(dst=result, data1=before, data2=result, op=nl.add)
        # Not by GpSimd, which gathers the next rows, nor by Sync, which loads what they begin with.
        transfer(y[first:last, :], result, SCALAR)
        if number + 1 < len(tiles):
            before = added(prepared[number + 1][0])


def ready(y, x, choices, biases, tile):
    """What the sum of a tile begins with, rows of x and weighted biases, and the weights of its choices."""
    first, last = tile
    own = load(choices[0][first:last, :], nl.float32)
    terms = []
    if x is not None:
        terms.append(load(x[first:last, :], y.dtype))
    if biases is not None:
        ids = load_numbers(choices[1][first:last, :])
        terms.append(weighted_biases(own, ids, biases))
    return terms, own


def added(terms):
    """The sum of none, one or two tiles; GpSimd takes it, as the Vector engine has the weighted results to add."""
    if len(terms) < 2:
        return terms[0] if len(terms) == 1 else None
    nisa.tensor_tensor(dst=terms[1], data1=terms[1], data2=terms[0], op=nl.add, engine=nisa.engine.gpsimd)
    return terms[1]


def weighted_sum(results, weights, places, before, dtype, absent):
    """`before`, if given, plus the weighted results at the places [rows, K] of some tokens, rounded once to a dtype."""
    rows, each = places.shape
    shape = (rows, results.shape[1])
    total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    for k in range(each):
        part = nl.ndarray(shape, dtype=results.dtype, buffer=nl.sbuf)
        if absent:
            nisa.memset(dst=part, value=0.0)
        nisa.dma_copy(dst=part, src=rows_at(results, places[:, k : k + 1]), oob_mode=out_of_range(absent))
        target = (
            total if k + 1 < each or dtype == nl.float32 else nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        )
        weight = weights[:, k : k + 1]
        if before is None:
            nisa.tensor_scalar(dst=target, data=part, op0=nl.multiply, operand0=weight)
        else:
            nisa.scalar_tensor_tensor(
                dst=target, data=part, op0=nl.multiply, operand0=weight, op1=nl.add, operand1=before
            )
        before = target
    return before


def resident_biases(bias, dtype):
    """For each 128 experts their biases [e, H] in SBUF, and their numbers on every partition [128, e] float32.

    None where there are none. Biases are bfloat16 where rows and biases are, else float32: products of rounded parts
    are as exact as the rows.
    """
    if bias is None:
        return None
    held = nl.bfloat16 if dtype == nl.bfloat16 and bias.dtype == nl.bfloat16 else nl.float32
    found = []
    for first, last in ranges(0, bias.shape[0]):
        order = nl.ndarray((PARTITIONS, last - first), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=order, pattern=[[1, last - first]], offset=first)
        found.append((load(bias[first:last, :], held), order))
    return found


def weighted_biases(weights, ids, biases):
    """The weighted biases of the experts of some rows [rows, H] float32: a product with the weights of all experts.

    Experts of other ranks, whose number is E, have no column.
    """
    rows, hidden = weights.shape[0], biases[0][0].shape[1]
    by_expert = weights_by_expert(weights, ids, biases)
    result = nl.ndarray((rows, hidden), dtype=nl.float32, buffer=nl.sbuf)
    for first, last in ranges(0, hidden, BANK):
        bank = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.psum)
        begun = False
        for i in range(len(biases)):
            for part in by_expert[i]:
                moving = biases[i][0][:, first:last]
                nisa.nc_matmul(dst=bank, stationary=part, moving=moving, accumulate=begun)
                begun = True
        nisa.activation(dst=result[:, first:last], op=nl.copy, data=bank)
    return result


def weights_by_expert(weights, ids, biases):
    """For each tile of biases the weights [e, row] of its experts, as parts that add up to them.

    In float32 one part, in bfloat16 two: the rounded weight and what it lacks. GpSimd makes them, as the Vector engine
    has the weighted results to add.
    """
    rows, each = weights.shape
    gpsimd = nisa.engine.gpsimd
    numbers = nl.ndarray(ids.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=numbers, src=ids, engine=gpsimd)
    found = []
    for bias, order in biases:
        experts = bias.shape[0]
        shape = (rows, each, experts)
        here = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        of_all = order[0:rows, :].expand_dim(1).broadcast(1, each)
        chosen = numbers.expand_dim(2).broadcast(2, experts)
        nisa.tensor_tensor(dst=here, data1=of_all, data2=chosen, op=nl.equal, engine=gpsimd)
        factors = weights.expand_dim(2).broadcast(2, experts)
        nisa.tensor_tensor(dst=here, data1=here, data2=factors, op=nl.multiply, engine=gpsimd)
        total = here[:, 0, :]
        for k in range(1, each):
            nisa.tensor_tensor(dst=total, data1=total, data2=here[:, k, :], op=nl.add, engine=gpsimd)
        parts = [total]
        if bias.dtype == nl.bfloat16:
            rounded = nl.ndarray(total.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=total, engine=gpsimd)
            rest = nl.ndarray(total.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=rest, data1=total, data2=rounded, op=nl.subtract, engine=gpsimd)
            parts = [rounded, rest]
        found.append(across(parts))
    return found


def across(parts):
    """Tiles [row, e] as tiles [e, row]."""
    found = []
    for part in parts:
        rows, experts = part.shape
        bank = nl.ndarray((experts, rows), dtype=part.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=part)
        result = nl.ndarray((experts, rows), dtype=part.dtype, buffer=nl.sbuf)
        nisa.activation(dst=result, op=nl.copy, data=bank)
        found.append(result)
    return found
