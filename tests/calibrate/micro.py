"""A kernel whose time is made of as many of each kind of instruction as it is asked for."""

import nki.isa as nisa
import nki.language as nl


def micro(a, trips, width, vectors, scalars, matmuls, iotas):
    """Take a tile [128, free] to HBM and back, then run chains of instructions on its first `width` columns."""
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    u = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=a)
    for _ in range(trips):
        nisa.dma_copy(dst=out, src=t)
        nisa.dma_copy(dst=t, src=out)
    nisa.tensor_copy(dst=u, src=t)
    for _ in range(vectors):
        nisa.tensor_tensor(dst=u[:, :width], data1=u[:, :width], data2=t[:, :width], op=nl.add)
    for _ in range(scalars):
        nisa.activation(dst=u[:, :width], data=u[:, :width], op=nl.exp)
    if matmuls:
        p = nl.ndarray((128, a.shape[1]), dtype=nl.float32, buffer=nl.psum)
        for _ in range(matmuls):
            nisa.nc_matmul(dst=p, stationary=t[:, :128], moving=u)
        nisa.tensor_copy(dst=u, src=p)
    for _ in range(iotas):
        nisa.iota(dst=u[:, :width], pattern=[[1, width]], offset=0, channel_multiplier=1)
    nisa.dma_copy(dst=out, src=u)
    return out
