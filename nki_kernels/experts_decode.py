"""experts_decode: routed experts of up to 128 tokens: their weighted sum, over ranks, plus the residual.

    y = residual + sum over ranks of sum over k of weights[:, k] * (g(n @ w_gate[e]) * (n @ w_up[e])) @ w_down[e]

where e = ids[:, k], with biases where they are given. `router` returns the rows n, the weights and the ids.

Dimensions:
    T   tokens, up to 128; H hidden size; E experts; F this rank's part of the intermediate size of an expert;
    K   experts of a token.

Arguments:
    n             [T, H] @ HBM, float32 or bfloat16: the rows that the experts are given
    weights       [T, K] @ HBM, float32
    ids           [T, K] @ HBM, int32, 0 <= id < E, those of a token all different; with `absent` also E
    w_gate, w_up  [E, H, F] @ HBM, float32 or bfloat16: this rank's columns; read in n's dtype
    w_down        [E, F, H] @ HBM, float32 or bfloat16: this rank's rows; read in n's dtype
    residual      [T, H] @ HBM, n's dtype, the same on every rank; or None: nothing is added
    replica_group nki.collectives.ReplicaGroup, or None for one rank
    activation    "silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", or "swigluoai": with g = min(gate, 7)
                  and u the other product between -7 and 7 it is g * sigmoid(1.702 * g) * (u + 1)
    b_gate, b_up  [E, F] @ HBM, float32 or bfloat16: this rank's columns, or None
    b_down        [E, H] @ HBM, float32 or bfloat16, the same on every rank, or None
    absent        compile-time bool: choices of E are experts of other ranks (see `experts_dispatch`), of weight 0
    w_gate_scales, w_up_scales
                  [E, 1, F] @ HBM, float32: this rank's columns, both or None for both
    w_down_scales [E, 1, H] @ HBM, float32, the same on every rank, or None. Scales multiply the columns of their
                  weight, whose dtype is then float8_e4m3, float8_e5m2 or int8
    w_gate_block_scales, w_up_block_scales, w_down_block_scales
                  [E, ceil(K / 128), ceil(N / 128)] @ HBM, float32, for a weight [E, K, N] on this rank, or None. They
                  multiply blocks of 128 rows and columns, see `experts.block_scales`
    returns y     [T, H] @ HBM, n's dtype, the same on every rank

Layout
    H lies on the partitions for the first two products, F for the last one, whose result has tokens on the partitions.

Tiling
    With no more choices than experts, T * K <= E: for each choice the weights of its expert, from an address that is
        read at run time, times the one row of its token.
    With more: for each expert its weights times all rows, and the intermediate of rows that did not choose it is set to
        zero, whatever it is. So each expert is read once, and no infinity of another row's product comes in.
    Weights with scales have H on the partitions in the down product too, see `experts.column_sums`; scales of columns
        are loaded for 32 passes at a time, see `experts.scale_table`. Their gate and up stream through SBUF.
    Both take the intermediate in chunks, the weights of the next one arriving meanwhile. Weights of rows are multiplied
        into the intermediate; sums over chunks and experts are taken in float32 in SBUF.

Cores
    On a logical core of two physical ones the first does the work.

Limits:
    T up to 128, H up to 8192, in float32 up to 4096; E up to 512.

Cost
    HBM: the weights of min(T * K, E) experts once, residual, n and y once. Over ranks: one all-reduce of y's size in
    n's dtype. Rounding to n's dtype: the weighted intermediate, over ranks the partial sum and the sum, and y. Bound:
    reading the weights. Predicted on trn2 in bfloat16: 96 % of the floor for T = 1 and 97 % for T = 16 and 128
    (H = 2048, F = 1024, E = 64, K = 8).
    With float8_e4m3 weights, on one core in program order, T = 1 and 16 are 1.80 and 1.94 times as fast as in bfloat16
    (H = 2048, F = 768, E = 128, K = 8); 1.49 and 1.89 (F = 192); 1.89 and 1.99 (H = 4096, F = 1792, E = 8, K = 2). With
    block scales T = 1 and 16 are 1.60 and 1.66 times as fast (F = 768). An expert of these sizes that all rows pass
    takes 15.2, 20.4 and 51.9 us for T = 32, 64 and 128, in bfloat16 24: beyond 64 rows block scales cost time.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts.activation import RowWeights
from nki_kernels.experts.arguments import Routing, check_arguments, create_expert_weights, experts_reference
from nki_kernels.experts.chunk_products import (
    GatedChunk,
    activate,
    add_down,
    allocate_intermediate,
    multiply_gate_and_up,
    split_blocks,
)
from nki_kernels.experts.column_sums import (
    ScaledDown,
    add_pending_down,
    allocate_column_sums,
    transpose_sums,
)
from nki_kernels.experts.scale_table import create_scale_table
from nki_kernels.experts.weight_chunks import create_layer, load_chunk, load_down
from nki_kernels.experts.weighted_sums import add_chosen_biases, make_nonzero_mask, sum_over_ranks
from nki_kernels.projection.rows import spread
from nki_kernels.tiles import PARTITIONS, cast, filled, load, load_repeated
from nki_kernels.weights import ExpertIndex

cores = (1,)


@dataclass
class ExpertPass(nl.NKIObject):
    """A pass: rows first_row … end_row - 1 go through one expert.

    row_weights: the rows' weights of the expert on all partitions; or None, and then `column` has them as
    [row, 1] float32, and `identity` [row, row] repeats them on all partitions when the pass begins.
    """

    expert: ExpertIndex
    first_row: int
    end_row: int
    row_weights: RowWeights | None
    column: nl.NkiTensor | None
    identity: nl.NkiTensor | None


@nki.jit
def experts_decode(
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
):
    """Return y [T, H]: the weighted sum of each token's K experts over all ranks, plus the residual, in n's dtype.

    y is in new shared HBM. The module docstring describes the arguments. AssertionError if they do not fit
    together, or for more than 128 tokens.
    """
    scales = (w_gate_scales, w_up_scales, w_down_scales)
    block_scales = (w_gate_block_scales, w_up_block_scales, w_down_block_scales)
    experts = create_expert_weights(w_gate, w_up, w_down, scales, block_scales, b_gate, b_up, b_down)
    routing = Routing(weights, ids, absent)
    check_arguments(residual, n, routing, experts)
    tokens, hidden = n.shape
    assert tokens <= PARTITIONS, (
        f"experts_decode takes at most {PARTITIONS} tokens, not {tokens}: use experts_prefill"
    )
    y = nl.ndarray((tokens, hidden), dtype=n.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    count = w_gate.shape[0]
    few = tokens * ids.shape[1] <= count
    # H lies on the partitions, as the gate and up products contract over it.
    in_runs = w_gate_block_scales is None and w_up_block_scales is None
    transposed = spread(load(n, n.dtype), in_runs)
    passes = plan_choice_passes(routing, count) if few else plan_expert_passes(routing, count)
    layer = create_layer(experts, activation, tokens, n.dtype, 1 if few else tokens)
    # The sum over chunks and experts stays in float32, so no expert adds a rounding of its own.
    if w_down_scales is None and w_down_block_scales is None:
        total = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.sbuf)
        run_passes(total, transposed, layer, passes)
    else:
        sums = allocate_column_sums(hidden, tokens)
        table = None
        if w_down_scales is not None:
            choices = ids.reshape((len(passes), 1)) if few else None
            table = create_scale_table(experts, len(passes), choices)
        run_scaled_passes(sums, transposed, layer, passes, table)
        total = transpose_sums(sums, hidden)
    result = add_residual(total, residual, routing, b_down, replica_group, n.dtype)
    nisa.dma_copy(dst=y, src=result)
    return y


def run_passes(total, x, layer, passes):
    """Write the sum of the expert outputs of all passes to `total` [T, H] float32 in SBUF.

    Each pass takes some rows through one expert, and adds the weighted outputs to their rows of `total`.

    Args:
        x: the rows of all tokens, transposed to [partition, C, row] with C = ceil(H / 128): partition p holds
            elements p * C … of each row.
        layer: `ExpertLayer`: weights, activation, and the columns of the intermediate in each chunk.
        passes: list of `ExpertPass`.

    step        Tensor engine                             the other engines and the DMA queues
    pass p, c   gate and up product, group 0 of blocks    load gate and up of chunk c
                down product of the chunk before          load down of chunk c, activation of group 0
                gate and up product of other groups       activation of each group
    last        down product of the last chunk
    """
    tokens, hidden = total.shape
    summed, gated = None, None
    for expert_pass in passes:
        first_row, end_row = expert_pass.first_row, expert_pass.end_row
        row_weights = expert_pass.row_weights
        if row_weights is None:
            row_weights = repeat_weights(expert_pass.column, expert_pass.identity)
        for c in range(len(layer.chunks)):  # c: chunk of columns of the intermediate
            chunk = load_chunk(layer, expert_pass.expert, c)
            intermediate = allocate_intermediate(chunk, tokens, layer.dtype)
            # Rows that do not choose the expert stay 0.
            nisa.memset(dst=intermediate, value=0.0, engine=nisa.engine.gpsimd)
            rows = intermediate[:, :, first_row:end_row]
            groups = split_blocks(chunk, end_row - first_row)
            for g in range(len(groups)):  # g: group of blocks of the chunk
                sums = multiply_gate_and_up(x[:, :, first_row:end_row], chunk, groups[g], hidden, layer)
                if g == 0:
                    # The down product of the chunk before keeps the Tensor engine busy while this group is activated.
                    if gated is not None:
                        add_down(total, summed, gated, 0)
                        summed = total
                    # Rows of down are loaded here, as those of the chunk before are multiplied and make room.
                    load_down(layer, chunk)
                activate(rows, sums, chunk, layer, row_weights)
            gated = GatedChunk(chunk, intermediate)
    add_down(total, summed, gated, 0)


def run_scaled_passes(total, x, layer, passes, table):
    """Add the expert outputs of all passes, whose weights have scales, to `total`, float32 [h in block, block, row].

    total: in SBUF, zeros at first. table: `ScaleTable` of the passes; None if down has block scales. The other
    arguments and the order are those of `run_passes`. Products of a pass have its rows alone.
    """
    pending, hidden = None, layer.weights.w_down.elements.shape[2]
    if table is not None:
        table.begin_window(0)
    for p in range(len(passes)):
        first_row, end_row = passes[p].first_row, passes[p].end_row
        rows = x[:, :, first_row:end_row]
        row_weights = passes[p].row_weights
        if row_weights is None:
            row_weights = repeat_weights(passes[p].column, passes[p].identity)
        down_scales = None
        for c in range(len(layer.chunks)):  # c: chunk of columns of the intermediate
            chunk = load_chunk(layer, passes[p].expert, c, table is None)
            intermediate = allocate_intermediate(chunk, end_row - first_row, layer.dtype)
            if row_weights.mask is not None:
                # Rows that do not choose the expert stay 0.
                nisa.memset(dst=intermediate, value=0.0, engine=nisa.engine.gpsimd)
            groups = split_blocks(chunk, end_row - first_row)
            for g in range(len(groups)):  # g: group of blocks of the chunk
                sums = multiply_gate_and_up(rows, chunk, groups[g], hidden, layer)
                if g == 0:
                    if pending is not None:
                        add_pending_down(pending)
                    load_down(layer, chunk)
                if table is not None and g == 0:
                    # The first products do not wait until the scales of the first window are transposed.
                    if c == 0:
                        table.advance(p)
                        down_scales = table.select_down(p)
                    chunk.factors = table.select_gate(p, layer.chunks[c])
                activate(intermediate, sums, chunk, layer, row_weights)
            pending = ScaledDown(
                GatedChunk(chunk, intermediate),
                down_scales,
                total[:, :, first_row:end_row],
                hidden,
            )
    add_pending_down(pending)


def plan_choice_passes(routing, experts):
    """Return a list with an `ExpertPass` for each of the T * K choices: the token's row through the chosen expert.

    The expert's index stays in SBUF and addresses its weights at run time. With `routing.absent` a choice of
    an expert of another rank reads the last expert, and its weight of 0 masks the output.

    Args:
        experts: number of experts of this rank.
    """
    tokens, choices = routing.ids.shape
    count = tokens * choices
    ids = load(routing.ids.reshape((1, count)), nl.int32)
    # The intermediate has F on the partitions, so its weight is needed on all of them.
    repeated = load_repeated(routing.weights.reshape((1, count)), PARTITIONS)
    mask = None
    if routing.absent:
        # For an expert of another rank the weights of the last expert are loaded, and the mask drops its output.
        nisa.tensor_scalar(dst=ids, data=ids, op0=nl.minimum, operand0=float(experts - 1))
        mask = make_nonzero_mask(repeated)
    passes = []
    for i in range(count):
        row = i // choices
        row_weights = RowWeights(repeated[:, i : i + 1], None if mask is None else mask[:, i : i + 1])
        expert = ExpertIndex(0, ids[0:1, i : i + 1])
        passes.append(ExpertPass(expert, row, row + 1, row_weights, None, None))
    return passes


def plan_expert_passes(routing, experts):
    """Return a list with an `ExpertPass` for each of this rank's experts: the rows of all tokens.

    The weight of a row whose token did not choose the expert is 0.
    """
    tokens = routing.ids.shape[0]
    by_expert = find_expert_weights(routing, experts)
    identity = filled((tokens, tokens), 1.0)
    nisa.affine_select(
        dst=identity,
        pattern=[[-1, tokens]],
        channel_multiplier=1,
        on_true_tile=identity,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    passes = []
    for expert in range(experts):
        column = by_expert[:, expert : expert + 1]
        passes.append(ExpertPass(ExpertIndex(expert, None), 0, tokens, None, column, identity))
    return passes


def find_expert_weights(routing, experts):
    """Return the weight of each expert for each token, 0 if the token did not choose it: [T, E] float32 in SBUF."""
    tokens, choices = routing.ids.shape
    weights = load(routing.weights, nl.float32)
    # A column that tensor_scalar compares with is float32, which holds numbers below 512 exactly.
    ids = cast(load(routing.ids, nl.int32), nl.float32)
    # An absent choice, E, equals none of these numbers, so its weight is dropped.
    numbers = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers, pattern=[[1, experts]])
    by_expert = filled((tokens, experts), 0.0)
    for k in range(choices):
        chosen = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=chosen,
            data=numbers,
            op0=nl.equal,
            operand0=ids[:, k : k + 1],
            op1=nl.multiply,
            operand1=weights[:, k : k + 1],
        )
        nisa.tensor_tensor(dst=by_expert, data1=by_expert, data2=chosen, op=nl.add)
    return by_expert


def repeat_weights(column, identity):
    """Return weights [row, 1] on all 128 partitions, as `RowWeights` with a mask that is 0 for weights of 0.

    identity: the identity matrix [row, row] float32.
    """
    rows = column.shape[0]
    stationary = nl.ndarray((rows, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    # The copies become partitions of the product: each has the weights of all rows along the free dimension.
    nisa.tensor_copy(dst=stationary, src=column.broadcast(1, PARTITIONS))
    bank = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    # Both operands are float32, so that a product with 1 passes the weight unchanged.
    nisa.nc_matmul(dst=bank, stationary=stationary, moving=identity, accumulate=False)
    weights = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=weights, src=bank)
    return RowWeights(weights, make_nonzero_mask(weights))


def add_residual(total, residual, routing, bias, replica_group, dtype):
    """Return `total` [T, H] float32 summed over ranks, plus weighted biases and residual: a tile in `dtype`.

    Args:
        residual: [T, H] @ HBM, or None for 0.
        bias: the experts' biases b_down [E, H] @ HBM, or None for 0; `routing` has their weights.
        replica_group: the ranks, or None for one rank.
    """
    # The residual and the biases are the same on every rank, so they are added behind the all-reduce.
    addend = None if residual is None else load(residual, dtype)
    if bias is not None:
        addend = add_chosen_biases(addend, routing, bias)
    result = nl.ndarray(total.shape, dtype=dtype, buffer=nl.sbuf)
    summed = total if replica_group is None else sum_over_ranks(total, dtype, replica_group)
    if addend is None:
        nisa.tensor_copy(dst=result, src=summed)
    else:
        nisa.tensor_tensor(dst=result, data1=addend, data2=summed, op=nl.add)
    return result


def experts_decode_reference(
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
) -> np.ndarray:
    """Compute y [T, H] with NumPy, token by token in float32.

    For several ranks pass the intermediate columns of all of them; `replica_group` is not read.
    """
    routing = Routing(weights, ids, absent)
    scales = (w_gate_scales, w_up_scales, w_down_scales)
    block_scales = (w_gate_block_scales, w_up_block_scales, w_down_block_scales)
    experts = create_expert_weights(w_gate, w_up, w_down, scales, block_scales, b_gate, b_up, b_down)
    return experts_reference(residual, n, routing, experts, activation)
