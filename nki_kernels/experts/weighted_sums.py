"""The weighted sum of the results of each token's experts over experts and ranks, with residual and biases.

`experts_prefill` sums tile by tile, 128 tokens each, what it gathers from the rows of blocks, [row, H] @ HBM.
`experts_decode` and `experts_combine` use the functions for biases and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.experts.arguments import Routing
from nki_kernels.experts.indices import view_rows
from nki_kernels.experts.row_assignment import choose_oob_mode
from nki_kernels.tiles import BANK, PARTITIONS, cast, filled, load, ranges

MOST_AHEAD = 4096
"""Elements of a row of which two tiles more have room in SBUF."""


@dataclass
class ExpertBiases(nl.NKIObject):
    """Biases [e, H] of up to 128 experts in SBUF, and the experts' numbers on every partition, [128, e] float32."""

    biases: nl.NkiTensor
    numbers: nl.NkiTensor


@dataclass
class PreparedTile(nl.NKIObject):
    """What the sum of a tile of tokens needs other than the results of experts, in SBUF.

    terms: up to two summands [row, H], the residual and the weighted biases. weights: [row, K] float32.
    """

    terms: list
    weights: nl.NkiTensor


@dataclass
class TokenSums(nl.NKIObject):
    """The sums of all tokens: y [T, H] @ HBM, the residual [T, H] @ HBM or None.

    biases: a list of ExpertBiases, empty without biases. prepared: PreparedTile of the first tiles.
    """

    y: nl.NkiTensor
    residual: nl.NkiTensor | None
    routing: Routing
    biases: list
    replica_group: object
    prepared: list


def count_tiles_ahead(hidden):
    """Return how many tiles of tokens are prepared before the first one is summed: 2, or 1 if H is above MOST_AHEAD."""
    return 2 if hidden <= MOST_AHEAD else 1


def prepare_tile(sums, first, end):
    """Load the weights, residual and weighted biases of tokens first … end - 1, and append them to `sums.prepared`."""
    weights = load(sums.routing.weights[first:end, :], nl.float32)
    terms = []
    if sums.residual is not None:
        terms.append(load(sums.residual[first:end, :], sums.y.dtype))
    if len(sums.biases) > 0:
        ids = load(sums.routing.ids[first:end, :], nl.int32)
        terms.append(weigh_biases(weights, ids, sums.biases))
    sums.prepared.append(PreparedTile(terms, weights))


def add_terms(terms):
    """Return the sum of up to two tiles [row, H] @ SBUF, or None for an empty list.

    Two tiles are summed in place in the second, on GpSimd, as the Vector engine adds the weighted results.
    """
    if len(terms) < 2:
        return terms[0] if len(terms) == 1 else None
    nisa.tensor_tensor(dst=terms[1], data1=terms[1], data2=terms[0], op=nl.add, engine=nisa.engine.gpsimd)
    return terms[1]


def sum_tile(sums, m, results, rows, initial):
    """Return the sum over experts and ranks of tile m of tokens, plus `initial` [row, H] or None.

    The sum is [row, H] of y's dtype @ SBUF. Tile m has been prepared by `prepare_tile`. results: [row of blocks, H] @
    HBM. rows: numbers of the rows of the tokens' choices, [row, K] int32 @ SBUF.
    """
    weights, absent = sums.prepared[m].weights, sums.routing.absent
    if sums.replica_group is None:
        return weigh_results(results, weights, rows, initial, sums.y.dtype, absent)
    partial = weigh_results(results, weights, rows, None, nl.float32, absent)
    result = sum_over_ranks(partial, sums.y.dtype, sums.replica_group)
    if initial is not None:
        nisa.tensor_tensor(dst=result, data1=initial, data2=result, op=nl.add)
    return result


def weigh_results(results, weights, rows, initial, dtype, absent):
    """Return `initial` [row, H], or 0 for None, plus the weighted results of K choices, rounded once to `dtype`.

    With K of 1 or more the sum is a new tile @ SBUF.

    Args:
        results: [row of blocks, H] @ HBM.
        weights: [row, K] float32 @ SBUF.
        rows: numbers of the rows of results, [row, K] int32 @ SBUF.
        absent: whether rows may be out of range; the results of such rows count as zeros.
    """
    count = rows.shape[1]
    shape = (rows.shape[0], results.shape[1])
    total = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    summed = initial
    for k in range(count):
        result = nl.ndarray(shape, dtype=results.dtype, buffer=nl.sbuf)
        if absent:
            # The DMA skips rows of absent experts, which then keep these zeros.
            nisa.memset(dst=result, value=0.0)
        nisa.dma_copy(
            dst=result, src=view_rows(results, rows[:, k : k + 1]), oob_mode=choose_oob_mode(absent)
        )
        target = (
            total if k + 1 < count or dtype == nl.float32 else nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        )
        weight = weights[:, k : k + 1]
        if summed is None:
            nisa.tensor_scalar(dst=target, data=result, op0=nl.multiply, operand0=weight)
        else:
            nisa.scalar_tensor_tensor(
                dst=target, data=result, op0=nl.multiply, operand0=weight, op1=nl.add, operand1=summed
            )
        summed = target
    return summed


def sum_over_ranks(partial, dtype, replica_group):
    """Return the sum over ranks of a float32 tile [row, H] @ SBUF, in a new tile of `dtype`.

    Each rank's summand is rounded to `dtype` first.
    """
    rounded = nl.ndarray(partial.shape, dtype=dtype, buffer=nl.sbuf)
    # Rounding first halves the bytes of the all-reduce in bfloat16.
    nisa.tensor_copy(dst=rounded, src=partial)
    total = nl.ndarray(partial.shape, dtype=dtype, buffer=nl.sbuf)
    ncc.all_reduce(srcs=[rounded], dsts=[total], replica_group=replica_group, op=nl.add)
    return total


def load_biases(bias, dtype):
    """Load biases [E, H] @ HBM as a list of ExpertBiases in SBUF, of up to 128 experts each; None gives no entry.

    Biases are bfloat16 where rows, of `dtype`, and biases are, else float32: products of rounded summands are as exact
    as the rows.
    """
    result = []
    if bias is None:
        return result
    resident_dtype = nl.bfloat16 if dtype == nl.bfloat16 and bias.dtype == nl.bfloat16 else nl.float32
    for first, end in ranges(0, bias.shape[0]):
        numbers = nl.ndarray((PARTITIONS, end - first), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=numbers, pattern=[[1, end - first]], offset=first)
        result.append(ExpertBiases(load(bias[first:end, :], resident_dtype), numbers))
    return result


def weigh_biases(weights, ids, biases):
    """Return the sum over K of each row's weighted biases, [row, H] float32 @ SBUF.

    It is a product with the weights of all experts. Experts of other ranks, whose number is E, have no column. weights:
    [row, K] float32; ids: [row, K] int32; biases: a list of ExpertBiases.
    """
    rows, hidden = weights.shape[0], biases[0].biases.shape[1]
    by_expert = spread_weights(weights, ids, biases)
    result = nl.ndarray((rows, hidden), dtype=nl.float32, buffer=nl.sbuf)
    for first, end in ranges(0, hidden, BANK):
        bank = nl.ndarray((rows, end - first), dtype=nl.float32, buffer=nl.psum)
        begun = False
        for i in range(len(biases)):  # i: tile of experts
            for stationary in by_expert[i]:
                moving = biases[i].biases[:, first:end]
                nisa.nc_matmul(dst=bank, stationary=stationary, moving=moving, accumulate=begun)
                begun = True
        # The Scalar engine evicts: the Vector engine adds the weighted results, and GpSimd does not read PSUM.
        nisa.activation(dst=result[:, first:end], op=nl.copy, data=bank)
    return result


def spread_weights(weights, ids, biases):
    """Return for each tile of experts a list of summands [e, row] @ SBUF of the weight that each row gives each expert.

    Experts that a row does not choose have weight 0. In float32 the list has one summand, in bfloat16 two: the rounded
    weight and its rounding error. GpSimd makes them, as the Vector engine adds the weighted results. The arguments are
    those of `weigh_biases`.
    """
    rows, count = weights.shape
    gpsimd = nisa.engine.gpsimd
    choices = nl.ndarray(ids.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=choices, src=ids, engine=gpsimd)
    result = []
    for tile in biases:
        experts = tile.biases.shape[0]
        chosen = nl.ndarray((rows, count, experts), dtype=nl.float32, buffer=nl.sbuf)
        numbers = tile.numbers[0:rows, :].expand_dim(1).broadcast(1, count)
        names = choices.expand_dim(2).broadcast(2, experts)
        nisa.tensor_tensor(dst=chosen, data1=numbers, data2=names, op=nl.equal, engine=gpsimd)
        factors = weights.expand_dim(2).broadcast(2, experts)
        nisa.tensor_tensor(dst=chosen, data1=chosen, data2=factors, op=nl.multiply, engine=gpsimd)
        total = chosen[:, 0, :]
        for k in range(1, count):
            nisa.tensor_tensor(dst=total, data1=total, data2=chosen[:, k, :], op=nl.add, engine=gpsimd)
        summands = [total]
        if tile.biases.dtype == nl.bfloat16:
            rounded = nl.ndarray(total.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=total, engine=gpsimd)
            error = nl.ndarray(total.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=error, data1=total, data2=rounded, op=nl.subtract, engine=gpsimd)
            summands = [rounded, error]
        # The product with the biases contracts over experts, so these come to the partitions.
        result.append(transpose_all(summands))
    return result


def transpose_all(tiles):
    """Transpose tiles [row, e] @ SBUF; return new tiles [e, row] @ SBUF of the same dtypes."""
    result = []
    for tile in tiles:
        rows, experts = tile.shape
        bank = nl.ndarray((experts, rows), dtype=tile.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=tile)
        transposed = nl.ndarray((experts, rows), dtype=tile.dtype, buffer=nl.sbuf)
        nisa.activation(dst=transposed, op=nl.copy, data=bank)
        result.append(transposed)
    return result


def add_chosen_biases(tile, routing, bias):
    """Return a tile [row, H], or 0 for None, plus the weighted biases of its rows' experts: [row, H] float32 @ SBUF.

    A float32 `tile` is changed in place and returned. routing: `Routing` of the rows; the weights of absent experts are
    0. bias: [E, H] @ HBM.
    """
    shape = (routing.ids.shape[0], bias.shape[1])
    weights = load(routing.weights, nl.float32)
    ids = load(routing.ids, nl.int32)
    mask = None
    if routing.absent:
        # The gather refuses a number of E: it loads the last expert, and the mask drops it.
        nisa.tensor_scalar(dst=ids, data=ids, op0=nl.minimum, operand0=float(bias.shape[0] - 1))
        mask = make_nonzero_mask(weights)
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if tile is None:
        nisa.memset(dst=result, value=0.0)
    else:
        result = cast(tile, nl.float32)
    for k in range(routing.ids.shape[1]):
        rows = load(view_rows(bias, ids[:, k : k + 1]), bias.dtype)
        if mask is not None:
            loaded = rows
            rows = filled(shape, 0.0, bias.dtype)
            chosen = mask[:, k : k + 1].broadcast(1, shape[1])
            # A copy drops the row even if it has NaN or infinity, which a weight of 0 would not.
            nisa.tensor_copy_predicated(dst=rows, src=loaded, predicate=chosen)
        nisa.scalar_tensor_tensor(
            dst=result,
            data=rows,
            op0=nl.multiply,
            operand0=weights[:, k : k + 1],
            op1=nl.add,
            operand1=result,
        )
    return result


def make_nonzero_mask(tile):
    """Return a uint8 tile @ SBUF that is 1 where an element of `tile` is not zero, else 0."""
    mask = nl.ndarray(tile.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mask, data=tile, op0=nl.not_equal, operand0=0.0)
    return mask
