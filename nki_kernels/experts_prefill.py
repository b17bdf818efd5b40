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
        and the last product of a chunk follows the first ones of the next. An expert's own blocks need its list alone:
        with lists, the places of all choices are found while the first block is computed.
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
        67 % for H = 4096, F = 1792, E = 8, K = 2;
        68 % for H = 2048, F = 1024, E = 64, K = 8;
        54 % for H = 2048, F = 192, E = 128, K = 8, where rows and results are as many bytes as weights;
        51 % for H = 2880, F = 360, E = 32, K = 4 with biases and the clamped gate, where a quarter of the Tensor
        engine's time goes to short last tiles of 32 rows and 104 columns, and to transposes.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts.blocks import (
    begun,
    chunk_of,
    columns_at,
    dealt_blocks,
    finish,
    further_blocks,
    gather,
    some_blocks,
)
from nki_kernels.experts.lists import can_list, token_lists
from nki_kernels.experts.places import (
    division,
    expert_of_blocks,
    find_chosen,
    find_places,
    sorted_tokens,
    tokens_of_blocks,
)
from nki_kernels.experts.products import biases_of
from nki_kernels.experts.sums import first_ready, resident_biases, store_sums
from nki_kernels.experts.weights import chunks
from nki_kernels.experts_decode import check_arguments, experts_decode_reference
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import PARTITIONS, identity

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
    diagonal = identity(PARTITIONS, nl.bfloat16)
    numbers, chosen = find_chosen(ids, experts, diagonal)
    job = {
        "n": n,
        "results": nl.ndarray((count * size, hidden), dtype=n.dtype, buffer=nl.private_hbm, name="results"),
        "size": size,
        "identity": diagonal if n.dtype == nl.bfloat16 and loops else None,
        "matrices": (w_gate, w_up, w_down),
        "biases": biases_of(b_gate, b_up, size, activation, n.dtype),
        "activation": activation,
        "chunks": chunks(hidden, w_gate.shape[2], n.dtype, w_gate.dtype),
    }
    nowhere = count * size if absent else None
    groups_of_own, each, pitch = (experts, own, own * size) if own > 0 else (dealt, 1, size)
    static = groups_of_own * each
    first_dealt = (size * static, 0)
    looped = own > 0 and dealt > 0
    listed = looped and can_list(tokens, experts, own * size)
    # The weights of the first block come before any token's place is known.
    loaded = chunk_of(job, (0, None), job["chunks"][0]) if own > 0 else None
    places, ends = None, None
    if listed:
        ordered, pitch = token_lists(chosen, size, diagonal)
        first_dealt = (own * size, pitch)
    else:
        places, ends = find_places(numbers, chosen, tokens, size, own, nowhere)
        ordered = sorted_tokens(places, tokens, count, size, absent)
    job["tokens"] = tokens_of_blocks(ordered, groups_of_own, pitch, each, size)
    gathered = gather(n, columns_at(job["tokens"], 0))
    table = None if own > 0 else expert_of_blocks(ends, dealt)[0]
    chosen_by = []
    for block in range(static):
        chosen_by.append((block // own, None) if own > 0 else (0, table[:, block : block + 1]))
    if loaded is None:
        loaded = chunk_of(job, chosen_by[0], job["chunks"][0])
    # What the first blocks do not need is found while they are computed.
    state = begun(job, gathered, loaded)
    state = some_blocks(job, chosen_by, 0, 1, state)
    all_biases = resident_biases(b_down, n.dtype)
    prepared = first_ready(y, x, (weights, ids), all_biases)
    if listed:
        places, ends = find_places(numbers, chosen, tokens, size, own, nowhere)
    state = some_blocks(job, chosen_by, 1, min(2, static), state)
    further = dealt_blocks(ends, dealt, first_dealt, size) if looped else None
    state = some_blocks(job, chosen_by, min(2, static), static, state)
    finish(job, state[0])
    if looped:
        further_blocks(job, static, ordered, further)
    store_sums(y, x, (weights, ids), job["results"], places, all_biases, prepared, replica_group, absent)
    return y


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
