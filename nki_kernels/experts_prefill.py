"""experts_prefill: the experts that each token of a prompt passes, weighted, with the residual, summed over ranks.

    y = x + sum over ranks of sum over k of weights[:, k] * (g(n @ w_gate[e]) * (n @ w_up[e])) @ w_down[e]

where e = ids[:, k], with biases where they are given. Rows and choices are those that `router` returns. Any number of
tokens may choose an expert, none or all of them: none is dropped.

Dimensions, arguments
    those of `experts_decode`, for any number of tokens T

Layout
    As in experts_decode; rows of tokens that chose one expert lie behind one another.

Tiling
    Places: for each 128 tokens, how many before them chose the same expert, by a product with ones; then blocks of 128,
        192, 256 or 384 rows are dealt to the experts in order, and the number of each token is written to its rows.
    For each block: its rows are gathered by the tokens' numbers and transposed, the weights of its expert loaded from
        an address that is read at run time, and its results written in order. The intermediate is taken in chunks;
        the weights of the next one arrive meanwhile, and the last product of a chunk follows the first ones of
        the next.
    For each 128 tokens: the K results of each are gathered, weighted and added in float32.
    There are as many blocks as the worst distribution of choices needs. Blocks that are not needed compute what
        nobody reads, so the time does not depend on the choices. Choices of experts of other ranks have a place behind
        all rows, where nothing is written or read.

Cores
    On a logical core of two physical ones the first does the work.

Limits
    H up to 8192, in float32 up to 4096; E up to 512; rows of all blocks below 2^24.

Cost
    HBM: the weights of an expert once for each block, n once for each row of a block, x and y once, the results of
    blocks written once and read once where a token chose them. Over ranks: one all-reduce of y's size in n's dtype.
    Rounding to n's dtype: the intermediate, the result of each expert, over ranks the partial sum and the sum, and y.
    Bound: the Tensor engine or HBM, whichever takes longer for a block. The rows of a block are chosen so that the sum
    over blocks is least. Predicted on trn2 in bfloat16, of the floor, in the slower reading:
        59 % for T = 2048, H = 4096, F = 1792, E = 8, K = 2;
        62 % for T = 512, H = 2048, F = 1024, E = 64, K = 8;
        46 % for T = 2048, H = 2048, F = 768, E = 128, K = 8, where half of the rows are padding;
        27 % there with F = 192, and 17 % with F = 96, where moving rows takes longer than products;
        26 % for T = 2048, H = 2880, F = 360, E = 32, K = 4 with biases and the clamped gate, where 60 % is padding.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts.places import (
    block_count,
    block_size,
    expert_of_blocks,
    find_places,
    out_of_range,
    sorted_tokens,
)
from nki_kernels.experts.products import add_down, biases_of, gated, groups, products
from nki_kernels.experts.weights import chunks, load_chunk, load_down, rows_at
from nki_kernels.experts_decode import (
    check_arguments,
    experts_decode_reference,
    finished,
)
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.projection.rows import in_block, spread_into
from nki_kernels.tiles import PARTITIONS, blocks, load, ranges

MOST_ROWS = 2**24


@nki.jit
def experts_prefill(
    x,
    n,
    weights,
    ids,
    w_gate,
    w_up,
    w_down,
    replica_group=None,
    activation="silu",
    b_gate=None,
    b_up=None,
    b_down=None,
    absent=False,
):
    """The weighted sum of the experts of each token, plus the residual."""
    check_arguments(x, n, weights, ids, w_gate, w_up, w_down, b_gate, b_up, b_down, absent)
    tokens, hidden = n.shape
    experts = w_gate.shape[0]
    choices = tokens * min(ids.shape[1], experts)
    size = block_size(choices, experts, hidden, w_gate.shape[2], item_bytes(n.dtype))
    count = block_count(choices, experts, size)
    assert count * size < MOST_ROWS, (
        f"{choices} choices make {count * size} rows of blocks; 2^24 are too many"
    )
    y = nl.ndarray((tokens, hidden), dtype=n.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    places, ends = find_places(ids, experts, size, count * size if absent else None)
    job = {
        "n": n,
        "results": nl.ndarray((count * size, hidden), dtype=n.dtype, buffer=nl.private_hbm, name="results"),
        "tokens": sorted_tokens(places, tokens, count, size, absent),
        "table": expert_of_blocks(ends, count),
        "size": size,
        "matrices": (w_gate, w_up, w_down),
        "biases": biases_of(b_gate, b_up, size, activation, n.dtype),
        "activation": activation,
    }
    all_blocks(job, count)
    for first, last in ranges(0, tokens):
        own = places[0 : last - first, first // PARTITIONS, :]
        rows = None if x is None else x[first:last, :]
        chosen = (weights[first:last, :], ids[first:last, :])
        total = combined(job["results"], chosen[0], own, absent)
        result = finished(total, rows, n.dtype, chosen, b_down, replica_group, absent)
        # Not by GpSimd, which gathers the next rows.
        nisa.dma_copy(dst=y[first:last, :], src=result, engine=nisa.engine.sync)
    return y


def all_blocks(job, count):
    """The results of all blocks.

    The rows of the next block are gathered and transposed while a block is computed.
    """
    matrices = job["matrices"]
    _, hidden, inner = matrices[0].shape
    dtype = job["n"].dtype
    pieces = chunks(hidden, inner, dtype, matrices[0].dtype)
    waiting = None
    following = transposed(gather(job, 0), job["size"])
    for number in range(count):
        across = following
        gathered = gather(job, number + 1) if number + 1 < count else None
        expert = (0, job["table"][:, number : number + 1])
        totals = []
        for piece in range(len(pieces)):
            chunk = load_chunk(matrices, job["biases"], expert, pieces[piece], dtype)
            shape = (min(PARTITIONS, chunk["width"]), blocks(chunk["width"]), job["size"])
            result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
            for group in groups(chunk["width"], job["size"]):
                sums = products(across, chunk, group, hidden)
                if group[0] == 0:
                    if waiting is not None:
                        finish(job, waiting)
                    load_down(chunk, dtype)
                gated(result, sums, group, chunk["width"], job["activation"])
            if piece == 0 and gathered is not None:
                following = transposed(gathered, job["size"])
            waiting = (number, totals, result, chunk, piece + 1 == len(pieces))
    finish(job, waiting)


def gather(job, number):
    """The rows of a block, tiles of up to 128."""
    n = job["n"]
    tiles = []
    for tokens in job["tokens"]:
        rows = nl.ndarray((tokens.shape[0], n.shape[1]), dtype=n.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=rows_at(n, tokens[:, number : number + 1]))
        tiles.append(rows)
    return tiles


def transposed(tiles, size):
    """The rows of a block as [h in run, block, row]."""
    hidden = tiles[0].shape[1]
    shape = (in_block(hidden, 0, True), blocks(hidden), size)
    result = nl.ndarray(shape, dtype=tiles[0].dtype, buffer=nl.sbuf)
    first = 0
    for tile in tiles:
        last = first + tile.shape[0]
        spread_into(result[:, :, first:last], tile, True, shared=True)
        first = last
    return result


def finish(job, waiting):
    """The last product of a chunk, added to the sums of its block; those of the last chunk are stored."""
    number, totals, inner, chunk, is_last = waiting
    hidden = job["n"].shape[1]
    tiles = ranges(0, job["size"])
    for tile in range(len(tiles)):
        first, last = tiles[tile]
        before = totals[tile] if tile < len(totals) else None
        result = before
        if before is None or is_last:
            dtype = job["n"].dtype if is_last else nl.float32
            result = nl.ndarray((last - first, hidden), dtype=dtype, buffer=nl.sbuf)
        add_down(result, before, inner, first, chunk)
        if is_last:
            at = number * job["size"] + first
            nisa.dma_copy(dst=job["results"][at : at + last - first, :], src=result)
        elif before is None:
            totals.append(result)


def combined(results, weights, places, absent):
    """The weighted sum of the results at the places [rows, K] of some tokens, in float32; zeros behind all results."""
    rows, each = places.shape
    own = load(weights, nl.float32)
    total = nl.ndarray((rows, results.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    for k in range(each):
        part = nl.ndarray(total.shape, dtype=results.dtype, buffer=nl.sbuf)
        if absent:
            nisa.memset(dst=part, value=0.0)
        nisa.dma_copy(dst=part, src=rows_at(results, places[:, k : k + 1]), oob_mode=out_of_range(absent))
        weight = own[:, k : k + 1]
        if k == 0:
            nisa.tensor_scalar(dst=total, data=part, op0=nl.multiply, operand0=weight)
        else:
            nisa.scalar_tensor_tensor(
                dst=total, data=part, op0=nl.multiply, operand0=weight, op1=nl.add, operand1=total
            )
    return total


def experts_prefill_reference(
    x: np.ndarray | None,
    n: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    replica_group: object = None,
    activation: str = "silu",
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    b_down: np.ndarray | None = None,
    absent: bool = False,
) -> np.ndarray:
    """As that of experts_decode, which takes any number of tokens."""
    experts = (w_gate, w_up, w_down, None, activation, b_gate, b_up, b_down, absent)
    return experts_decode_reference(x, n, weights, ids, *experts)
