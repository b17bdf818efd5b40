"""Planners of the collectives and core_barrier: who meets, what must agree, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nkw.errors import Deadlock, NkwError, RendezvousMismatch, RuleViolation
from simulate.hardware import hardware
from simulate.isa import COLLECTIVES, Engine, Plan
from simulate.isa.book import plan as plan_call
from simulate.memory import NkiTensor
from simulate.nki import collectives as ncc
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run.stream import WRITE
from simulate.world import launch
from tests.isa.reference import STORAGE, assert_same, assert_same_bits
from tests.isa.tiles import HBM, PSUM, SHARED_HBM, TARGETS, plan, refuses, tile

GROUP = ncc.ReplicaGroup([[0, 2], [1, 3]])
SHAPES: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "all_reduce": lambda rows, ranks: (rows, rows),
    "all_gather": lambda rows, ranks: (rows, rows * ranks),
    "reduce_scatter": lambda rows, ranks: (rows * ranks, rows),
}


def _call(name: str, dtype: str = "float32", buffer: Any = HBM, **changes: Any) -> dict[str, Any]:
    before, after = SHAPES[name](4, 2)
    call: dict[str, Any] = {
        "srcs": [tile((before, 6), dtype, buffer)],
        "dsts": [tile((after, 6), dtype, buffer)],
        "replica_group": GROUP,
    }
    if name != "all_gather":
        call["op"] = nl.add
    if name != "all_reduce":
        call["collective_dim"] = 0
    return {**call, **changes}


def _plan(name: str, rank: int = 0, **arguments: Any) -> Plan:
    return plan_call(COLLECTIVES[name], (hardware("trn2"), rank), (), arguments)


def _refuses(code: str, name: str, rank: int = 0, **arguments: Any) -> NkwError:
    with pytest.raises(NkwError) as caught:
        _plan(name, rank, **arguments)
    assert caught.value.code == code, str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", SHAPES)
def test_the_members_are_the_list_that_holds_the_rank(name: str) -> None:
    for rank, members in ((0, (0, 2)), (2, (0, 2)), (1, (1, 3)), (3, (1, 3))):
        made = _plan(name, rank, **_call(name))
        assert made.engine is Engine.dma and made.rendezvous is not None
        assert made.rendezvous.by_rank and made.rendezvous.members == members
        assert made.cost.rendezvous_ns > 0
    _refuses("NKW-GROUP-MEMBER", name, 4, **_call(name))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"srcs": tile((4, 6), buffer=HBM)}, "NKW-COLLECTIVE-LISTS"),
        ({"srcs": []}, "NKW-COLLECTIVE-LISTS"),
        ({"dsts": []}, "NKW-COLLECTIVE-LISTS"),
        ({"srcs": [tile((4, 6), buffer=HBM)] * 2}, "NKW-COLLECTIVE-LISTS"),
        ({"srcs": [np.zeros((4, 6))]}, "NKW-OPERAND"),
        ({"srcs": [tile((4, 6), buffer=PSUM)]}, "NKW-BUFFER"),
        ({"srcs": [tile((4, 6))]}, "NKW-COLLECTIVE-MEMORY"),
        ({"srcs": [tile((4, 6), "float8_e5m2_x4", HBM)]}, "NKW-PACKED-DTYPE"),
        ({"srcs": [tile((4, 7), buffer=HBM)]}, "NKW-COLLECTIVE-SHAPE"),
        ({"dsts": [tile((3, 6), buffer=HBM)]}, "NKW-COLLECTIVE-SHAPE"),
        ({"replica_group": [[0, 2]]}, "NKW-GROUP-TYPE"),
        ({"replica_group": None}, "NKW-GROUP-TYPE"),
    ],
)
def test_refusals_of_collectives(name: str, changes: dict[str, Any], code: str) -> None:
    _refuses(code, name, **_call(name, **changes))
    _plan(name, **_call(name))


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_operators_of_collectives(name: str) -> None:
    for op in (nl.add, nl.minimum, nl.maximum, nl.max, nl.min):
        _plan(name, **_call(name, op=op))
    for op in (nl.multiply, nl.subtract, nl.bitwise_or, nl.abs):
        _refuses("NKW-COLLECTIVE-OPERATOR", name, **_call(name, op=op))


def test_dims_of_collectives() -> None:
    _refuses("NKW-COLLECTIVE-GATHER-DIM", "all_gather", **_call("all_gather", collective_dim=1))
    _refuses("NKW-COLLECTIVE-SCATTER-DIM", "reduce_scatter", **_call("reduce_scatter", collective_dim=1))
    in_sbuf = {"srcs": [tile((4, 6))], "dsts": [tile((4, 12))]}
    _plan("all_gather", **_call("all_gather", collective_dim=1, **in_sbuf))
    _refuses("NKW-COLLECTIVE-GATHER-DIM", "all_gather", **_call("all_gather", collective_dim=2, **in_sbuf))
    odd = {"srcs": [tile((5, 6), buffer=HBM)], "dsts": [tile((2, 6), buffer=HBM)]}
    error = _refuses("NKW-COLLECTIVE-SHAPE", "reduce_scatter", **_call("reduce_scatter", **odd))
    assert "does not divide into 2 chunks" in str(error)


def test_sbuf_operands_are_one_pair_of_two_dims() -> None:
    _plan("all_reduce", **_call("all_reduce", srcs=[tile((4, 6))], dsts=[tile((4, 6))]))
    for tensors in ([tile((4, 6))] * 2, [tile((4, 2, 3))]):
        call = _call("all_reduce", srcs=tensors, dsts=tensors)
        _refuses("NKW-COLLECTIVE-MEMORY", "all_reduce", **call)
    pair = [tile((4, 6), buffer=HBM), tile((3, 2, 2), buffer=HBM)]
    _plan("all_reduce", **_call("all_reduce", srcs=pair, dsts=pair))


@pytest.mark.parametrize(
    ("groups", "accepted"),
    [
        ([[0, 1, 2, 3]], True),
        ([list(range(64))], True),
        ([[3, 1], [0, 2]], True),
        ([[0]], True),
        ([], False),
        ([[]], False),
        ([[0], []], False),
        ([[0, 1], [1, 2]], False),
        ([[0, 0]], False),
        ([[-1, 0]], False),
        (3, False),
        ([0, 1], False),
    ],
)
def test_the_form_of_a_replica_group(groups: Any, accepted: bool) -> None:
    if accepted:
        assert ncc.ReplicaGroup(groups).groups == tuple(map(tuple, groups))
    else:
        with pytest.raises(RuleViolation, match="NKW-GROUP-FORM"):
            ncc.ReplicaGroup(groups)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_what_every_rank_gets(dtype: str, order: list[int]) -> None:
    shares = [np.random.default_rng(rank).integers(0, 50, (6, 4)).astype(STORAGE[dtype]) for rank in range(3)]

    def kernel(share):
        group = ncc.ReplicaGroup([order])
        source = nl.ndarray(share.shape, share.dtype, nl.hbm)
        nisa.dma_copy(dst=source, src=share)
        outs = [nl.ndarray(shape, share.dtype, nl.shared_hbm) for shape in ((6, 4), (6, 4), (18, 4), (2, 4))]
        ncc.all_reduce([source], [outs[0]], group, nl.add)
        ncc.all_reduce([source], [outs[1]], group, nl.maximum)
        ncc.all_gather([source], [outs[2]], group, 0)
        ncc.reduce_scatter([source], [outs[3]], group, 0, nl.add)
        return tuple(outs)

    outputs = launch(kernel, [((share,), {}) for share in shares], hardware("trn2")).outputs
    wide = [share.astype(np.int64) for share in shares]
    for rank, (total, largest, gathered, chunk) in enumerate(outputs):
        assert_same(total, (sum(wide)).astype(STORAGE[dtype]))
        assert_same(largest, np.max(wide, axis=0))
        assert_same_bits(gathered, np.concatenate([shares[other] for other in order]))
        first = 2 * order.index(rank)
        assert_same(chunk, total[first : first + 2])


def test_members_that_disagree_are_named() -> None:
    def kernel(share, op):
        out = nl.ndarray(share.shape, share.dtype, nl.shared_hbm)
        ncc.all_reduce([share], [out], ncc.ReplicaGroup([[0, 1]]), op)
        return out

    share = np.ones((2, 2), np.float32)
    with pytest.raises(RendezvousMismatch, match=r"op: member 0 says add .*\n.*op: member 1 says maximum"):
        launch(kernel, [((share, nl.add), {}), ((share, nl.maximum), {})], hardware("trn2"))


def _barrier(**changes: Any) -> dict[str, Any]:
    return {"data": tile((4, 4), buffer=SHARED_HBM), "cores": (0, 1), **changes}


@pytest.mark.parametrize("target", TARGETS)
def test_a_core_barrier_needs_two_cores(target: str) -> None:
    if target == "trn1":
        refuses("NKW-BARRIER-CHIP", target, "core_barrier", **_barrier())
        return
    for engine in (Engine.gpsimd, Engine.tensor, Engine.vector, Engine.scalar, Engine.sync):
        made = plan(target, "core_barrier", **_barrier(engine=engine, cores=[0, 1]))
        assert made.engine is engine and made.rendezvous is not None
        assert made.rendezvous.members == (0, 1) and not made.rendezvous.by_rank
    assert plan(target, "core_barrier", **_barrier()).engine is Engine.gpsimd
    rendezvous = [
        plan(target, "core_barrier", **_barrier(data=tile((1, 1), "int32"))).rendezvous for _ in range(2)
    ]
    assert rendezvous[0].terms == rendezvous[1].terms  # each core means its own tile
    for changes, code in (
        ({"cores": (0,)}, "NKW-BARRIER-CORES"),
        ({"cores": (1, 0)}, "NKW-BARRIER-CORES"),
        ({"cores": (0, 1, 2)}, "NKW-BARRIER-CORES"),
        ({"cores": 2}, "NKW-BARRIER-CORES"),
        ({"engine": Engine.dma}, "NKW-ENGINE"),
        ({"engine": Engine.unknown}, "NKW-ENGINE"),
        ({"data": tile((4, 4), buffer=HBM)}, "NKW-BUFFER"),
        ({"data": tile((4, 4), buffer=PSUM)}, "NKW-BUFFER"),
        ({"data": None}, "NKW-OPERAND"),
    ):
        refuses(code, target, "core_barrier", **_barrier(**changes))


def _swap(data: NkiTensor, barriers: int) -> NkiTensor:
    """Write each core's row, wait, and take the other core's row."""
    out = nl.ndarray(data.shape, data.dtype, nl.shared_hbm)
    result = nl.ndarray(data.shape, data.dtype, nl.shared_hbm)
    me = nl.program_id(0)
    nisa.dma_copy(dst=out[me : me + 1], src=data[me : me + 1])
    for _ in range(barriers - me * (barriers == 2)):
        nisa.core_barrier(out, (0, 1))
    nisa.dma_copy(dst=result[me : me + 1], src=out[1 - me : 2 - me])
    return result


def test_what_a_core_wrote_before_a_barrier_the_other_reads_after_it() -> None:
    data = np.arange(8, dtype=np.float32).reshape(2, 4)
    done = launch(_swap, [((data, 1), {})], hardware("trn2"), logical_core_size=2)
    assert_same_bits(done.outputs[0], data[::-1].copy())
    for stream in done.streams:
        (barrier,) = [event for event in stream if event.op == "core_barrier"]
        assert barrier.rendezvous is not None and barrier.engine is Engine.gpsimd
        # Standing among the writes, the tensor orders both cores' accesses around the barrier.
        assert [(access.tensor, access.mode) for access in barrier.accesses] == [(1, WRITE)]


def test_without_a_barrier_the_row_is_not_there_yet() -> None:
    data = np.arange(8, dtype=np.float32).reshape(2, 4)
    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
        launch(_swap, [((data, 0), {})], hardware("trn2"), logical_core_size=2)


def test_a_barrier_that_only_one_core_reaches_is_a_deadlock() -> None:
    data = np.arange(8, dtype=np.float32).reshape(2, 4)
    with pytest.raises(Deadlock, match="core 0 waits in core_barrier"):
        launch(_swap, [((data, 2), {})], hardware("trn2"), logical_core_size=2)


def test_barriers_over_different_tensors_are_a_mismatch() -> None:
    def kernel(data):
        pair = [nl.ndarray(data.shape, data.dtype, nl.shared_hbm) for _ in range(2)]
        nisa.core_barrier(pair[nl.program_id(0)], (0, 1))
        return pair[0]

    with pytest.raises(RendezvousMismatch, match=r"data: member 0 says .*tensor"):
        launch(kernel, [((np.ones((2, 2), np.float32),), {})], hardware("trn2"), logical_core_size=2)
