"""The inverses of the blocks of 16 on the diagonal of (1 + A) transposed, element by element, a block on a partition.

With Y the inverses of blocks of w, those of 2w have Y N Y beside them, with -A transposed for N: first the product of N
and the second Y, then that of the first Y and the result. GpSimd multiplies in float32 what the Vector engine adds up.

Tiles of a wave have n heads, of all its units. Blocks lie on the partitions as [half, block of half, head]. They come
from the tiles of chunks, and go back to them, by way of HBM, which zeros surround there: both halves of a chunk are
loaded as squares of 64 with nothing beside the blocks.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS

BLOCK = 16
"""Rows of the blocks."""

HALF = PARTITIONS // 2
"""Tokens of the two halves of a chunk, whose triangles are inverted side by side."""

SQUARE = HALF * HALF
IN_HALF = HALF // BLOCK
"""Blocks on the diagonal of a half."""

IN_TURN = 3
"""Waves whose inverses are on their way through HBM."""


def scratch_buffers(heads, dtype):
    """Buffers in HBM, used in turn: triangles [half, row, head, column]; zeros [y or x, half, row, head, column]."""
    zeros = nl.ndarray((PARTITIONS, 2 * 2 * SQUARE // PARTITIONS * heads), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    found = []
    for _ in range(IN_TURN):
        shape = (2, HALF, heads, HALF)
        triangles = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm, name="triangles")
        inverses = nl.ndarray((2, 2, HALF, heads, HALF), dtype=dtype, buffer=nl.private_hbm, name="inverses")
        transfer(inverses, zeros, COMPILER)
        found.append((triangles, inverses))
    return found


def send(case, wave):
    """Store both halves of -A transposed."""
    negated = wave["negated"]
    heads = negated.shape[1]
    kept = case["scratch_buffers"][wave["number"] % IN_TURN][0]
    for half in range(2):
        part = slice(half * HALF, half * HALF + HALF)
        target = kept[half, :, 0:heads, :]
        transfer(target, negated[part, :, part], COMPILER)


def bring(case, wave):
    """Blocks of -A transposed, [half and block and head, row, column]."""
    negated = wave["negated"]
    heads = negated.shape[1]
    kept = case["scratch_buffers"][wave["number"] % IN_TURN][0]
    shape = (2 * IN_HALF * heads, BLOCK, BLOCK)
    wave["blocks"] = nl.ndarray(shape, dtype=negated.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=wave["blocks"], src=kept.ap(pattern=diagonal(kept.shape[2], heads)))


def diagonal(most, heads):
    """The blocks of squares [half, row, head of `most`, column] as [half, block, head, row, column]."""
    row = most * HALF
    return [[HALF * row, 2], [BLOCK * (row + 1), IN_HALF], [HALF, heads], [row, BLOCK], [1, BLOCK]]


def begin(case, wave):
    """Blocks of two: their inverses are 1 less what is beside the diagonal."""
    blocks = wave["blocks"]
    rows = blocks.shape[0]
    wave["y"] = nl.ndarray(blocks.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wave["y"], src=case["constants"]["block"][0:rows, :, :])
    beside = [[BLOCK * BLOCK, rows], [2 * (BLOCK + 1), BLOCK // 2]]
    nisa.tensor_copy(dst=wave["y"].ap(pattern=beside, offset=1), src=blocks.ap(pattern=beside, offset=1))


def multiply(case, part):
    """The terms of a product of a level: [row of block, pair, row, column, term] float32."""
    wave, size, second = part
    rows, pairs = wave["y"].shape[0], BLOCK // (2 * size)
    step = 2 * size * (BLOCK + 1)
    pitch = BLOCK * BLOCK
    left = [[pitch, rows], [step, pairs], [BLOCK, size], [0, size], [1, size]]
    if second:
        first = wave["y"].ap(pattern=left)
        whole = pairs * size * size
        right = wave["inner"].ap(
            pattern=[[whole, rows], [size * size, pairs], [0, size], [1, size], [size, size]]
        )
    else:
        first = wave["blocks"].ap(pattern=left, offset=size)
        right = wave["y"].ap(
            pattern=[[pitch, rows], [step, pairs], [0, size], [1, size], [BLOCK, size]],
            offset=size * (BLOCK + 1),
        )
    wave["terms"] = nl.ndarray((rows, pairs, size, size, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=wave["terms"], data1=first, data2=right, op=nl.multiply, engine=nisa.engine.gpsimd)


def add_up(case, part):
    """A product of a level; the second one is what the inverses of twice the size have beside the diagonal."""
    wave, size, second = part
    rows, pairs = wave["y"].shape[0], BLOCK // (2 * size)
    if second:
        pattern = [[BLOCK * BLOCK, rows], [2 * size * (BLOCK + 1), pairs], [BLOCK, size], [1, size]]
        target = wave["y"].ap(pattern=pattern, offset=size)
    else:
        wave["inner"] = nl.ndarray((rows, pairs, size, size), dtype=nl.float32, buffer=nl.sbuf)
        target = wave["inner"]
    nisa.tensor_reduce(dst=target, op=nl.add, data=wave["terms"], axis=4)


def send_back(case, wave):
    """Store the inverses, transposed (y) and not (x)."""
    y = wave["y"]
    rows, dtype = y.shape[0], wave["blocks"].dtype
    heads = wave["negated"].shape[1]
    both = nl.ndarray((rows, 2, BLOCK, BLOCK), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=both[:, 0, :, :], src=y)
    across = y.ap(pattern=[[BLOCK * BLOCK, rows], [1, BLOCK], [BLOCK, BLOCK]])
    nisa.activation(dst=both[:, 1, :, :], op=nl.copy, data=across)
    kept = case["scratch_buffers"][wave["number"] % IN_TURN][1]
    most = kept.shape[3]
    pattern = diagonal(most, heads)
    pattern.insert(3, [2 * SQUARE * most, 2])
    transfer(kept.ap(pattern=pattern), both, COMPILER)


def bring_back(case, wave):
    """Both inverses, y and x, as squares of both halves with zeros: [row, head, column]."""
    heads, dtype = wave["negated"].shape[1], wave["negated"].dtype
    kept = case["scratch_buffers"][wave["number"] % IN_TURN][1]
    squares = []
    for side in range(2):
        tile = nl.ndarray((PARTITIONS, heads, HALF), dtype=dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=kept[side, :, :, 0:heads, :])
        squares.append(tile)
    wave["squares"] = squares
