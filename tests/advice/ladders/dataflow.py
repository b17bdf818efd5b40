"""Pairs of kernels whose first one the dataflow bound shows to be slow, and whose second one follows the advice.

Each pair computes the same values. `tests/advice/test_dataflow.py` holds the predicted gain against the second kernel.
"""

from __future__ import annotations

from typing import Any

from simulate.nki import isa as nisa
from simulate.nki import language as nl


def _output(shape: tuple[int, ...], dtype: Any) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def _product(a: Any, b: Any, in_order_of_use: bool) -> Any:
    """Compute a.T @ b for a [depth, 128] and b [depth, 512]: all tiles of b first, or each with its tile of a."""
    depth = a.shape[0]
    steps = range(0, depth, 128)
    left, right = {}, {}
    if not in_order_of_use:
        for k in steps:
            right[k] = nl.load(b[k : k + 128])
    for k in steps:
        left[k] = nl.load(a[k : k + 128])
        if in_order_of_use:
            right[k] = nl.load(b[k : k + 128])
    total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
    for k in steps:
        nisa.nc_matmul(dst=total, stationary=left[k], moving=right[k], accumulate=k > 0)
    result = nl.ndarray((128, 512), dtype=a.dtype)
    nisa.tensor_copy(dst=result, src=total)
    c = _output((128, 512), a.dtype)
    nisa.dma_copy(dst=c, src=result)
    return c


def product_loads_b_first(a, b):
    """Load all of b before a."""
    return _product(a, b, False)


def product_loads_in_order(a, b):
    """Load tiles of a and b in turn."""
    return _product(a, b, True)


def _gated(x: Any, gate: Any, in_order_of_use: bool) -> Any:
    """Compute tanh, three times, of x times gate by blocks of 128 rows; gates are loaded first, or behind a block."""
    rows = range(0, x.shape[0], 128)
    blocks, gates = {}, {}
    if not in_order_of_use:
        for row in rows:
            gates[row] = nl.load(gate[row : row + 128])
    for row in rows:
        blocks[row] = nl.load(x[row : row + 128])
        if in_order_of_use:
            gates[row] = nl.load(gate[row : row + 128])
    y = _output(x.shape, x.dtype)
    for row in rows:
        for _ in range(3):
            nisa.activation(dst=blocks[row], op=nl.tanh, data=blocks[row])
        result = nl.ndarray((128, x.shape[1]), dtype=x.dtype)
        nisa.tensor_tensor(dst=result, data1=blocks[row], data2=gates[row], op=nl.multiply)
        nisa.dma_copy(dst=y[row : row + 128], src=result)
    return y


def gates_first(x, gate):
    """Load all gates before the first block."""
    return _gated(x, gate, False)


def gates_in_order(x, gate):
    """Load each gate behind its block."""
    return _gated(x, gate, True)


def _elementwise(x: Any, y: Any, rows: int) -> Any:
    """Compute silu(x) * y + x on tiles of `rows` partitions."""
    shape = rows, x.shape[0] * x.shape[1] // rows
    left, right = (nl.ndarray(shape, dtype=x.dtype) for _ in range(2))
    nisa.dma_copy(dst=left, src=x.reshape(shape))
    nisa.dma_copy(dst=right, src=y.reshape(shape))
    result = nl.ndarray(shape, dtype=x.dtype)
    nisa.activation(dst=result, op=nl.silu, data=left)
    nisa.tensor_tensor(dst=result, data1=result, data2=right, op=nl.multiply)
    nisa.tensor_tensor(dst=result, data1=result, data2=left, op=nl.add)
    out = _output(x.shape, x.dtype)
    nisa.dma_copy(dst=out.reshape(shape), src=result)
    return out


def few_partitions(x, y):
    """Use as many partitions as x has rows."""
    return _elementwise(x, y, x.shape[0])


def all_partitions(x, y):
    """Use all 128 partitions."""
    return _elementwise(x, y, 128)


def _softmax_steps(x: Any, heads: list[int], y: Any) -> None:
    """Compute softmax over the rows of x[head] for some heads, step by step."""
    tiles = {head: nl.load(x[head]) for head in heads}
    sums = {head: nl.ndarray((x.shape[1], 1), dtype=nl.float32) for head in heads}
    for head in heads:
        nisa.activation(dst=tiles[head], op=nl.exp, data=tiles[head])
    for head in heads:
        nisa.tensor_reduce(dst=sums[head], op=nl.add, data=tiles[head], axis=1)
    for head in heads:
        nisa.reciprocal(dst=sums[head], data=sums[head])
    for head in heads:
        nisa.tensor_scalar(dst=tiles[head], data=tiles[head], op0=nl.multiply, operand0=sums[head])
    for head in heads:
        nisa.dma_copy(dst=y[head], src=tiles[head])


def softmax_head_by_head(x):
    """Compute one head after the other."""
    y = _output(x.shape, x.dtype)
    for head in range(x.shape[0]):
        _softmax_steps(x, [head], y)
    return y


def softmax_two_heads_in_turn(x):
    """Take each step for two heads."""
    y = _output(x.shape, x.dtype)
    for head in range(0, x.shape[0], 2):
        _softmax_steps(x, [head, head + 1], y)
    return y


def _norm_steps(x: Any, blocks: list[int], y: Any) -> None:
    """Compute x / sqrt(mean(x * x)) for some blocks of 128 rows, step by step on the Scalar and the Vector engine."""
    rows = {block: slice(block * 128, block * 128 + 128) for block in blocks}
    tiles = {block: nl.load(x[rows[block]]) for block in blocks}
    squares = {block: nl.ndarray(tiles[block].shape, dtype=nl.float32) for block in blocks}
    means = {block: nl.ndarray((128, 1), dtype=nl.float32) for block in blocks}
    for block in blocks:
        nisa.activation(dst=squares[block], op=nl.square, data=tiles[block])
    for block in blocks:
        nisa.tensor_reduce(dst=means[block], op=nl.add, data=squares[block], axis=1)
    for block in blocks:
        nisa.activation(dst=means[block], op=nl.rsqrt, data=means[block], scale=1.0 / x.shape[1])
    for block in blocks:
        nisa.tensor_scalar(dst=tiles[block], data=tiles[block], op0=nl.multiply, operand0=means[block])
    for block in blocks:
        nisa.dma_copy(dst=y[rows[block]], src=tiles[block])


def norm_block_by_block(x):
    """Compute one block after the other."""
    y = _output(x.shape, x.dtype)
    for block in range(x.shape[0] // 128):
        _norm_steps(x, [block], y)
    return y


def norm_two_blocks_in_turn(x):
    """Take each step for two blocks."""
    y = _output(x.shape, x.dtype)
    for block in range(0, x.shape[0] // 128, 2):
        _norm_steps(x, [block, block + 1], y)
    return y


def _transposed(a: Any) -> Any:
    """Transpose a [128, depth] to tiles [128, 128] of a.T."""
    tiles = []
    for k in range(0, a.shape[1], 128):
        bank = nl.ndarray((128, 128), dtype=a.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=a[:, k : k + 128])
        tile = nl.ndarray((128, 128), dtype=a.dtype)
        nisa.tensor_copy(dst=tile, src=bank)
        tiles.append(tile)
    return tiles


def _rows_times(a: Any, b: Any, hoisted: bool) -> Any:
    """Compute a @ b for a [128, depth]; a is transposed once, or for every block of columns."""
    rows = nl.load(a)
    panels = [nl.load(b[k : k + 128]) for k in range(0, a.shape[1], 128)]
    c = _output((128, b.shape[1]), a.dtype)
    once = _transposed(rows) if hoisted else None
    for column in range(0, b.shape[1], 512):
        tiles = once if hoisted else _transposed(rows)
        total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
        for k, tile in enumerate(tiles):
            moving = panels[k][:, column : column + 512]
            nisa.nc_matmul(dst=total, stationary=tile, moving=moving, accumulate=k > 0)
        result = nl.ndarray((128, 512), dtype=a.dtype)
        nisa.tensor_copy(dst=result, src=total)
        nisa.dma_copy(dst=c[:, column : column + 512], src=result)
    return c


def transposes_for_every_block(a, b):
    """Transpose inside the loop over columns."""
    return _rows_times(a, b, False)


def transposes_once(a, b):
    """Transpose before the loop."""
    return _rows_times(a, b, True)


def _scaled_blocks(x: Any, scale: Any, hoisted: bool) -> Any:
    """Compute x * sigmoid(scale) by blocks of 128 rows; the sigmoid is computed once, or for every block."""

    def factor() -> Any:
        tile = nl.load(scale)
        result = nl.ndarray(tile.shape, dtype=nl.float32)
        nisa.activation(dst=result, op=nl.sigmoid, data=tile)
        nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=2.0)
        return result

    y = _output(x.shape, x.dtype)
    once = factor() if hoisted else None
    for row in range(0, x.shape[0], 128):
        block = nl.load(x[row : row + 128])
        nisa.tensor_tensor(dst=block, data1=block, data2=once if hoisted else factor(), op=nl.multiply)
        nisa.dma_copy(dst=y[row : row + 128], src=block)
    return y


def sigmoid_for_every_block(x, scale):
    """Compute the sigmoid inside the loop."""
    return _scaled_blocks(x, scale, False)


def sigmoid_once(x, scale):
    """Compute the sigmoid before the loop."""
    return _scaled_blocks(x, scale, True)


def running_sum(x):
    """Sum the blocks so far: each block needs the one before it."""
    y = _output(x.shape, nl.float32)
    total = nl.ndarray((128, x.shape[1]), dtype=nl.float32)
    nisa.memset(dst=total, value=0.0)
    for row in range(0, x.shape[0], 128):
        block = nl.load(x[row : row + 128])
        result = nl.ndarray(block.shape, dtype=nl.float32)
        nisa.tensor_tensor(dst=result, data1=total, data2=block, op=nl.add)
        nisa.dma_copy(dst=y[row : row + 128], src=result)
        total = result
    return y


def sigmoid_of_a_changing_scale(x, scale):
    """Compute x * sigmoid(scale) by blocks, where the scale is doubled after each block."""
    y = _output(x.shape, x.dtype)
    tile = nl.load(scale)
    for row in range(0, x.shape[0], 128):
        factor = nl.ndarray(tile.shape, dtype=nl.float32)
        nisa.activation(dst=factor, op=nl.sigmoid, data=tile)
        block = nl.load(x[row : row + 128])
        nisa.tensor_tensor(dst=block, data1=block, data2=factor, op=nl.multiply)
        nisa.dma_copy(dst=y[row : row + 128], src=block)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    return y
