"""Members of a collective, a barrier or an exchange that call it differently or with operands that do not fit."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import TWO_RANKS, copied_out, inner, ramp, sum_of_two
from tests.faults.table import fault


@fault("NKW-RENDEZVOUS", ramp(2, 4), answer=lambda x: x[::-1], cores=2)
def barriers_of_different_tensors(x, sick):
    """The cores wait for each other with different tensors."""
    core = nl.program_id(0)
    scratch = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=scratch[core : core + 1], src=nl.load(x[core : core + 1]))
    named = out if sick and core == 1 else scratch
    nisa.core_barrier(data=named, cores=(0, 1))  # blamed
    nisa.dma_copy(dst=out[core : core + 1], src=nl.load(scratch[1 - core : 2 - core]))
    return out


@fault("NKW-RENDEZVOUS", ranks=TWO_RANKS, answer=sum_of_two)
def dtypes(x, rank, sick):
    """Rank 1 reduces in bfloat16."""
    dtype = nl.bfloat16 if sick and rank == 1 else nl.float32
    source = nl.ndarray((4, 4), dtype=dtype, buffer=nl.private_hbm, name="source")
    nisa.dma_copy(dst=source, src=x)
    total = nl.ndarray((4, 4), dtype=dtype, buffer=nl.private_hbm, name="total")
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-RENDEZVOUS", ramp(2, 4, 4), answer=lambda x: x[::-1], cores=2)
def exchanged_shapes(x, sick):
    """The cores of a sendrecv bring tiles of different sizes."""
    core = nl.program_id(0)
    out = nl.ndarray((2, 4, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = 2 if sick and core == 1 else 4
    mine, other, peer = nl.load(x[core, 0:rows]), nl.ndarray((rows, 4), dtype=x.dtype), 1 - core
    nisa.sendrecv(src=mine, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)  # blamed
    nisa.dma_copy(dst=out[core, 0:rows], src=other)
    return out


@fault(
    "NKW-COLLECTIVE-SHAPE",
    ranks=TWO_RANKS,
    answer=lambda rank_inputs: [np.concatenate([rank_inputs[0][0], rank_inputs[1][0]])] * 2,
)
def gathered_size(x, rank, sick):
    """The destination of a gather has room for one rank."""
    source = inner(x)
    both = nl.ndarray((4 if sick else 8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)  # blamed
    return copied_out(both)


@fault(
    "NKW-DEADLOCK",
    ranks=TWO_RANKS,
    answer=lambda rank_inputs: [np.concatenate([rank_inputs[0][0], rank_inputs[1][0]])] * 2,
)
def groups(x, rank, sick):
    """Rank 1 lists the ranks of the group in the opposite order."""
    source = inner(x)
    both = nl.ndarray((8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    members = [1, 0] if sick and rank == 1 else [0, 1]
    group = ncc.ReplicaGroup([members])
    ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)  # blamed
    return copied_out(both)


@fault("NKW-COLLECTIVE-LISTS", ranks=TWO_RANKS, answer=sum_of_two)
def lists_of_different_length(x, rank, sick):
    """Two sources and one destination."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1]])
    sources = [source, source] if sick else [source]
    ncc.all_reduce(srcs=sources, dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-COLLECTIVE-MEMORY", ranks=TWO_RANKS, answer=sum_of_two)
def memories_mixed(x, rank, sick):
    """A collective from HBM into SBUF."""
    source = inner(x)
    buffer = nl.sbuf if sick else nl.private_hbm
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=buffer, name="total")
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


def _answer_of_odd_rows(rank_inputs):
    total = (rank_inputs[0][0] + rank_inputs[1][0])[0:4]
    return [total[0:2], total[2:4]]


@fault("NKW-COLLECTIVE-SHAPE", ranks=[(ramp(5, 4), 0), (ramp(5, 4) + 1, 1)], answer=_answer_of_odd_rows)
def odd_rows(x, rank, sick):
    """Five rows do not scatter over two ranks."""
    source = inner(x if sick else x[0:4])
    rows = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.private_hbm, name="rows")
    group = ncc.ReplicaGroup([[0, 1]])
    ncc.reduce_scatter(srcs=[source], dsts=[rows], replica_group=group, collective_dim=0, op=nl.add)  # blamed
    return copied_out(rows)


@fault("NKW-RENDEZVOUS", ranks=TWO_RANKS, answer=sum_of_two)
def operations(x, rank, sick):
    """One rank gathers while the other one reduces."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    both = nl.ndarray((8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    group = ncc.ReplicaGroup([[0, 1]])
    if sick and rank == 1:
        ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)
        return copied_out(both)
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-COLLECTIVE-OPERATOR", ranks=TWO_RANKS, answer=sum_of_two)
def operator(x, rank, sick):
    """A product over ranks does not exist."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1]])
    op = nl.multiply if sick else nl.add
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=op)  # blamed
    return copied_out(total)


@fault("NKW-RENDEZVOUS", ranks=TWO_RANKS, answer=sum_of_two)
def operators(x, rank, sick):
    """One rank adds, the other one takes the maximum."""
    source = inner(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    op = nl.maximum if sick and rank == 1 else nl.add
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=op)  # blamed
    return copied_out(total)


@fault("NKW-RENDEZVOUS", ranks=TWO_RANKS, answer=sum_of_two)
def shapes(x, rank, sick):
    """The ranks bring different shapes."""
    rows = 3 if sick and rank == 1 else 4
    source = inner(x[0:rows])
    total = nl.ndarray((rows, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=ncc.ReplicaGroup([[0, 1]]), op=nl.add)  # blamed
    return copied_out(total)
