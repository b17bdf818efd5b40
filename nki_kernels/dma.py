"""DMA queues of the kernels: which descriptors a transfer uses, and which engine triggers it.

A queue is a pair (dge_mode, engine) of `nisa.dma_copy`. The reference allows `engine` with `dge_mode=hwdge` alone, and
only the Sync and the Scalar engine. Hardware descriptors exist from gen3 on, for equal dtypes and without row numbers
in a tile. `transfer` therefore lets the compiler choose wherever a queue does not apply:

    queue      transfers                                                gen2     gen3, gen4            dtypes differ
    STATIC     loads that wait for no result: weights, caches, rows     none     none                  unknown
    SCALAR     few long pieces: loads that pass the bulk loads, and     unknown  hwdge, Scalar engine  unknown
               results that are stored while GpSimd is busy
    SYNC       run-time addresses (scalar_offset) among bulk loads      unknown  hwdge, Sync engine    unknown
    COMPILER   other stores, copies within SBUF, run-time row numbers   unknown  unknown               unknown

STATIC descriptors are written before the launch, so that their addresses must be known then. They are requested by
name: the default mode depends on the release of the compiler. Hardware descriptors hold their engine for some 560 ns,
and longer where a transfer has more than 535 pieces. Stores avoid the queue of bulk loads, because a queue is served
in order.
"""

from __future__ import annotations

import nki.isa as nisa

STATIC = (nisa.dge_mode.none, nisa.engine.unknown)
"""Descriptors in HBM that the runtime writes before the launch."""

SCALAR = (nisa.dge_mode.hwdge, nisa.engine.scalar)
"""Hardware descriptors that the Scalar engine triggers."""

SYNC = (nisa.dge_mode.hwdge, nisa.engine.sync)
"""Hardware descriptors that the Sync engine triggers."""

COMPILER = (nisa.dge_mode.unknown, nisa.engine.unknown)
"""Descriptors and trigger of the compiler's choice."""


def transfer(dst, src, queue, oob_mode=nisa.oob_mode.error):
    """Copy `src` to `dst` by DMA on a queue of this module: (dge_mode, engine), such as STATIC.

    Where chip or dtypes do not allow the queue the compiler chooses one, see `queue_for`. `oob_mode` is that
    of `nisa.dma_copy`.
    """
    mode, engine = queue_for(dst, src, queue)
    nisa.dma_copy(dst=dst, src=src, oob_mode=oob_mode, dge_mode=mode, engine=engine)


def queue_for(dst, src, queue):
    """Return `queue`, a pair (dge_mode, engine), or COMPILER where the queue does not apply.

    It does not apply if the dtypes of dst and src differ, or if it takes hardware descriptors, which gen2
    lacks.
    """
    if dst.dtype != src.dtype:
        return COMPILER
    if queue[0] == nisa.dge_mode.hwdge and nisa.get_nc_version() == nisa.nc_version.gen2:
        return COMPILER
    return queue
