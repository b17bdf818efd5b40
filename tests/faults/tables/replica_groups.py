"""Replica groups that are malformed, or leave out or invent a rank."""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import TWO_RANKS, copied_out, inner, ramp, sum_of_two
from tests.faults.table import fault


@fault("NKW-GROUP-MEMBER", ranks=TWO_RANKS, answer=sum_of_two)
def counted_from_one(x, rank, sick):
    """Ranks are counted from one."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([list(range(1, 3)) if sick else list(range(2))])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-GROUP-FORM", ranks=TWO_RANKS, answer=sum_of_two)
def empty_list(x, rank, sick):
    """A list without ranks."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1], []] if sick else [[0, 1]])  # blamed
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)
    return copied_out(total)


@fault("NKW-GROUP-FORM", ranks=TWO_RANKS, answer=sum_of_two)
def flat_list(x, rank, sick):
    """A group is a list of lists."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([0, 1] if sick else [[0, 1]])  # blamed
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)
    return copied_out(total)


@fault("NKW-GROUP-MEMBER", ranks=TWO_RANKS, answer=lambda rank_inputs: [rank_inputs[0][0], rank_inputs[1][0]])
def not_a_member(x, rank, sick):
    """Rank 1 calls a collective whose group leaves it out."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0]] if sick else [[0], [1]])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-GROUP-FORM", ranks=TWO_RANKS, answer=sum_of_two)
def number_of_ranks(x, rank, sick):
    """A replica group is made from a number of ranks."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup(2 if sick else [list(range(2))])  # blamed
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)
    return copied_out(total)


@fault("NKW-GROUP-FORM", ranks=TWO_RANKS, answer=sum_of_two)
def overlap(x, rank, sick):
    """Rank 0 is in two lists."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1], [0]] if sick else [[0, 1]])  # blamed
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)
    return copied_out(total)


@fault(
    "NKW-PERMUTE-PAIRS", ranks=TWO_RANKS, answer=lambda rank_inputs: [rank_inputs[1][0], rank_inputs[0][0]]
)
def permuted_twice(x, rank, sick):
    """Two ranks send to the same target."""
    source = inner(x)
    moved = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="moved")
    nisa.dma_copy(dst=moved, src=x)
    pairs = [(0, 1), (1, 1)] if sick else [(0, 1), (1, 0)]
    ncc.collective_permute(srcs=[source], dsts=[moved], source_target_pairs=pairs)  # blamed
    return copied_out(moved)


@fault("NKW-GROUP-TYPE", ranks=TWO_RANKS, answer=sum_of_two)
def plain_list(x, rank, sick):
    """replica_group is a list instead of a ReplicaGroup."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = [[0, 1]] if sick else ncc.ReplicaGroup([[0, 1]])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-DEADLOCK", ranks=TWO_RANKS, answer=sum_of_two)
def rank_beyond_the_world(x, rank, sick):
    """The group waits for a rank that does not exist."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    group = ncc.ReplicaGroup([[0, 1, 2]] if sick else [[0, 1]])
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


def _answer_of_rows_and_columns(rank_inputs):
    low, high = rank_inputs[0][0] + rank_inputs[1][0], rank_inputs[2][0] + rank_inputs[3][0]
    return [low, low, high, high]


@fault(
    "NKW-DEADLOCK", ranks=[(ramp(4, 4) + rank, rank) for rank in range(4)], answer=_answer_of_rows_and_columns
)
def rows_and_columns(x, rank, sick):
    """Two of four ranks take the columns of the rank grid for its rows."""
    source = inner(x)
    total = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.private_hbm, name="total")
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    group = ncc.ReplicaGroup(columns if sick and rank in (1, 2) else rows)
    ncc.all_reduce(srcs=[source], dsts=[total], replica_group=group, op=nl.add)  # blamed
    return copied_out(total)


def _answer_of_uneven_lists(rank_inputs):
    (a, _), (b, _), (c, _) = rank_inputs
    return [np.concatenate([a, b]), np.concatenate([a, b]), np.concatenate([c, c])]


@fault(
    "NKW-COLLECTIVE-SHAPE",
    ranks=[(ramp(4, 4) + rank, rank) for rank in range(3)],
    answer=_answer_of_uneven_lists,
)
def uneven_lists(x, rank, sick):
    """Three ranks in lists of two and one: the gather of the rank alone does not fill its destination."""
    source = inner(x)
    both = nl.ndarray((8, 4), dtype=x.dtype, buffer=nl.private_hbm, name="both")
    nisa.dma_copy(dst=both[0:4], src=source)
    nisa.dma_copy(dst=both[4:8], src=source)
    group = ncc.ReplicaGroup([[0, 1], [2]])
    if sick or rank < 2:
        ncc.all_gather(srcs=[source], dsts=[both], replica_group=group, collective_dim=0)  # blamed
    return copied_out(both)
