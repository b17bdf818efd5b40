"""More memory than the chip has, or than is left. Tiles on 65 partitions and more leave no half of it to others."""

from __future__ import annotations

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-ADDRESS", ramp(4, 16), answer=lambda x: x, target="trn1")
def address_at_the_end(x, sick):
    """A tile at an explicit address ends beyond the usable bytes."""
    start = 180224 - (60 if sick else 64)
    tile = nl.ndarray((4, 16), dtype=nl.float32, address=(0, start))  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


@fault("NKW-MEM-PLACEMENT", ramp(65, 30000), answer=lambda x: 2 * x[:, 0:4], target="trn1")
def gaps_between_addresses(x, sick):
    """An address in the middle of SBUF leaves no gap for the tile that the compiler has to place."""
    fixed = nl.ndarray((65, 4), dtype=nl.float32, name="fixed", address=(0, 90112 if sick else 0))
    large = nl.ndarray((65, 30000), dtype=nl.float32, name="large")  # blamed
    nisa.dma_copy(dst=fixed, src=x[:, 0:4])
    nisa.dma_copy(dst=large, src=x)
    nisa.tensor_tensor(dst=fixed, data1=fixed, data2=large[:, 0:4], op=nl.add)
    return copied_out(fixed)


@fault("NKW-CAPACITY", ramp(65, 8192), ramp(7, 65, 8192), answer=lambda x, weights: x + weights.sum(0))
def layers_kept_beside_a_load(x, weights, sick):
    """Weights of all layers are kept; the line that made most of the live tiles is blamed."""
    rows, columns = x.shape
    total = nl.load(x)
    kept = []
    for layer in range(weights.shape[0]):
        tile = nl.ndarray((rows, columns), dtype=x.dtype)  # blamed
        nisa.dma_copy(dst=tile, src=weights[layer])
        kept.append(tile)
        if not sick:
            nisa.tensor_tensor(dst=total, data1=total, data2=kept.pop(), op=nl.add)
    for tile in kept:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


@fault("NKW-TILE-SIZE", ramp(5, 4), ramp(5, 8), answer=lambda a, b: a.T @ b)
def psum_tile(a, b, sick):
    """A PSUM tile of more than 16 KiB per partition."""
    left, right = nl.load(a), nl.load(b)
    columns = 4097 if sick else 4096
    sums = nl.ndarray((4, columns), dtype=nl.float32, buffer=nl.psum)  # blamed
    nisa.nc_matmul(dst=sums[:, 0:8], stationary=left, moving=right)
    return copied_out(sums[:, 0:8])


@fault("NKW-CAPACITY", ramp(5, 65), ramp(5, 512), answer=lambda a, b: a.T @ b)
def psum_tiles(a, b, sick):
    """Nine accumulators of a bank each are open at the same time."""
    left, right = nl.load(a), nl.load(b)
    result = nl.ndarray((65, 512), dtype=nl.float32)
    open_sums = []
    for _ in range(9 if sick else 8):
        sums = nl.ndarray((65, 512), dtype=nl.float32, buffer=nl.psum)  # blamed
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)
        open_sums.append(sums)
    nisa.tensor_copy(dst=result, src=open_sums[0])
    for sums in open_sums[1:]:
        nisa.tensor_tensor(dst=result, data1=result, data2=sums, op=nl.maximum)
    return copied_out(result)


@fault("NKW-TILE-SIZE", ramp(1, 46000), answer=lambda x: x[:, 0:45000], target="trn1")
def tile_larger_than_sbuf(x, sick):
    """One tile that is larger than a partition of SBUF."""
    columns = 46000 if sick else 45000
    tile = nl.ndarray((1, columns), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[:, 0:columns])
    return copied_out(tile)


@fault("NKW-CAPACITY", ramp(4, 65, 15000), answer=lambda x: x[:, :, 0:4].sum(axis=0), target="trn1")
def too_many_live_tiles(x, sick):
    """Four loaded tiles stay alive until the end, where three would fit."""
    total = nl.zeros((65, 4), dtype=nl.float32)
    tiles = []
    for i in range(4):
        tile = nl.ndarray((65, 15000), dtype=nl.float32)  # blamed
        nisa.dma_copy(dst=tile, src=x[i])
        if sick:
            tiles.append(tile)
        else:
            nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:4], op=nl.add)
    for tile in tiles:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:4], op=nl.add)
    return copied_out(total)


@fault("NKW-TILE-SIZE", ramp(1, 60000), answer=lambda x: x[:, 0:30000], target="trn1")
def two_chips(x, sick):
    """A tile that fits on trn3 and not on trn1."""
    columns = 60000 if sick else 30000
    tile = nl.ndarray((1, columns), dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x[:, 0:columns])
    return copied_out(tile)


@fault("NKW-CAPACITY", ramp(3, 65, 30000), answer=lambda x: x[:, :, 0:4].sum(axis=0))
def two_large_buffers(x, sick):
    """Double buffering of a tile that takes more than half of SBUF."""
    total = nl.zeros((65, 4), dtype=nl.float32)
    buffers = [nl.ndarray((65, 30000), dtype=nl.float32) for _ in range(2 if sick else 1)]  # blamed
    for i in range(3):
        tile = buffers[i % len(buffers)]
        nisa.dma_copy(dst=tile, src=x[i])
        nisa.tensor_tensor(dst=total, data1=total, data2=tile[:, 0:4], op=nl.add)
    return copied_out(total)


@fault("NKW-TILE-SIZE", ramp(65536), answer=lambda x: (x + 1).reshape(128, 512))
def vector_on_one_partition(x, sick):
    """A long vector is loaded into a single partition, which holds a 128th of SBUF."""
    shape = (1, 65536) if sick else (128, 512)
    tile = nl.ndarray(shape, dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    return copied_out(tile)


@fault(
    "NKW-CAPACITY",
    ramp(65, 3, 10000, dtype=ml_dtypes.bfloat16),
    answer=lambda x: x.astype(np.float32).sum(axis=1).astype(ml_dtypes.bfloat16),
    target="trn1",
)
def widened_weights(x, sick):
    """bfloat16 weights fit; their float32 copies, kept for the whole kernel, do not."""
    weights = nl.load(x)
    wide = nl.ndarray((65, 3, 10000), dtype=nl.float32 if sick else nl.bfloat16)  # blamed
    for layer in range(3):
        nisa.tensor_copy(dst=wide[:, layer], src=weights[:, layer])
    total = nl.ndarray((65, 10000), dtype=nl.bfloat16)
    nisa.tensor_tensor(dst=total, data1=wide[:, 0], data2=wide[:, 2], op=nl.add)
    nisa.tensor_tensor(dst=total, data1=total, data2=weights[:, 1], op=nl.add)
    return copied_out(total)
