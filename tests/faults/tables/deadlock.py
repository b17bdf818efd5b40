"""Cores that wait for one another without end."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import TWO_RANKS, copied_out, inner, ramp, sum_of_two
from tests.faults.table import fault


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: np.concatenate([x[4:], x[:4]]), cores=2)
def barrier_and_sendrecv(x, sick):
    """One core waits in a barrier, the other one in a sendrecv."""
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    mine = nl.load(x[core * 4 : core * 4 + 4])
    other = nl.ndarray((4, 4), dtype=x.dtype)
    if sick and core == 0:
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: x, cores=2)
def barrier_in_a_loop(x, sick):
    """Core 1 makes one iteration less, and a barrier stands in the loop."""
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    blocks = 2 - core if sick else 2
    for block in range(blocks):
        rows = nl.ds(core * 4 + block * 2, 2)
        nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: x, cores=2)
def barrier_on_one_core(x, sick):
    """Only core 0 reaches the barrier."""
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(core * 4, 4)
    nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))
    if core == 0 or not sick:
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: x)
def launched_on_one_core(x, sick):
    """A kernel with a barrier for two cores is launched on one."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=nl.load(x))
    if sick or nl.num_programs(0) == 2:
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: np.concatenate([x[4:], x[:4]]), cores=2)
def one_sends(x, sick):
    """Core 0 sends, and core 1 does not call sendrecv to receive."""
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    mine = nl.load(x[core * 4 : core * 4 + 4])
    other = nl.zeros((4, 4), dtype=x.dtype)
    peer = 1 - core
    if core == 0 or not sick:
        nisa.sendrecv(src=mine, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


@fault(
    "NKW-RENDEZVOUS",
    ranks=TWO_RANKS,
    answer=lambda rank_inputs: (
        [(rank_inputs[0][0] + rank_inputs[1][0], np.maximum(rank_inputs[0][0], rank_inputs[1][0]))] * 2
    ),
)
def orders_differ(x, rank, sick):
    """The ranks call two collectives in opposite orders."""
    source = inner(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    most = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="most")
    group = ncc.ReplicaGroup([[0, 1]])
    calls = [(nl.add, total), (nl.maximum, most)]
    if sick and rank == 1:
        calls.reverse()
    for op, result in calls:
        ncc.all_reduce(srcs=[source], dsts=[result], replica_group=group, op=op)  # blamed
    return copied_out(total), copied_out(most)


@fault("NKW-DEADLOCK", ranks=TWO_RANKS, answer=sum_of_two, cores=2)
def other_core_calls(x, rank, sick):
    """Core 0 of one rank and core 1 of the other call the collective, which joins cores of one number."""
    core = nl.program_id(0)
    out = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    if core == (rank if sick else 0):
        source = inner(x)
        total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
        group = ncc.ReplicaGroup([[0, 1]])
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
        nisa.dma_copy(dst=out, src=total)
    return out


def _answer_of_batches_of_two_lengths(rank_inputs):
    (long, _), (short, _) = rank_inputs
    both = np.stack([long[0:4] + short, long[4:8] + short])
    return [both, both]


@fault("NKW-DEADLOCK", ranks=[(ramp(8, 4), 0), (ramp(4, 4) + 1, 1)], answer=_answer_of_batches_of_two_lengths)
def batches_of_two_lengths(x, rank, sick):
    """Every rank reduces once per block of its own batch, and the batches differ in length."""
    blocks = x.shape[0] // 4 if sick else 2
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1]])
    out = nl.ndarray((2, 4, 4), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    for block in range(blocks):
        first = min(block * 4, x.shape[0] - 4)
        source = inner(x[first : first + 4])
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
        nisa.dma_copy(dst=out[block], src=total)
    return out


@fault("NKW-DEADLOCK", ranks=TWO_RANKS, answer=lambda rank_inputs: [rank_inputs[1][0], rank_inputs[0][0]])
def pair_of_the_sender_only(x, rank, sick):
    """Each rank lists the pair in which it sends, instead of the whole permutation."""
    source = inner(x)
    moved = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="moved")
    nisa.dma_copy(dst=moved, src=x)
    pairs = [(rank, 1 - rank)] if sick else [(0, 1), (1, 0)]
    ncc.collective_permute(srcs=[source], dsts=[moved], source_target_pairs=pairs)  # blamed
    return copied_out(moved)


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: np.concatenate([x[4:], x[:4]]), cores=2)
def pipes_differ(x, sick):
    """The cores exchange on different pipes."""
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    mine = nl.load(x[core * 4 : core * 4 + 4])
    other = nl.ndarray((4, 4), dtype=x.dtype)
    pipe = core if sick else 0
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=pipe)  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


@fault("NKW-DEADLOCK", ranks=TWO_RANKS, answer=sum_of_two)
def rank_skips_the_collective(x, rank, sick):
    """Rank 1 has nothing to add and leaves the all-reduce out."""
    source = inner(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="total")
    nisa.dma_copy(dst=total, src=x)
    group = ncc.ReplicaGroup([[0, 1]])
    if rank == 0 or not sick:
        ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


@fault(
    "NKW-DEADLOCK",
    ranks=[(ramp(3, 4) + rank, rank) for rank in range(3)],
    answer=lambda rank_inputs: [rank_inputs[2][0], rank_inputs[2][0], rank_inputs[2][0]],
)
def ring_of_pairs(x, rank, sick):
    """Three ranks exchange in pairs, and each begins with its successor."""
    source = inner(x)
    out = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.private_hbm, name="sums")
    nisa.dma_copy(dst=out, src=x)
    pairs = [[0, 1], [1, 2], [0, 2]]
    first = [[0, 1], [1, 2], [2, 0]][rank]
    mine = [first, [rank, (rank + 2) % 3]] if sick else [pair for pair in pairs if rank in pair]
    for pair in mine:
        group = ncc.ReplicaGroup([sorted(pair)])
        ncc.all_reduce(srcs=[source], dsts=[out], replica_group=group, op=nl.maximum)  # blamed
    return copied_out(out)


@fault("NKW-DEADLOCK", ramp(8, 4), answer=lambda x: x, cores=2)
def second_barrier_missing(x, sick):
    """Core 1 returns early, before the second of two barriers."""
    core = nl.program_id(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    nisa.core_barrier(data=out, cores=(0, 1))
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=nl.load(x[core * 4 : core * 4 + 4]))
    if sick and core == 1:
        return out
    nisa.core_barrier(data=out, cores=(0, 1))  # blamed
    return out


@fault("NKW-DEADLOCK", ramp(2, 4, 4), np.array([[3, 2]], np.int32), answer=lambda x, lengths: x + 3, cores=2)
def trip_count_from_data(x, lengths, sick):
    """Each core takes the trip count of its device loop from its own lengths, and a barrier stands in the loop."""
    core = nl.program_id(0)
    out = nl.ndarray((2, 4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    count = nisa.register_alloc()
    nisa.register_load(dst=count, src=lengths[0:1, core : core + 1] if sick else lengths[0:1, 0:1])
    total = nl.load(x[core])

    def body(i):
        nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=1.0)
        nisa.core_barrier(data=out, cores=(0, 1))  # blamed

    nl.fori_loop(0, count, body)
    nisa.dma_copy(dst=out[core], src=total)
    return out
