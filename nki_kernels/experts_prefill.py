"""experts_prefill: the experts that each token of a prompt passes, weighted, with the residual, summed over ranks.

    y = residual + sum over ranks of sum over k of weights[:, k] * (g(n @ w_gate[e]) * (n @ w_up[e])) @ w_down[e]

where e = ids[:, k], with biases where they are given. Rows and choices are those that `router` returns. Any number of
tokens may choose an expert, none or all of them: none is dropped.

Dimensions, arguments
    those of `experts_decode`, for any number of tokens T, and
    expert_ranks  compile-time int: the ranks that divide the experts; each has room for its share of random choices

Layout
    As in experts_decode; rows of tokens that chose one expert lie behind one another.

Tiling
    Rows of choices: for each 128 tokens, how many before them chose the same expert, by a product with ones; then the
        experts get blocks of rows (see `experts.block_layout`) in the way that takes least time.
    Either every expert has reserved blocks, with room for two standard deviations above the mean of choices at random,
        and a loop that the chip counts runs over the blocks of the rows beyond. Lists of the tokens of each
        expert come from GpSimd's search for nonzero elements, if E is a multiple of 8 and T at most 8192.
    Or there are as many blocks as the worst distribution of choices needs. The number of each token is written to its
        rows. So it is in small launches, and on gen2: the guide to loops over registers is for Trn2 and Trn3 alone.
    For each block: its rows are gathered by the tokens' numbers and transposed, the weights of its expert loaded, and
        its results written in order. The intermediate is taken in chunks; the weights of the next one arrive meanwhile,
        and the last product of a chunk follows the first ones of the next. Reserved blocks need their expert's list
        alone: with lists, the rows of all choices are found while the first block is computed.
    For each 128 tokens: the K results of each are gathered, weighted and added in float32. Weighted biases b_down are a
        product of the weights of all experts with all biases.
    Scales of columns multiply the sums as they leave PSUM; scales of blocks multiply the weights as they are loaded.
    Choices of experts of other ranks get a row after all blocks, where nothing is written or read.

Cores
    On a logical core of two physical ones the first does the work.

Limits:
    H up to 8192, in float32 up to 4096; E up to 512; rows of all blocks below 2^24.

Cost
    HBM: the weights of an expert once for each block, n once for each row of a block, residual and y once, the results
    of blocks written once and read once where a token chose them. Over ranks: one all-reduce of y's size in n's dtype.
    Rounding to n's dtype: the intermediate, the result of each expert, over ranks the partial sum and the sum, and y.
    Bound: the Tensor engine or HBM, whichever takes longer for a block. Predicted on trn2 in bfloat16 for T = 2048 and
    balanced choices, of the floor, in the slower reading:
        67 % for H = 4096, F = 1792, E = 8, K = 2;
        68 % for H = 2048, F = 1024, E = 64, K = 8;
        54 % for H = 2048, F = 192, E = 128, K = 8, where rows and results are as many bytes as weights;
        51 % for H = 2880, F = 360, E = 32, K = 4 with biases and the clamped gate, where a quarter of the Tensor
        engine's time goes to short last tiles of 32 rows and 104 columns, and to transposes.
    For T = 512, in program order, weights of 8 bits with scales of columns take as long as in bfloat16 (H = 2048,
    F = 192, E = 128, K = 8: 1015 us, in bfloat16 1016). With scales of blocks Vector engine and GpSimd are the bound:
    1919 us, and 2706 instead of 1086 (H = 4096, F = 1792, E = 8, K = 2).
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.arguments import Routing, check_arguments, create_expert_weights, experts_reference
from nki_kernels.experts.block_layout import count_blocks, has_loop, plan_blocks
from nki_kernels.experts.row_assignment import (
    assign_rows,
    index_static_experts,
    load_block_tokens,
    load_choices,
    sort_tokens,
)
from nki_kernels.experts.row_blocks import (
    BlockPipeline,
    PendingDown,
    RowBlocks,
    finish_down,
    gate_block,
    gather_rows,
    load_dealt_tokens,
    make_dealt_table,
    transpose_block,
    view_block_targets,
    view_block_tokens,
    view_dealt_targets,
)
from nki_kernels.experts.token_lists import can_list, list_tokens
from nki_kernels.experts.weight_chunks import create_layer, load_chunk, load_down
from nki_kernels.experts.weighted_sums import (
    TokenSums,
    add_terms,
    count_tiles_ahead,
    load_biases,
    prepare_tile,
    sum_tile,
)
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import PARTITIONS, identity, load, ranges
from nki_kernels.weights import ExpertIndex

cores = (1,)

MOST_ROWS = 2**24
"""Rows of all blocks are fewer: float32 holds their numbers."""


@nki.jit
def experts_prefill(
    n,
    weights,
    ids,
    w_gate,
    w_up,
    w_down,
    residual=None,
    replica_group=None,
    activation="silu",
    b_gate=None,
    b_up=None,
    b_down=None,
    absent=False,
    w_gate_scales=None,
    w_up_scales=None,
    w_down_scales=None,
    w_gate_block_scales=None,
    w_up_block_scales=None,
    w_down_block_scales=None,
    expert_ranks=1,
):
    """Return y [T, H]: the weighted sum of each token's K experts over all ranks, plus the residual, in n's dtype.

    y is in new shared HBM. The module docstring describes the arguments. AssertionError if they do not fit
    together, or if the blocks of all experts have 2^24 rows or more.
    """
    scales = (w_gate_scales, w_up_scales, w_down_scales)
    block_scales = (w_gate_block_scales, w_up_block_scales, w_down_block_scales)
    experts = create_expert_weights(w_gate, w_up, w_down, scales, block_scales, b_gate, b_up, b_down)
    routing = Routing(weights, ids, absent)
    check_arguments(residual, n, routing, experts)
    tokens, hidden = n.shape
    count, inner = w_gate.shape[0], w_gate.shape[2]
    # A token does not choose an expert twice, so no more than E of its choices need rows here.
    choices_total = tokens * min(ids.shape[1], count)
    loops = nisa.get_nc_version() != nisa.nc_version.gen2
    layout = plan_blocks(choices_total, count, hidden, inner, item_bytes(n.dtype), loops, expert_ranks)
    rows = count_blocks(layout) * layout.rows
    assert rows < MOST_ROWS, (
        f"{choices_total} choices make {rows} rows of blocks; 2^24 are too many: give fewer tokens"
    )
    y = nl.ndarray((tokens, hidden), dtype=n.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    diagonal = identity(PARTITIONS, nl.bfloat16)
    choices = load_choices(ids, count, diagonal)
    # Rows of a token lie in blocks of different experts: through HBM a gather brings them together.
    results = nl.ndarray((rows, hidden), dtype=n.dtype, buffer=nl.private_hbm, name="results")
    # Rows of prompts are many: block scales multiply the elements as they are loaded.
    layer = create_layer(experts, activation, layout.rows, n.dtype, None)

    # The first weights are loaded before any token's row is known, if their expert is.
    chunk = load_chunk(layer, ExpertIndex(0, None), 0) if layout.reserved > 0 else None
    listed = has_loop(layout) and can_list(tokens, layout)
    assignment = None
    if listed:
        order = list_tokens(choices.one_hot, layout, diagonal)
    else:
        assignment = assign_rows(choices, layout, absent)
        order = sort_tokens(assignment, layout, tokens, absent)
    block_tokens = load_block_tokens(order, layout)
    gathered = gather_rows(n, view_block_tokens(block_tokens, 0))
    block_experts = index_static_experts(layout, assignment)
    if chunk is None:
        chunk = load_chunk(layer, block_experts[0], 0)
    few_rows = diagonal if n.dtype == nl.bfloat16 and loops else None
    row_blocks = RowBlocks(n, results, layout, layer, block_experts, block_tokens, few_rows)
    pipeline = BlockPipeline(transpose_block(gathered, row_blocks), chunk, None)

    # What the first blocks do not need is found while they are computed.
    static = len(block_experts)
    pipeline = run_blocks(row_blocks, pipeline, 0, 1)
    sums = TokenSums(y, residual, routing, load_biases(b_down, n.dtype), replica_group, [])
    for first, end in ranges(0, tokens)[0 : count_tiles_ahead(hidden)]:
        prepare_tile(sums, first, end)
    initial = add_terms(sums.prepared[0].terms)
    if listed:
        assignment = assign_rows(choices, layout, absent)
    pipeline = run_blocks(row_blocks, pipeline, 1, min(2, static))
    table = make_dealt_table(assignment, order, layout) if has_loop(layout) else None
    pipeline = run_blocks(row_blocks, pipeline, min(2, static), static)
    finish_down(row_blocks, pipeline.pending)
    if table is not None:
        run_dealt_blocks(row_blocks, order, table)
    sum_results(sums, results, assignment.rows, initial)
    return y


def run_blocks(row_blocks, pipeline, first, end):
    """Compute blocks first … end - 1 in a software pipeline, all but the down product of the last chunk.

    A block is a list of rows, gathered from tokens that chose one expert. Results of finished blocks are
    stored to `row_blocks.results`. Returns the `BlockPipeline` with which the next call continues; its
    `pending` product is due.

    step   Tensor engine                                  the other engines and the DMA queues
    b, c   gate and up product of chunk c of block b      if c = 0: gather the rows of block b + 1
           if c = 0: transpose the rows of block b + 1    activation of chunk c
           down product of the chunk before               load down of chunk c
                                                          load gate and up of chunk c + 1, or of block b + 1
    """
    layer, experts = row_blocks.layer, row_blocks.experts
    last = len(layer.chunks) - 1
    following, chunk, pending = pipeline.x, pipeline.chunk, pipeline.pending
    for b in range(first, end):  # b: block
        x, gathered, sums = following, [], []
        if b + 1 < len(experts):
            # The gather is issued before the gate product of chunk 0, which hides its latency.
            gathered = gather_rows(row_blocks.n, view_block_tokens(row_blocks.tokens, b + 1))
        for c in range(last + 1):  # c: chunk of columns of the intermediate
            gated = gate_block(row_blocks, x, chunk)
            if c == 0 and len(gathered) > 0:
                # The down product of the chunk before takes the time until these are in SBUF.
                following = transpose_block(gathered, row_blocks)
            if pending is not None:
                finish_down(row_blocks, pending)
            load_down(layer, chunk)
            pending = PendingDown(gated, sums, view_block_targets(row_blocks, b) if c == last else [])
            if c < last:
                chunk = load_chunk(layer, experts[b], c + 1)
            elif b + 1 < len(experts):
                chunk = load_chunk(layer, experts[b + 1], 0)
    return BlockPipeline(following, chunk, pending)


def run_dealt_blocks(row_blocks, order, table):
    """Compute the blocks of rows that did not fit into their expert's reserved blocks, and store their results.

    Their number, `table.used`, is known at run time only, so a loop on the chip runs over them, after all
    other blocks.

    Args:
        order: `TokenOrder`, which has the tokens of the blocks' rows in HBM.
        table: `DealtTable`, which has each block's expert and the position of its first token.
    """
    layer, layout, n = row_blocks.layer, row_blocks.layout, row_blocks.n
    last = len(layer.chunks) - 1
    used = nisa.register_alloc()
    nisa.register_load(used, table.used)

    def body(block):
        element = [[1, 1], [1, 1]]
        number = load(table.experts.ap(pattern=element, scalar_offset=block, indirect_dim=1), nl.int32)
        start = load(table.starts.ap(pattern=element, scalar_offset=block, indirect_dim=1), nl.int32)
        tokens = load_dealt_tokens(order, start, layout.rows)
        targets = view_dealt_targets(row_blocks, block)
        x = transpose_block(gather_rows(n, tokens), row_blocks)
        sums = []
        for c in range(last + 1):  # c: chunk of columns of the intermediate
            chunk = load_chunk(layer, ExpertIndex(0, number), c)
            gated = gate_block(row_blocks, x, chunk)
            load_down(layer, chunk)
            finish_down(row_blocks, PendingDown(gated, sums, targets if c == last else []))

    nl.fori_loop(0, used, body)


def sum_results(sums, results, rows, initial):
    """Sum the K results of each token, with weights, and store y, for 128 tokens at a time.

    Args:
        sums: `TokenSums`: y, the residual and the biases; its `prepared` list is extended one or two tiles
            ahead.
        results: rows of all blocks, [row, H] @ HBM.
        rows: the row of `results` for each choice, [128, tile, K] int32 in SBUF.
        initial: the sum of residual and biases of the first tile of tokens, or None for 0.
    """
    tiles = ranges(0, sums.y.shape[0])
    ahead = len(sums.prepared)
    for m in range(len(tiles)):  # m: tile of tokens
        first, end = tiles[m]
        # Loads of a later tile are issued first, as they wait for no gather of results.
        if m + ahead < len(tiles):
            prepare_tile(sums, tiles[m + ahead][0], tiles[m + ahead][1])
        result = sum_tile(sums, m, results, rows[0 : end - first, m, :], initial)
        # Not by GpSimd, which gathers the next rows, nor by Sync, which loads what they begin with.
        transfer(sums.y[first:end, :], result, SCALAR)
        if m + 1 < len(tiles):
            initial = add_terms(sums.prepared[m + 1].terms)


def experts_prefill_reference(
    n: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    w_gate: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    residual: np.ndarray | None = None,
    replica_group: object = None,
    activation: str = "silu",
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    b_down: np.ndarray | None = None,
    absent: bool = False,
    w_gate_scales: np.ndarray | None = None,
    w_up_scales: np.ndarray | None = None,
    w_down_scales: np.ndarray | None = None,
    w_gate_block_scales: np.ndarray | None = None,
    w_up_block_scales: np.ndarray | None = None,
    w_down_block_scales: np.ndarray | None = None,
    expert_ranks: int = 1,
) -> np.ndarray:
    """Compute y [T, H] with NumPy, token by token in float32.

    For several ranks pass the intermediate columns of all of them; `replica_group` and `expert_ranks` are not
    read.
    """
    routing = Routing(weights, ids, absent)
    scales = (w_gate_scales, w_up_scales, w_down_scales)
    block_scales = (w_gate_block_scales, w_up_block_scales, w_down_block_scales)
    experts = create_expert_weights(w_gate, w_up, w_down, scales, block_scales, b_gate, b_up, b_down)
    return experts_reference(residual, n, routing, experts, activation)
