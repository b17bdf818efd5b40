"""A kernel whose memory is known by hand: 128 partitions, tiles in a nest of two loops, one at an address."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

WIDTH = 64


def loaded(source):
    """Load a tile of HBM; allocated here, named by the caller."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


@nki.jit
def nest(x, outer=3, large=1000):
    """Take per outer step 256 bytes of x, 4 * large bytes of scratch, one PSUM bank; 512 bytes at 8192 all along."""
    out = nl.ndarray((128, WIDTH * outer), dtype=nl.float32, buffer=nl.shared_hbm)
    kept = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf, address=(0, 8192), name="kept")
    nisa.memset(dst=kept, value=0.0)
    for i in nl.affine_range(outer):
        piece = loaded(x[:, i * WIDTH : (i + 1) * WIDTH])
        scratch = nl.ndarray((128, large), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=scratch, value=0.0)
        sums = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.psum)
        for j in nl.static_range(2):
            nisa.nc_matmul(dst=sums, stationary=piece, moving=scratch[:, 0:512], accumulate=j > 0)
        nisa.tensor_tensor(dst=piece, data1=piece, data2=kept[:, 0:WIDTH], op=nl.add)
        nisa.tensor_copy(dst=scratch[0:64, 0:512], src=sums)
        nisa.dma_copy(dst=out[:, i * WIDTH : (i + 1) * WIDTH], src=piece)
    return out


@nki.jit
def on_device(x):
    """Run a loop that the device counts."""
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = loaded(x[:, 0:128])

    def body(i):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)

    nl.fori_loop(0, 3, body)
    nisa.dma_copy(dst=out, src=tile)
    return out
