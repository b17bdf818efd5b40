"""Kernels with rendezvous, for worlds in one process and in several."""

from __future__ import annotations

import simulate

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def reduced(x, group):
    """Run all_reduce of one tensor."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total_of(x, group))
    return out


def left_out(x, group, leaves_out):
    """Skip the collective on one rank."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x if leaves_out else total_of(x, group))
    return out


def crossed(x, rank):
    """Wait on each of three ranks for the next one first, which waits for its own next."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for other in ((rank + 1) % 3, (rank + 2) % 3):
        pair = [[min(rank, other), max(rank, other)], [3 - rank - other]]
        nisa.dma_copy(dst=out, src=total_of(x, ncc.ReplicaGroup(pair)))
    return out


def gathered(x, group, members):
    """Run all_gather over a group of `members` ranks."""
    rows, columns = x.shape
    local = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    everyones = nl.ndarray((members * rows, columns), dtype=x.dtype, buffer=nl.private_hbm)
    out = nl.ndarray((members * rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=local, src=x)
    ncc.all_gather(srcs=[local], dsts=[everyones], replica_group=group, collective_dim=0)
    nisa.dma_copy(dst=out, src=everyones)
    return out


def summed_by_both_cores(x, group):
    """Reduce on both cores of every rank, core 1 twice what core 0 does; then they wait for each other."""
    out = nl.ndarray((2, *x.shape), dtype=x.dtype, buffer=nl.shared_hbm)
    total = total_of(x, group)
    if nl.program_id(0) == 1:
        total = total_of(total, group)
    nisa.dma_copy(dst=out[nl.program_id(0)], src=total)
    nisa.core_barrier(out, cores=(0, 1))
    return out


def total_of(x, group):
    """Return the sum of every member's x, in private HBM."""
    inside = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=inside, src=x)
    ncc.all_reduce(srcs=[inside], dsts=[total], replica_group=group, op=nl.add)
    return total
