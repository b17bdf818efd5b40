"""Collectives over the ranks of a group. A rank's input is copied to an internal HBM buffer, as collectives require."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl


def all_reduce(x, group):
    """Sum the ranks' x into an internal HBM buffer of x's shape and return x, so that only the collective is timed."""
    shard = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="part")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=shard, src=x)
    ncc.all_reduce(srcs=[shard], dsts=[total], replica_group=group, op=nl.add)
    return x


def all_gather(x, group, ranks):
    """Concatenate the ranks' x along dimension 0 in an internal HBM buffer; return x, so only this is timed."""
    shard = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="part")
    gathered = nl.ndarray(
        (ranks * x.shape[0], x.shape[1]), dtype=x.dtype, buffer=nl.private_hbm, name="whole"
    )
    nisa.dma_copy(dst=shard, src=x)
    ncc.all_gather(srcs=[shard], dsts=[gathered], replica_group=group, collective_dim=0)
    return x


def all_gather_with_copies(x, group, ranks):
    """Return the x of all ranks, concatenated along dimension 0, as an output of the kernel.

    The result is copied from an internal buffer, because collectives cannot touch a kernel's arguments.
    """
    shard = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="part")
    shape = (ranks * x.shape[0], x.shape[1])
    gathered = nl.ndarray(shape, dtype=x.dtype, buffer=nl.private_hbm, name="whole")
    nisa.dma_copy(dst=shard, src=x)
    ncc.all_gather(srcs=[shard], dsts=[gathered], replica_group=group, collective_dim=0)
    out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=gathered)
    return out
