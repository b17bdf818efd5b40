"""experts_decode: routed experts of up to 128 tokens: their weighted sum, over ranks, plus the residual.

    y = x + sum over ranks of sum over k of weights[:, k] * (g(n @ w_gate[e]) * (n @ w_up[e])) @ w_down[e]

where e = ids[:, k], with biases where they are given. `router` returns the rows n, the weights and the ids.

Dimensions
    T   tokens, up to 128; H hidden size; E experts; F this rank's part of the intermediate size of an expert;
    K   experts of a token.

Arguments
    x             [T, H] @ HBM, n's dtype: the residual, the same on every rank; or None: nothing is added
    n             [T, H] @ HBM, float32 or bfloat16: the rows that the experts are given
    weights       [T, K] @ HBM, float32
    ids           [T, K] @ HBM, int32, 0 <= id < E, those of a token all different; with `absent` also E
    w_gate, w_up  [E, H, F] @ HBM, float32 or bfloat16: this rank's columns; read in n's dtype
    w_down        [E, F, H] @ HBM, float32 or bfloat16: this rank's rows; read in n's dtype
    replica_group nki.collectives.ReplicaGroup, or None for one rank
    activation    "silu", "gelu", "gelu_tanh", "relu", or "swigluoai": with g = min(gate, 7) and u the other product
                  between -7 and 7 it is g * sigmoid(1.702 * g) * (u + 1)
    b_gate, b_up  [E, F] @ HBM, float32 or bfloat16: this rank's columns, or None
    b_down        [E, H] @ HBM, float32 or bfloat16, the same on every rank, or None
    absent        compile-time bool: choices of E are experts of other ranks (see `experts_dispatch`), of weight 0
    returns y     [T, H] @ HBM, n's dtype, the same on every rank

Layout
    H lies on the partitions for the first two products, F for the last one, whose result has tokens on the partitions.

Tiling
    With no more choices than experts, T * K <= E: for each choice the weights of its expert, from an address that is
        read at run time, times the one row of its token.
    With more: for each expert its weights times all rows, and the intermediate of rows that did not choose it is set to
        zero, whatever it is. So each expert is read once, and no infinity of another row's product comes in.
    Both take the intermediate in chunks, the weights of the next one arriving meanwhile. Weights of rows are multiplied
        into the intermediate; sums over chunks and experts are taken in float32 in SBUF.

Cores
    On a logical core of two physical ones the first does the work.

Limits
    T up to 128, H up to 8192, in float32 up to 4096; E up to 512.

Cost
    HBM: the weights of min(T * K, E) experts once, x and n once, y once. Over ranks: one all-reduce of y's size in n's
    dtype. Rounding to n's dtype: the weighted intermediate, over ranks the partial sum and the sum, and y. Bound:
    reading the weights. Predicted on trn2 in bfloat16: 96 % of the floor for T = 1 and 97 % for T = 16 and 128
    (H = 2048, F = 1024, E = 64, K = 8).
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts.products import CLAMPED, SIGMOID_SCALE, add_down, biases_of, gated, groups, products
from nki_kernels.experts.weights import chunks, load_chunk, load_down, load_numbers, rows_at
from nki_kernels.mlp import activation_reference
from nki_kernels.precision import widened
from nki_kernels.projection.rows import spread
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, expect_dims, load, load_repeated

MAX_ROW_BYTES = 16384
"""Of a row of activations in one partition."""


@nki.jit
def experts_decode(
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
    assert tokens <= PARTITIONS, f"experts_decode takes at most {PARTITIONS} tokens, not {tokens}"
    y = nl.ndarray((tokens, hidden), dtype=n.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    across = spread(load(n, n.dtype), True)
    total = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.sbuf)
    matrices = (w_gate, w_up, w_down)
    few = tokens * ids.shape[1] <= w_gate.shape[0]
    experts = w_gate.shape[0]
    slots = chosen_slots(weights, ids, experts, absent) if few else all_slots(weights, ids, experts)
    biases = biases_of(b_gate, b_up, tokens, activation, n.dtype)
    sum_of_experts(total, across, matrices, biases, slots, activation)
    result = finished(total, x, n.dtype, (weights, ids), b_down, replica_group, absent)
    nisa.dma_copy(dst=y, src=result)
    return y


def check_arguments(x, n, weights, ids, w_gate, w_up, w_down, b_gate, b_up, b_down, absent):
    """Refuse shapes that do not fit together, and sizes beyond the limits."""
    expect_dims(2, n, "n [T, H]")
    expect_dims(2, ids, "ids [T, K]")
    expect_dims(3, w_gate, "w_gate [E, H, F]")
    tokens, hidden = n.shape
    experts, _, inner = w_gate.shape
    most = MAX_ROW_BYTES // (4 if n.dtype == nl.float32 else 2)
    assert hidden <= most, f"experts take a hidden size of at most {most}, not {hidden}"
    assert experts <= BANK, f"at most {BANK} experts are taken, not {experts}"
    if x is not None:
        assert n.shape == x.shape and n.dtype == x.dtype, (
            f"n is {n.shape} {n.dtype}, x is {x.shape} {x.dtype}"
        )
    assert ids.shape[0] == tokens, f"ids of {ids.shape[0]} tokens, n has {tokens}"
    assert absent or ids.shape[1] <= experts, f"{ids.shape[1]} of {experts} experts for a token"
    assert weights.shape == ids.shape, f"weights are {weights.shape}, ids are {ids.shape}"
    shape = (experts, hidden, inner)
    for matrix in (w_gate, w_up):
        assert matrix.shape == shape, f"w_gate and w_up are {shape}, not {matrix.shape}"
    assert w_down.shape == (experts, inner, hidden), (
        f"w_down is [{experts}, {inner}, {hidden}], not {w_down.shape}"
    )
    assert (b_gate is None) == (b_up is None), "b_gate and b_up come together"
    for bias, columns in ((b_gate, inner), (b_up, inner), (b_down, hidden)):
        if bias is not None:
            assert bias.shape == (experts, columns), f"a bias is [{experts}, {columns}], not {bias.shape}"


def chosen_slots(weights, ids, experts, absent):
    """For each choice (expert, the row of its token, its weight, None), with experts by numbers read at run time."""
    tokens, each = ids.shape
    count = tokens * each
    numbers = load_numbers(ids.reshape((1, count)))
    repeated = load_repeated(weights.reshape((1, count)), PARTITIONS)
    mask = None
    if absent:
        # For an expert of another rank the last own expert's weights are loaded, and the mask drops its output.
        nisa.tensor_scalar(dst=numbers, data=numbers, op0=nl.minimum, operand0=float(experts - 1))
        mask = not_zero(repeated)
    slots = []
    for i in range(count):
        row = i // each
        weighting = (repeated[:, i : i + 1], None if mask is None else mask[:, i : i + 1])
        slots.append(((0, numbers[0:1, i : i + 1]), (row, row + 1), weighting, None))
    return slots


def all_slots(weights, ids, experts):
    """For each expert (expert, all rows, their weights [row, 1], an identity)."""
    tokens, each = ids.shape
    own = load(weights, nl.float32)
    chosen = cast(load_numbers(ids), nl.float32)
    order = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=order, pattern=[[1, experts]])
    spread_out = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=spread_out, value=0.0)
    for k in range(each):
        here = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=here,
            data=order,
            op0=nl.equal,
            operand0=chosen[:, k : k + 1],
            op1=nl.multiply,
            operand1=own[:, k : k + 1],
        )
        nisa.tensor_tensor(dst=spread_out, data1=spread_out, data2=here, op=nl.add)
    identity = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=identity, value=1.0)
    nisa.affine_select(
        dst=identity,
        pattern=[[-1, tokens]],
        channel_multiplier=1,
        on_true_tile=identity,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    slots = []
    for expert in range(experts):
        slots.append(((expert, None), (0, tokens), spread_out[:, expert : expert + 1], identity))
    return slots


def on_all_partitions(column, identity):
    """A column [T, 1] as a row on each of 128 partitions, and which of its elements are not zero."""
    rows = column.shape[0]
    stationary = nl.ndarray((rows, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=stationary, src=column.broadcast(1, PARTITIONS))
    bank = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=bank, stationary=stationary, moving=identity, accumulate=False)
    result = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    return result, not_zero(result)


def not_zero(tile):
    """Which elements of a tile are not zero, uint8."""
    mask = nl.ndarray(tile.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mask, data=tile, op0=nl.not_equal, operand0=0.0)
    return mask


def sum_of_experts(total, across, matrices, biases, slots, activation):
    """The weighted sum of slots, `total` [T, H] float32; the last product of a chunk follows the first of the next."""
    tokens, hidden = total.shape
    dtype = across.dtype
    pieces = chunks(hidden, matrices[0].shape[2], dtype, matrices[0].dtype)
    waiting = None
    before = None
    for expert, rows, weighting, identity in slots:
        if identity is not None:
            weighting = on_all_partitions(weighting, identity)
        for columns in pieces:
            chunk = load_chunk(matrices, biases, expert, columns, dtype)
            result = zeros(chunk["width"], tokens, dtype)
            own = result[:, :, rows[0] : rows[1]]
            for group in groups(chunk["width"], rows[1] - rows[0]):
                sums = products(across[:, :, rows[0] : rows[1]], chunk, group, hidden)
                if group[0] == 0:
                    if waiting is not None:
                        add_down(total, before, waiting[0], 0, waiting[1])
                        before = total
                    load_down(chunk, dtype)
                gated(own, sums, group, chunk["width"], activation, weighting)
            waiting = (result, chunk)
    add_down(total, before, waiting[0], 0, waiting[1])


def zeros(width, rows, dtype):
    """Room for an intermediate [f in block, block, row]: zeros for the rows that do not choose the expert."""
    shape = (min(PARTITIONS, width), blocks(width), rows)
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=result, value=0.0, engine=nisa.engine.gpsimd)
    return result


def finished(total, x, dtype, choices, bias, replica_group, absent):
    """The sum over ranks of a float32 tile [rows, H], plus the weighted biases [E, H] and the residual, where given."""
    before = None if x is None else load(x, dtype)
    if bias is not None:
        before = with_biases(before, choices, bias, absent)
    result = nl.ndarray(total.shape, dtype=dtype, buffer=nl.sbuf)
    added = total if replica_group is None else over_ranks(total, dtype, replica_group)
    if before is None:
        nisa.tensor_copy(dst=result, src=added)
    else:
        nisa.tensor_tensor(dst=result, data1=before, data2=added, op=nl.add)
    return result


def with_biases(tile, choices, bias, absent):
    """Rows, or zeros, plus the weighted biases [E, H] of their experts, in float32."""
    weights, ids = choices
    shape = (ids.shape[0], bias.shape[1])
    own = load(weights, nl.float32)
    numbers = load_numbers(ids)
    mask = None
    if absent:
        nisa.tensor_scalar(dst=numbers, data=numbers, op0=nl.minimum, operand0=float(bias.shape[0] - 1))
        mask = not_zero(own)
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    if tile is None:
        nisa.memset(dst=result, value=0.0)
    else:
        result = cast(tile, nl.float32)
    for k in range(ids.shape[1]):
        rows = nl.ndarray(shape, dtype=bias.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=rows_at(bias, numbers[:, k : k + 1]))
        if mask is not None:
            loaded = rows
            rows = nl.ndarray(shape, dtype=bias.dtype, buffer=nl.sbuf)
            nisa.memset(dst=rows, value=0.0)
            chosen = mask[:, k : k + 1].broadcast(1, shape[1])
            nisa.tensor_copy_predicated(dst=rows, src=loaded, predicate=chosen)
        nisa.scalar_tensor_tensor(
            dst=result, data=rows, op0=nl.multiply, operand0=own[:, k : k + 1], op1=nl.add, operand1=result
        )
    return result


def over_ranks(partial, dtype, replica_group):
    """The sum over ranks of a float32 tile [rows, H], rounded to a dtype before and after."""
    own = nl.ndarray(partial.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=own, src=partial)
    total = nl.ndarray(partial.shape, dtype=dtype, buffer=nl.sbuf)
    ncc.all_reduce(srcs=[own], dsts=[total], replica_group=replica_group, op=nl.add)
    return total


def experts_decode_reference(
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
    """Token by token in float32. For several ranks pass the whole of all: the sum over ranks is the product."""
    rows = widened(n)
    y = np.zeros_like(rows) if x is None else widened(x).copy()
    for token, k in np.ndindex(*ids.shape):
        expert = ids[token, k]
        if absent and expert == len(w_gate):
            continue
        row = rows[token : token + 1]
        gate, up = row @ widened(w_gate[expert]), row @ widened(w_up[expert])
        if b_gate is not None and b_up is not None:
            gate, up = gate + widened(b_gate[expert]), up + widened(b_up[expert])
        own = (gated_reference(gate, up, activation) @ widened(w_down[expert]))[0]
        if b_down is not None:
            own = own + widened(b_down[expert])
        y[token] += weights[token, k] * own
    return y.astype(n.dtype)


def gated_reference(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """The intermediate of an expert."""
    if activation != "swigluoai":
        return activation_reference(gate, activation) * up
    bounded = np.minimum(gate, gate.dtype.type(CLAMPED))
    glu = bounded / (1 + np.exp(-gate.dtype.type(SIGMOID_SCALE) * bounded))
    return glu * (np.clip(up, -CLAMPED, CLAMPED) + 1)
