"""The products of one chunk of an expert's weights: rows to gated intermediate, and that to a part of the result.

Weights are stationary in the first two, so that the intermediate comes out with F on the partitions, as the third takes
it. Sums of the third over chunks, and over experts in a decode step, are taken in float32 in SBUF.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.mlp import activation_function
from nki_kernels.projection.products import read_out
from nki_kernels.projection.rows import in_block
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

CLAMPED = 7.0
"""Where the clamped gate of gpt-oss ends, and its linear part on both sides."""

SIGMOID_SCALE = 1.702
"""Of the argument of its sigmoid."""

LARGEST_GATE = CLAMPED * (1.0 / (1.0 + 2.718281828459045 ** (-SIGMOID_SCALE * CLAMPED)))
"""The clamped gate times its sigmoid where it ends: the product grows with the gate, so it is the largest."""


def biases_of(gate, up, rows, activation, dtype):
    """What the sums of a launch begin with: biases [E, F] in HBM or None, and 1 where the linear part is up + 1.

    "ones", two rows, multiply biases and the 1 for each of `rows` rows.
    """
    clamped = activation == "swigluoai"
    ones = None
    if gate is not None or clamped:
        ones = nl.ndarray((2, max(rows, PARTITIONS)), dtype=dtype, buffer=nl.sbuf)
        nisa.memset(dst=ones, value=1.0)
    return {"gate": gate, "up": up, "ones": ones, "plus_one": (False, clamped)}


def groups(width, rows):
    """Ranges of blocks of a chunk whose sums with gate fill one PSUM bank."""
    return ranges(0, blocks(width), max(1, BANK // rows))


def products(across, chunk, group, hidden):
    """Of rows [h in run, block, row] the sums with a group of blocks of gate and up, biases included.

    Both are PSUM tiles [f in block, block of the group, row].
    """
    rows = across.shape[2]
    width = chunk["width"]
    first, last = group
    found = []
    for side in range(2):
        bank = nl.ndarray((min(PARTITIONS, width), last - first, rows), dtype=nl.float32, buffer=nl.psum)
        begun = add_bias(bank, chunk, side, first)
        for start_block, piece in chunk["columns"][side]:
            for within in range(piece.shape[1]):
                block = start_block + within
                used = in_block(hidden, block, True)
                for i in range(first, last):
                    start, end = i * PARTITIONS, min(width, (i + 1) * PARTITIONS)
                    nisa.nc_matmul(
                        dst=bank[0 : end - start, i - first, :],
                        stationary=piece[0:used, within, start:end],
                        moving=across[0:used, block, :],
                        accumulate=begun or block > 0,
                    )
        found.append(bank)
    return found


def add_bias(bank, chunk, side, first):
    """Begin the sums of blocks from `first` on with their bias and with 1, a product with ones; whether with any."""
    rows, ones = chunk["biases"][side], chunk["ones"]
    if rows is None and chunk["plus_one"][side]:
        rows = ones
    if rows is None:
        return False
    for i in range(bank.shape[1]):
        start, end = (first + i) * PARTITIONS, min(chunk["width"], (first + i + 1) * PARTITIONS)
        # Without a bias the one row of ones is that of a block of 128.
        own = rows[0:1, 0 : end - start] if chunk["biases"][side] is None else rows[:, start:end]
        moving = ones[0 : own.shape[0], 0 : bank.shape[2]]
        nisa.nc_matmul(dst=bank[0 : end - start, i, :], stationary=own, moving=moving, accumulate=False)
    return True


def gated(result, sums, group, width, activation, weighting=None):
    """The intermediate of what `products` gives for a group, to its blocks of `result` [f in block, block, row].

    weighting: None, (column [128, 1], None) for one weight, or (weights [128, row], mask alike), see `weighted`.
    """
    gate, up = sums
    at = group[0]
    for start, end, height in heights(width, group):
        banks = (gate[0:height, start - at : end - at, :], up[0:height, start - at : end - at, :])
        first, second = activated(banks[0], banks[1], activation)
        most = LARGEST_GATE if activation == "swigluoai" else None
        weighted(result[0:height, start:end, :], first, second, weighting, most)


def weighted(target, first, second, weighting, most):
    """The product of two tiles [f, block, row], the first bounded by `most` or None, times the weights of their rows.

    It is rounded once. Rows where the mask is 0 keep what the target holds, whatever the tiles do.
    """
    if weighting is None and most is not None:
        nisa.scalar_tensor_tensor(
            dst=target, data=first, op0=nl.minimum, operand0=most, op1=nl.multiply, operand1=second
        )
        return
    if weighting is None:
        nisa.tensor_tensor(dst=target, data1=first, data2=second, op=nl.multiply)
        return
    if most is not None:
        nisa.tensor_scalar(dst=first, data=first, op0=nl.minimum, operand0=most)
    height, count, _ = target.shape
    weights, mask = weighting
    if mask is None:
        nisa.scalar_tensor_tensor(
            dst=target,
            data=first,
            op0=nl.multiply,
            operand0=weights[0:height, :],
            op1=nl.multiply,
            operand1=second,
        )
        return
    product = nl.ndarray(target.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=first, data2=second, op=nl.multiply)
    factor = weights[0:height, :].expand_dim(1).broadcast(1, count)
    rounded = nl.ndarray(target.shape, dtype=target.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=rounded, data1=product, data2=factor, op=nl.multiply)
    chosen = mask[0:height, :].expand_dim(1).broadcast(1, count)
    nisa.tensor_copy_predicated(dst=target, src=rounded, predicate=chosen)


def heights(width, group):
    """Ranges (start, end, height) of equally high blocks of a group of blocks of a chunk."""
    first, last = group
    height = min(PARTITIONS, width)
    full = min(last, width // height)
    found = []
    if full > first:
        found.append((first, full, height))
    if last > full:
        found.append((full, last, width - full * height))
    return found


def activated(gate, up, activation):
    """Two tiles whose product is the intermediate, of the sums with gate and up.

    That of the clamped gate is not bounded yet: one instruction bounds and multiplies, see `weighted`.
    """
    first = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    if activation != "swigluoai":
        nisa.activation(dst=first, op=activation_function(activation), data=gate)
        return first, up
    nisa.activation(dst=first, op=nl.sigmoid, data=gate, scale=SIGMOID_SCALE)
    nisa.scalar_tensor_tensor(
        dst=first, data=gate, op0=nl.minimum, operand0=CLAMPED, op1=nl.multiply, operand1=first
    )
    second = nl.ndarray(up.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=second, data=up, op0=nl.minimum, operand0=CLAMPED + 1.0, op1=nl.maximum, operand1=1.0 - CLAMPED
    )
    return first, second


def add_down(result, total, inner, first_row, chunk):
    """result = total + rows of the intermediate times the chunk's rows of down; both [row, H], total float32 or None.

    inner: [f in block, block, row], of which those from `first_row` on.
    """
    rows, hidden = result.shape
    panels = ranges(0, hidden, BANK)
    for number in range(len(panels)):
        start, end = panels[number]
        bank = nl.ndarray((rows, end - start), dtype=nl.float32, buffer=nl.psum)
        for block in range(len(chunk["down"])):
            down = chunk["down"][block]
            nisa.nc_matmul(
                dst=bank,
                stationary=inner[0 : down.shape[0], block, first_row : first_row + rows],
                moving=down[:, start:end],
                accumulate=block > 0,
            )
        if total is None:
            read_out(result[:, start:end], bank, number % 2 == 0)
        else:
            nisa.tensor_tensor(dst=result[:, start:end], data1=total[:, start:end], data2=bank, op=nl.add)
