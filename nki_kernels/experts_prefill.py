"""experts_prefill: the experts that each token of a prompt passes, weighted, with the residual, summed over ranks.

    y = x + sum over ranks of sum over k of weights[:, k] * (g(n @ w_gate[e]) * (n @ w_up[e])) @ w_down[e]

where e = ids[:, k], with biases where they are given. Rows and choices are those that `router` returns. Any number of
tokens may choose an expert, none or all of them: none is dropped.

Dimensions, arguments
    those of `experts_decode`, for any number of tokens T

Layout
    As in experts_decode; rows of tokens that chose one expert lie behind one another.

Tiling
    Places: for each 128 tokens, how many before them chose the same expert, by a product with ones; then blocks of rows
        are given to the experts (see `experts.places`) in the way that takes least time.
    Either every expert has a block or some of its own, with room for two standard deviations above the mean of choices
        at random, and a loop that the chip counts runs over the blocks for what is beyond. Lists of the tokens of each
        expert come from GpSimd's search for nonzero elements, if E is a multiple of 8 and T at most 8192.
    Or there are as many blocks as the worst distribution of choices needs. The number of each token is written to its
        rows. So it is in small launches, and on gen2: the guide to loops over registers is for Trn2 and Trn3 alone.
    For each block: its rows are gathered by the tokens' numbers and transposed, the weights of its expert loaded, and
        its results written in order. The intermediate is taken in chunks; the weights of the next one arrive meanwhile,
        and the last product of a chunk follows the first ones of the next.
    For each 128 tokens: the K results of each are gathered, weighted and added in float32. Weighted biases b_down are a
        product of the weights of all experts with all biases.
    Choices of experts of other ranks have a place behind all rows, where nothing is written or read.

Cores
    On a logical core of two physical ones the first does the work.

Limits
    H up to 8192, in float32 up to 4096; E up to 512; rows of all blocks below 2^24.

Cost
    HBM: the weights of an expert once for each block, n once for each row of a block, x and y once, the results of
    blocks written once and read once where a token chose them. Over ranks: one all-reduce of y's size in n's dtype.
    Rounding to n's dtype: the intermediate, the result of each expert, over ranks the partial sum and the sum, and y.
    Bound: the Tensor engine or HBM, whichever takes longer for a block. Predicted on trn2 in bfloat16 for T = 2048 and
    balanced choices, of the floor, in the slower reading:
        66 % for H = 4096, F = 1792, E = 8, K = 2;
        68 % for H = 2048, F = 1024, E = 64, K = 8;
        53 % for H = 2048, F = 192, E = 128, K = 8, where rows and results are as many bytes as weights;
        50 % for H = 2880, F = 360, E = 32, K = 4 with biases and the clamped gate, where a quarter of the Tensor
        engine's time goes to short last tiles of 32 rows and 104 columns, and to transposes.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts.lists import can_list, diagonal, token_lists
from nki_kernels.experts.places import (
    division,
    expert_of_blocks,
    find_chosen,
    find_places,
    sorted_tokens,
    tokens_of_blocks,
)
from nki_kernels.experts.products import add_down, biases_of, gated, groups, products
from nki_kernels.experts.sums import first_ready, resident_biases, store_sums
from nki_kernels.experts.weights import chunks, load_chunk, load_down, load_numbers, rows_at
from nki_kernels.experts_decode import check_arguments, experts_decode_reference
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.projection.rows import BANK_BYTES, in_block, spread_into
from nki_kernels.tiles import PARTITIONS, blocks, cast, ranges

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
    loops = nisa.get_nc_version() != nisa.nc_version.gen2
    size, own, dealt = division(choices, experts, hidden, w_gate.shape[2], item_bytes(n.dtype), loops)
    count = experts * own + dealt
    assert count * size < MOST_ROWS, (
        f"{choices} choices make {count * size} rows of blocks; 2^24 are too many"
    )
    y = nl.ndarray((tokens, hidden), dtype=n.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    numbers, chosen = find_chosen(ids, experts)
    nowhere = count * size if absent else None
    groups_of_own, each, pitch = (experts, own, own * size) if own > 0 else (dealt, 1, size)
    static = groups_of_own * each
    first_dealt = (size * static, 0)
    if own > 0 and dealt > 0 and can_list(tokens, experts, own * size):
        ordered, pitch = token_lists(chosen, size)
        first_dealt = (own * size, pitch)
        by_block = tokens_of_blocks(ordered, groups_of_own, pitch, each, size)
        places, ends = find_places(numbers, chosen, tokens, size, own, nowhere)
    else:
        places, ends = find_places(numbers, chosen, tokens, size, own, nowhere)
        ordered = sorted_tokens(places, tokens, count, size, absent)
        by_block = tokens_of_blocks(ordered, groups_of_own, pitch, each, size)
    job = {
        "n": n,
        "results": nl.ndarray((count * size, hidden), dtype=n.dtype, buffer=nl.private_hbm, name="results"),
        "tokens": by_block,
        "size": size,
        "identity": diagonal() if n.dtype == nl.bfloat16 and loops else None,
        "matrices": (w_gate, w_up, w_down),
        "biases": biases_of(b_gate, b_up, size, activation, n.dtype),
        "activation": activation,
        "chunks": chunks(hidden, w_gate.shape[2], n.dtype, w_gate.dtype),
    }
    table, turns = expert_of_blocks(ends, dealt) if dealt > 0 else (None, None)
    chosen_by = []
    for block in range(static):
        chosen_by.append((block // own, None) if own > 0 else (0, table[:, block : block + 1]))
    all_biases = resident_biases(b_down, n.dtype)
    gathered = gather(n, columns_at(by_block, 0))
    prepared = first_ready(y, x, (weights, ids), all_biases)
    all_blocks(job, chosen_by, gathered)
    if own > 0 and dealt > 0:
        starts = starts_of_dealt(table, turns, first_dealt, size)
        further_blocks(job, static, ordered, (table, starts), ends)
    store_sums(y, x, (weights, ids), job["results"], places, all_biases, prepared, replica_group, absent)
    return y


def all_blocks(job, experts, gathered):
    """The results of the first blocks, of these experts; `gathered` are the rows of the first one.

    The rows of the next block are gathered and transposed while a block is computed.
    """
    waiting = None
    following = transposed(gathered, job["size"], job["identity"])
    for number in range(len(experts)):
        across = following
        gathered = None
        if number + 1 < len(experts):
            gathered = gather(job["n"], columns_at(job["tokens"], number + 1))
        totals = []
        pieces = job["chunks"]
        for piece in range(len(pieces)):
            target = targets_of(job, number) if piece + 1 == len(pieces) else None
            chunk, result = first_products(job, across, experts[number], pieces[piece])
            if gathered is not None:
                # The last product of the chunk before takes the time until these are in SBUF.
                following = transposed(gathered, job["size"], job["identity"])
                gathered = None
            if waiting is not None:
                finish(job, waiting)
            load_down(chunk, job["n"].dtype)
            waiting = (totals, target, result, chunk)
    finish(job, waiting)


def first_products(job, across, expert, columns):
    """A chunk of an expert's weights without its rows of down, and the intermediate of a block with it."""
    n, size = job["n"], job["size"]
    chunk = load_chunk(job["matrices"], job["biases"], expert, columns, n.dtype)
    shape = (min(PARTITIONS, chunk["width"]), blocks(chunk["width"]), size)
    result = nl.ndarray(shape, dtype=n.dtype, buffer=nl.sbuf)
    for group in groups(chunk["width"], size):
        sums = products(across, chunk, group, n.shape[1])
        gated(result, sums, group, chunk["width"], job["activation"])
    return chunk, result


def starts_of_dealt(table, turns, first, size):
    """Where the tokens of each dealt block begin, [1, count] int32.

    first: where they would of expert 0, and how much further on for each expert after it; 0 where all dealt blocks
    follow one another.
    """
    begin, pitch = first
    result = nl.ndarray(table.shape, dtype=nl.float32, buffer=nl.sbuf)
    if pitch == 0:
        nisa.iota(dst=result, pattern=[[size, table.shape[1]]], offset=begin)
        return cast(result, nl.int32)
    nisa.tensor_scalar(
        dst=result, data=turns, op0=nl.multiply, operand0=float(size), op1=nl.add, operand1=float(begin)
    )
    starts = nl.ndarray(table.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=starts, data=table, op0=nl.multiply, operand0=float(pitch), op1=nl.add, operand1=result
    )
    return starts


def further_blocks(job, first, ordered, rows, ends):
    """The results of blocks behind the `first` ones, as many as were dealt: a loop that the chip counts.

    rows: for each block its expert and where its tokens begin, [1, count] int32 each.
    """
    size, n = job["size"], job["n"]
    count = rows[0].shape[1]
    kept = []
    for name, row in (("experts_of_blocks", rows[0]), ("starts_of_blocks", rows[1])):
        held = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.private_hbm, name=name)
        nisa.dma_copy(dst=held, src=row)
        kept.append(held)
    last = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=last, src=ends[0:1, ends.shape[1] - 1 : ends.shape[1]])
    dealt = nisa.register_alloc()
    nisa.register_load(dealt, last)
    by_block = job["results"].reshape((first + count, size * n.shape[1]))

    def body(block):
        one = [[1, 1], [1, 1]]
        expert = load_numbers(kept[0].ap(pattern=one, scalar_offset=block, indirect_dim=1))
        start = load_numbers(kept[1].ap(pattern=one, scalar_offset=block, indirect_dim=1))
        numbers = []
        targets = []
        for at, end in ranges(0, size):
            numbers.append(load_numbers(ordered.ap([[1, end - at], [1, 1]], offset=at, scalar_offset=start)))
            pattern = [[n.shape[1], end - at], [1, n.shape[1]]]
            offset = (first * size + at) * n.shape[1]
            targets.append(by_block.ap(pattern, offset=offset, scalar_offset=block))
        across = transposed(gather(n, numbers), size, job["identity"])
        totals = []
        pieces = job["chunks"]
        for piece in range(len(pieces)):
            chunk, result = first_products(job, across, (0, expert), pieces[piece])
            load_down(chunk, n.dtype)
            finish(job, (totals, targets if piece + 1 == len(pieces) else None, result, chunk))

    nl.fori_loop(0, dealt, body)


def columns_at(tokens, number):
    """The tokens of a block, tiles [row, 1] of up to 128."""
    found = []
    for tile in tokens:
        found.append(tile[:, number : number + 1])
    return found


def targets_of(job, number):
    """Where the results of a block go, tiles of up to 128 rows."""
    found = []
    for first, last in ranges(number * job["size"], (number + 1) * job["size"]):
        found.append(job["results"][first:last, :])
    return found


def gather(n, numbers):
    """The rows of a block by their tokens, tiles of up to 128."""
    tiles = []
    for tokens in numbers:
        rows = nl.ndarray((tokens.shape[0], n.shape[1]), dtype=n.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=rows_at(n, tokens))
        tiles.append(rows)
    return tiles


def transposed(tiles, size, identity):
    """The rows of a block as [h in run, block, row]."""
    hidden = tiles[0].shape[1]
    shape = (in_block(hidden, 0, True), blocks(hidden), size)
    result = nl.ndarray(shape, dtype=tiles[0].dtype, buffer=nl.sbuf)
    first = 0
    for tile in tiles:
        last = first + tile.shape[0]
        if tile.shape[0] < PARTITIONS and identity is not None:
            spread_few_into(result[:, :, first:last], tile, identity)
        else:
            spread_into(result[:, :, first:last], tile, True, shared=True)
        first = last
    return result


def spread_few_into(result, rows, identity):
    """Few rows [rows, H] transposed to `result` [h in run, block, row]: they are stationary, so that few columns move.

    identity: [128, 128] of the rows' dtype.
    """
    count, hidden = rows.shape
    number = blocks(hidden)
    first = 0
    while first < number:
        used = in_block(hidden, first, True)
        end = first + 1
        while end < min(number, first + BANK_BYTES // 2 // count) and in_block(hidden, end, True) == used:
            end += 1
        bank = nl.ndarray((used, end - first, count), dtype=rows.dtype, buffer=nl.psum)
        for block in range(first, end):
            nisa.nc_matmul(
                dst=bank[:, block - first, :],
                stationary=rows[:, block:hidden:number],
                moving=identity[0:count, 0:count],
                is_transpose=True,
            )
        nisa.activation(dst=result[0:used, first:end, :], op=nl.copy, data=bank)
        first = end


def finish(job, waiting):
    """The last product of a chunk, added to the sums of its block; those of the last chunk are stored."""
    totals, targets, inner, chunk = waiting
    hidden = job["n"].shape[1]
    tiles = ranges(0, job["size"])
    for tile in range(len(tiles)):
        first, last = tiles[tile]
        before = totals[tile] if tile < len(totals) else None
        result = before
        if before is None or targets is not None:
            dtype = nl.float32 if targets is None else job["n"].dtype
            result = nl.ndarray((last - first, hidden), dtype=dtype, buffer=nl.sbuf)
        add_down(result, before, inner, first, chunk)
        if targets is not None:
            # Not by Sync, which loads the next weights.
            nisa.dma_copy(dst=targets[tile], src=result, engine=nisa.engine.scalar)
        elif before is None:
            totals.append(result)


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
