"""Legal orders of a launch: correct kernels keep their bytes in all of them, unordered pairs are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nkw.errors import InvalidArgument
from simulate.check import examine
from simulate.check.precedence import find_predecessors, order_randomly
from simulate.check.reorder import ReorderedLaunch, Snapshot
from simulate.run import Launch
from simulate.run.observers import Observer, observing
from simulate.timing import dependences
from tests.faults.data import ramp
from tests.kernels.accuracy import in_order
from tools.timelines import Case, cases

SIDE, TILES, STEPS = 8, 4, 60


class Recording(Observer):
    """An observer that keeps a launch and the contents of its arguments."""

    def began(self, request: Any, cores: Any, inputs: Any) -> None:
        self.arguments = [[Snapshot.take(storage) for storage in rank] for rank in inputs]

    def ended(self, launch: Launch, returned: Any) -> None:
        self.launch = ReorderedLaunch(launch, self.arguments)


def reorderable(
    kernel: Callable[..., Any], arguments: list[tuple[Any, ...]], cores: int = 1
) -> tuple[ReorderedLaunch, Launch]:
    """Return a launch that can be executed in other orders, and the launch itself."""
    recording = Recording()
    with observing(recording):
        done = simulate.World("trn2", len(arguments), cores).launch(
            kernel, [(argument, {}) for argument in arguments]
        )
    return recording.launch, done


def random_kernel(x: Any, seed: int) -> Any:
    """Issue STEPS random instructions on strided, overlapping parts of a few tiles, some of random numbers and sums."""
    random = np.random.default_rng(seed)
    tiles = [nl.load(x[i * SIDE : (i + 1) * SIDE]) for i in range(TILES)]
    psum = nl.ndarray((SIDE, SIDE), dtype=nl.float32, buffer=nl.psum)
    scratch = nl.ndarray((TILES * SIDE, SIDE), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=scratch, src=x)

    def draw_view(rows: int, columns: int, step: int) -> Any:
        tile = tiles[random.integers(TILES)]
        column = int(random.integers(SIDE - (columns - 1) * step))
        return tile[0:rows, column : column + (columns - 1) * step + 1 : step]

    for _ in range(STEPS):
        rows, columns, step = (int(random.integers(1, n + 1)) for n in (SIDE, SIDE // 2, 2))
        a, b, c = (draw_view(rows, columns, step) for _ in range(3))
        instruction = random.integers(6)
        if instruction == 0:
            nisa.tensor_tensor(dst=a, data1=b, data2=c, op=nl.add)
        elif instruction == 1:
            nisa.tensor_scalar(dst=a, data=b, op0=nl.multiply, operand0=0.5)
        elif instruction == 2:
            nisa.rng(dst=a.view(nl.uint32), engine=nisa.engine.vector)
            nisa.tensor_scalar(dst=a, data=a.view(nl.uint32), op0=nl.multiply, operand0=2.0**-32)
        elif instruction == 3:
            row = int(random.integers(TILES * SIDE - rows + 1))
            nisa.dma_copy(dst=scratch[row : row + rows, 0:columns], src=a)
        elif instruction == 4:
            row = int(random.integers(TILES * SIDE - rows + 1))
            nisa.dma_copy(dst=a, src=scratch[row : row + rows, SIDE - columns : SIDE])
        else:
            nisa.nc_matmul(dst=psum, stationary=tiles[0], moving=tiles[1], accumulate=None)
            nisa.tensor_copy(dst=tiles[2], src=psum)
    out = nl.ndarray((TILES * SIDE, SIDE), dtype=nl.float32, buffer=nl.shared_hbm)
    for i, tile in enumerate(tiles):
        nisa.dma_copy(dst=out[i * SIDE : (i + 1) * SIDE], src=tile)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_random_instructions_give_the_same_bytes_in_every_order(seed: int) -> None:
    launch, done = reorderable(random_kernel, [(ramp(TILES * SIDE, SIDE), seed)])
    expected = launch.run(range(len(launch)))
    assert expected == [done.outputs[0].tobytes()]
    orders = [order_randomly(find_predecessors(launch), number) for number in range(6)]
    assert len(set(map(tuple, orders))) == 6
    for order in orders:
        assert launch.run(order) == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_dependences_of_timing_are_enough_for_the_same_bytes(seed: int) -> None:
    launch, _ = reorderable(random_kernel, [(ramp(TILES * SIDE, SIDE), seed)])
    (stream,) = launch.streams
    graph = dependences(stream, every_read=True)
    before = [{producer for producer, _ in graph.list_waits(event)} for event in range(len(stream))]
    expected = launch.run(range(len(launch)))
    for number in range(6):
        assert launch.run(order_randomly(before, number)) == expected


def test_a_missing_dependence_changes_bytes() -> None:
    launch, _ = reorderable(random_kernel, [(ramp(TILES * SIDE, SIDE), 0)])
    before = find_predecessors(launch)
    expected = launch.run(range(len(launch)))
    silent = [
        step for step in range(len(launch)) if before[step] and _without(launch, before, step) == expected
    ]
    assert len(silent) < len(launch) / 2


def _without(launch: ReorderedLaunch, before: list[set[int]], step: int) -> list[bytes]:
    """Return the results of an order in which one step ignores its dependences and comes first."""
    return launch.run([step, *(index for index in range(len(launch)) if index != step)])


def test_the_launch_itself_keeps_its_bytes() -> None:
    x = ramp(4, 4)

    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(x)
        nisa.dma_copy(dst=out, src=tile)
        nisa.memset(tile, value=7)
        nisa.dma_copy(dst=x, src=tile)
        return out, x

    outputs = []
    assert examine(lambda: outputs.append(simulate.launch(kernel, [((x,), {})])), orders=5) == []
    assert np.array_equal(outputs[0].outputs[0][0], ramp(4, 4))
    assert np.array_equal(x, np.full((4, 4), 7.0))


def pair_kernel(x: Any, barrier: bool) -> Any:
    """Write on core 0 what core 1 reads."""
    core = nl.program_id(0)
    between = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="between")
    out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if core == 0:
        nisa.dma_copy(dst=between, src=nl.load(x))
    if barrier:
        nisa.core_barrier(data=between, cores=(0, 1))
    if core == 1:
        nisa.dma_copy(dst=out, src=nl.load(between))
    return out


def test_a_barrier_orders_two_cores_and_without_it_the_pair_is_named() -> None:
    world = simulate.World("trn2", 1, 2)

    def examine_pair(barrier: bool) -> list[Any]:
        every = examine(lambda: world.launch(pair_kernel, [((ramp(4, 4), barrier), {})]), orders=3)
        return [finding for finding in every if finding.code == "NKW-ORDER"]

    assert examine_pair(True) == []
    (finding,) = examine_pair(False)
    assert [(touch.core, touch.verb, touch.tensor) for touch in finding.touches] == [
        (0, "writes", "between"),
        (1, "reads", "between"),
    ]
    assert finding.where == finding.touches[1].where
    assert examine_pair(False) == [finding]


def summed(x: Any, group: Any) -> Any:
    """Return the sum of x over the ranks, summed over the ranks again."""
    first, second, out = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm) for _ in range(3))
    nisa.dma_copy(dst=first, src=x)
    ncc.all_reduce(srcs=[first], dsts=[second], replica_group=group, op=nl.add)
    ncc.all_reduce(srcs=[second], dsts=[out], replica_group=group, op=nl.add)
    result = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=out)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives_keep_their_order(ranks: int) -> None:
    group = ncc.ReplicaGroup([list(range(ranks))])
    launch, done = reorderable(summed, [(ramp(4, 4) + rank, group) for rank in range(ranks)])
    expected = launch.run(range(len(launch)))
    assert expected == [output.tobytes() for output in done.outputs]
    for number in range(4):
        assert launch.run(order_randomly(find_predecessors(launch), number)) == expected


def test_all_reduce_gives_the_same_bytes_in_every_order_of_instructions_and_of_ranks() -> None:
    group = ncc.ReplicaGroup([[0, 1, 2]])
    arguments = [((ramp(5, 129) + rank, group), {}) for rank in range(3)]
    world = simulate.World("trn1", 3)
    assert examine(lambda: world.launch(kernels.all_reduce, arguments), orders=4, seeds=4) == []


def test_counts_below_zero_are_refused_and_zero_accepted() -> None:
    assert examine(lambda: None, orders=0, seeds=0) == []
    for orders, seeds in ((-1, 0), (0, -1)):
        with pytest.raises(InvalidArgument) as refused:
            examine(lambda: None, orders, seeds)
        arguments = f"orders={orders}, seeds={seeds}"
        assert refused.value.message == f"{arguments}: a count is negative; give 0 or more of each"


HIDDEN, INNER, HEADS, KV_HEADS, DEPTH, POSITIONS = 128, 256, 4, 2, 32, 128
Q, KV = HEADS * DEPTH, KV_HEADS * DEPTH


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def shipped(tokens: int) -> dict[str, tuple[Any, ...]]:
    x, norm = normal(1, tokens, HIDDEN), normal(2, 1, HIDDEN)
    q, k, v = normal(3, tokens, Q), normal(4, tokens, KV), normal(5, tokens, KV)
    positions = np.arange(tokens, dtype=np.int32)[:, None]
    cache = normal(8, 1, KV_HEADS, DEPTH, POSITIONS), normal(9, 1, KV_HEADS, POSITIONS, DEPTH)
    wide = normal(10, HIDDEN, INNER), normal(11, HIDDEN, INNER), normal(12, INNER, HIDDEN)
    angles = normal(6, POSITIONS, DEPTH // 2)
    one = np.array([[tokens]], np.int32)
    return {
        "embedding": (positions % 5, normal(7, 32, HIDDEN)),
        "matmul": (x, wide[0]),
        "rmsnorm": (x, norm, 1e-5),
        "qkv_projection": in_order(
            kernels.qkv_projection,
            x=x,
            norm_weight=norm,
            w_qkv=normal(13, HIDDEN, Q + 2 * KV),
            eps=1e-5,
            q_size=Q,
            kv_size=KV,
        ),
        "rope": (q, positions, np.cos(angles), np.sin(angles), HEADS),
        "attention_prefill": (q, *cache, DEPTH**-0.5, k, v),
        "attention_decode": (q[:1], *cache, one, DEPTH**-0.5, k[:1], v[:1]),
        "output_projection": (q, normal(14, Q, HIDDEN), x, None),
        "mlp": in_order(
            kernels.mlp, x=x, norm_weight=norm, w_gate=wide[0], w_up=wide[1], w_down=wide[2], eps=1e-5
        ),
        "lm_head": (x[:1], norm, normal(15, HIDDEN, 640), 1e-5, 8, np.zeros((1, 1), np.int32), None),
        "sample": (
            normal(16, tokens % 128, 700),
            *(abs(normal(i, tokens % 128, 1)) for i in range(17, 22)),
            8,
        ),
    }


@pytest.mark.parametrize("case", [case for case in cases() if case.ranks == 1], ids=lambda case: case.name)
def test_a_small_launch_of_every_kernel_of_one_rank_gives_the_same_bytes_in_every_order(case: Case) -> None:
    arguments = tuple(
        normal(16, *argument.shape).astype(argument.dtype)
        if isinstance(argument, np.ndarray) and argument.dtype != np.int32  # positions and ids stay 0
        else argument
        for argument in case.arguments
    )
    findings = examine(lambda: simulate.World("trn2").launch(case.kernel, [(arguments, {})]), orders=4)
    assert [finding for finding in findings if finding.code == "NKW-ORDER"] == []


@pytest.mark.parametrize("tokens", [5, 129])
@pytest.mark.parametrize("name", sorted(shipped(1)))
def test_the_shipped_kernels_give_the_same_bytes_in_every_order(name: str, tokens: int) -> None:
    arguments = shipped(min(tokens, POSITIONS - 1) if "attention" in name or name == "rope" else tokens)[name]
    kernel = getattr(kernels, name)
    findings = examine(lambda: simulate.World("trn2").launch(kernel, [(arguments, {})]), orders=4)
    assert [finding for finding in findings if finding.code == "NKW-ORDER"] == []
