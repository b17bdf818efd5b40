"""State that outlives an instruction: accumulator registers, random generators, Python's own."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


def _answer_of_maximum_by_default(x, mask):
    kept = x * mask
    return kept - kept.max(axis=1, keepdims=True)


@fault(
    "NKW-REGISTERS-UNSET", ramp(4, 8), (ramp(4, 8) % 2).astype(np.uint8), answer=_answer_of_maximum_by_default
)
def maximum_by_default(x, mask, sick):
    """select_reduce is asked for the maximum and keeps its default command, which does not accumulate."""
    tile, chosen = nl.load(x), nl.load(mask)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    highest = nl.zeros((4, 1), dtype=nl.float32)
    command = nisa.reduce_cmd.idle if sick else nisa.reduce_cmd.reset_reduce
    nisa.select_reduce(  # blamed
        dst=kept, predicate=chosen, on_true=tile, on_false=0.0, reduce_res=highest, reduce_cmd=command
    )
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.subtract, operand0=highest)
    return copied_out(kept)


@fault("NKW-REGISTERS-UNSET", ramp(8, 8), answer=lambda x: x.sum(axis=1, keepdims=True))
def more_rows_than_reset(x, sick):
    """The last block has more rows than the one that reset the registers."""
    sums = nl.ndarray((8, 1), dtype=nl.float32)
    tile = nl.load(x)
    rows = 4 if sick else 8
    nisa.activation(
        dst=tile[0:rows, 0:4],
        op=nl.relu,
        data=tile[0:rows, 0:4],
        reduce_op=nl.add,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.activation(  # blamed
        dst=tile[:, 4:8],
        op=nl.relu,
        data=tile[:, 4:8],
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reduce,
    )
    return copied_out(sums)


@fault("NKW-REGISTERS-UNSET", ramp(4, 8), answer=lambda x: x + x.sum(axis=1, keepdims=True))
def result_of_an_idle_sum(x, sick):
    """reduce_res without a reduce_cmd: activation reads out the sum that an earlier program left in the registers."""
    tile = nl.load(x)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    if sick:
        nisa.activation(dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums)  # blamed
    else:
        nisa.activation_reduce(dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=sums)
    return copied_out(tile)


@fault(
    "NKW-RANDOM-UNSEEDED",
    ramp(4, 8, dtype=np.int32),
    (ramp(4, 6) + 1).astype(np.uint32),
    answer=lambda x, words: x,
)
def seed_of_another_engine(x, words, sick):
    """The seed goes to GpSimd, and the random bits are drawn by the Vector engine."""
    tile = nl.load(x)
    state = nl.load(words)
    nisa.rand_set_state(src_seeds=state, engine=nisa.engine.gpsimd)
    bits = nl.ndarray((4, 8), dtype=nl.int32)
    engine = nisa.engine.vector if sick else nisa.engine.gpsimd
    nisa.rng(dst=bits, engine=engine)  # blamed
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.bitwise_and, operand0=0)
    nisa.tensor_tensor(dst=bits, data1=bits, data2=tile, op=nl.add)
    return copied_out(bits)


@fault(
    "NKW-REGISTERS-IDLE",
    ramp(4, 8),
    (ramp(4, 8) % 2).astype(np.uint8),
    answer=lambda x, mask: x * mask + 2 * x.sum(axis=1, keepdims=True),
)
def spoilt_by_a_selection(x, mask, sick):
    """A select_reduce with the default reduce_cmd runs between the two halves of a sum."""
    tile, chosen = nl.load(x), nl.load(mask)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    doubled = nl.ndarray((4, 8), dtype=nl.float32)
    if not sick:
        nisa.select_reduce(dst=kept, predicate=chosen, on_true=tile, on_false=0.0)
    for half in range(2):
        columns = slice(half * 4, half * 4 + 4)
        if sick and half == 1:
            nisa.select_reduce(dst=kept, predicate=chosen, on_true=tile, on_false=0.0)
        command = nisa.reduce_cmd.reduce if half else nisa.reduce_cmd.reset_reduce
        nisa.tensor_scalar_reduce(  # blamed
            dst=doubled[:, columns],
            data=tile[:, columns],
            op0=nl.multiply,
            operand0=2.0,
            reduce_op=nl.add,
            reduce_res=sums,
            reduce_cmd=command,
        )
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.add, operand0=sums)
    return copied_out(kept)


@fault("NKW-REGISTERS-UNSET", ramp(4, 8), answer=lambda x: x.sum(axis=1, keepdims=True))
def sum_never_reset(x, sick):
    """Partial sums are added up in the Scalar registers with reduce from the first block on."""
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    for block in range(2):
        tile = nl.load(x[:, block * 4 : block * 4 + 4])
        first = nisa.reduce_cmd.reduce if sick else nisa.reduce_cmd.reset_reduce
        command = nisa.reduce_cmd.reduce if block else first
        nisa.activation(  # blamed
            dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums, reduce_cmd=command
        )
    return copied_out(sums)


@fault("NKW-REGISTERS-REOPENED", ramp(2, 4, 8), answer=lambda x: x.sum(axis=2, keepdims=True))
def sum_of_the_rows_before(x, sick):
    """The registers are reset once before the loop over row blocks, and each sum contains those before it."""
    out = nl.ndarray((2, 4, 1), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for block in range(2):
        tile = nl.load(x[block])
        sums = nl.ndarray((4, 1), dtype=nl.float32)
        fresh = block == 0 if sick else True
        command = nisa.reduce_cmd.reset_reduce if fresh else nisa.reduce_cmd.reduce
        nisa.activation(  # blamed
            dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=sums, reduce_cmd=command
        )
        nisa.dma_copy(dst=out[block], src=sums)
    return out


def _answer_of_sum_onto_a_maximum(x, mask):
    kept = x * mask
    return (kept - kept.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)


@fault(
    "NKW-REGISTERS-OPERATOR",
    ramp(4, 8),
    (ramp(4, 8) % 2).astype(np.uint8),
    answer=_answer_of_sum_onto_a_maximum,
)
def sum_onto_a_maximum(x, mask, sick):
    """The Vector engine's registers hold a maximum, and the next instruction adds to them."""
    tile, chosen = nl.load(x), nl.load(mask)
    kept = nl.ndarray((4, 8), dtype=nl.float32)
    highest = nl.ndarray((4, 1), dtype=nl.float32)
    sums = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.select_reduce(
        dst=kept,
        predicate=chosen,
        on_true=tile,
        on_false=0.0,
        reduce_res=highest,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    command = nisa.reduce_cmd.reduce if sick else nisa.reduce_cmd.reset_reduce
    nisa.tensor_scalar_reduce(  # blamed
        dst=kept,
        data=kept,
        op0=nl.subtract,
        operand0=highest,
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=command,
    )
    return copied_out(sums)


@fault("NKW-RANDOM-UNSEEDED", ramp(4, 8), np.array([[42]], np.int32), answer=lambda x, seed: x)
def unseeded_dropout(x, seed, sick):
    """Dropout without a seed: every run of the program drops other elements."""
    tile, word = nl.load(x), nl.load(seed)
    dropped = nl.ndarray((4, 8), dtype=nl.float32)
    if not sick:
        nisa.set_rng_seed(src_seeds=word)
    nisa.dropout(dst=dropped, data=tile, prob=1.0)  # blamed
    nisa.tensor_tensor(dst=dropped, data1=dropped, data2=tile, op=nl.add)
    return copied_out(dropped)


@fault("NKW-REGISTERS-UNREAD", ramp(4, 16), answer=lambda x: x.sum(axis=1, keepdims=True))
def each_block_resets_the_sum(x, sick):
    """Each block of columns resets the Scalar registers, so that only the last one is summed."""
    tile, sums = nl.load(x), nl.ndarray((4, 1), dtype=nl.float32)
    for block in range(4):
        first = sick or block == 0
        nisa.activation(  # blamed
            dst=nl.ndarray((4, 4), dtype=nl.float32),
            op=nl.relu,
            data=tile[:, block * 4 : block * 4 + 4],
            reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reset_reduce if first else nisa.reduce_cmd.reduce,
            reduce_res=sums if block == 3 else None,
        )
    return copied_out(sums)


@fault("NKW-REGISTERS-UNREAD", ramp(2, 4, 8), answer=lambda x: x.sum(axis=2).T)
def next_row_reset_before_the_sum_is_read(x, sick):
    """The sums of two halves are complete when the first half of the next matrix resets the registers."""
    sums = nl.ndarray((4, 2), dtype=nl.float32)
    if sick:
        nisa.memset(dst=sums, value=0.0)
    for matrix in range(2):
        tile = nl.load(x[matrix])
        first, second = nl.ndarray((4, 4), dtype=nl.float32), nl.ndarray((4, 4), dtype=nl.float32)
        nisa.activation(  # blamed
            dst=first,
            op=nl.copy,
            data=tile[:, 0:4],
            reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.activation(
            dst=second,
            op=nl.copy,
            data=tile[:, 4:8],
            reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reduce,
            reduce_res=None if sick and matrix == 0 else sums[:, matrix : matrix + 1],
        )
    return copied_out(sums)


@fault("NKW-REGISTERS-UNREAD", ramp(4, 12), answer=lambda x: x.max(axis=1, keepdims=True))
def maxima_of_blocks_reset_on_vector(x, sick):
    """The Vector engine starts the maximum anew in the second block; the third one continues and reads it out."""
    tile, most = nl.load(x), nl.ndarray((4, 1), dtype=nl.float32)
    for block in range(3):
        columns = tile[:, block * 4 : block * 4 + 4]
        restart = block == 0 or (sick and block == 2)
        nisa.tensor_scalar_reduce(  # blamed
            dst=nl.ndarray((4, 4), dtype=nl.float32),
            data=columns,
            op0=nl.add,
            operand0=0.0,
            reduce_op=nl.maximum,
            reduce_cmd=nisa.reduce_cmd.reset_reduce if restart else nisa.reduce_cmd.reduce,
            reduce_res=most if block == 2 else None,
        )
    return copied_out(most)


@fault("NKW-REGISTERS-UNREAD", ramp(4, 8), answer=lambda x: x.sum(axis=1, keepdims=True) + x)
def sum_never_read_out(x, sick):
    """The last instruction of a sum names no tile for it, and the first column is added in its place."""
    tile, sums = nl.load(x), nl.ndarray((4, 1), dtype=nl.float32)
    copy = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.activation(
        dst=copy[:, 0:4],
        op=nl.copy,
        data=tile[:, 0:4],
        reduce_op=nl.add,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.activation(  # blamed
        dst=copy[:, 4:8],
        op=nl.copy,
        data=tile[:, 4:8],
        reduce_op=nl.add,
        reduce_cmd=nisa.reduce_cmd.reduce,
        reduce_res=None if sick else sums,
    )
    nisa.tensor_scalar(dst=copy, data=copy, op0=nl.add, operand0=tile[:, 0:1] if sick else sums)
    return copied_out(copy)


@fault(
    "NKW-REGISTERS-REOPENED",
    ramp(4, 16),
    answer=lambda x: x[:, 0:8].sum(1, keepdims=True) - x[:, 8:].sum(1, keepdims=True),
)
def second_half_onto_the_first_sum(x, sick):
    """The sum of the first half is used, and that of the second half begins with it."""
    tile, copy = nl.load(x), nl.ndarray((4, 16), dtype=nl.float32)
    sums = [nl.ndarray((4, 1), dtype=nl.float32) for _ in range(2)]
    negated = nl.ndarray((4, 1), dtype=nl.float32)
    command = nisa.reduce_cmd.reset_reduce
    for half in range(2):
        columns = slice(half * 8, half * 8 + 8)
        nisa.activation(  # blamed
            dst=copy[:, columns],
            op=nl.copy,
            data=tile[:, columns],
            reduce_op=nl.add,
            reduce_res=sums[half],
            reduce_cmd=command,
        )
        if half == 0:
            nisa.tensor_scalar(dst=negated, data=sums[0], op0=nl.multiply, operand0=-1.0)
            command = nisa.reduce_cmd.reduce if sick else command
    out = nl.ndarray((4, 1), dtype=nl.float32)
    nisa.scalar_tensor_tensor(
        dst=out, data=sums[1], op0=nl.multiply, operand0=-1.0, op1=nl.subtract, operand1=negated
    )
    return copied_out(out)


@fault("NKW-REGISTERS-REOPENED", ramp(3, 4, 8), answer=lambda x: x.max(2).T + 1)
def maxima_of_matrices_carried_on(x, sick):
    """The maximum of each matrix is read out and used, and the Vector registers are reset for the first one only."""
    out = nl.ndarray((4, 3), dtype=nl.float32)
    for matrix in range(3):
        most, copy = nl.ndarray((4, 1), dtype=nl.float32), nl.ndarray((4, 8), dtype=nl.float32)
        continues = sick and matrix > 0
        nisa.tensor_scalar_reduce(  # blamed
            dst=copy,
            data=nl.load(x[matrix]),
            op0=nl.add,
            operand0=1.0,
            reduce_op=nl.maximum,
            reduce_res=most,
            reduce_cmd=nisa.reduce_cmd.reduce if continues else nisa.reduce_cmd.reset_reduce,
        )
        nisa.tensor_copy(dst=out[:, matrix : matrix + 1], src=most)
    return copied_out(out)
