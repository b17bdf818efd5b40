"""Tensor indirection: gathers and scatters by offsets in an index tile, in every instruction that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nkw.errors import NkwError, OutOfBounds
from simulate import nki
from simulate.hardware import hardware
from simulate.memory.validity import ACCUMULATED, EMPTY
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import Mode, target_hardware
from simulate.world import World, launch
from tests.isa.tiles import plan, refuses, tile

FREE = 40
PARTITIONS = (1, 15, 16, 17, 32, 127, 128)


@pytest.fixture(autouse=True)
def gen4(monkeypatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")


def _lists(index: np.ndarray, count: int, group: int = 16) -> np.ndarray:
    """Return rows of offsets, row p for partition p, element by element as the reference words it."""
    rows = []
    for partition in range(index.shape[0]):
        group_index = index[partition - partition % group :][:group]
        rows.append([group_index[i % group, i // group] for i in range(count)])
    return np.array(rows)


def _index(rng: np.random.Generator, rows: int, columns: int, dtype: str = "uint16") -> np.ndarray:
    """Return offsets below FREE, none twice in a partition's list."""
    index = np.empty((rows, columns), dtype)
    for start in range(0, rows, 16):
        group_index = index[start : start + 16]
        group_index[...] = rng.permutation(FREE)[: group_index.size].reshape(group_index.shape)
    return index


def _data(rng: np.random.Generator, rows: int, free: int = FREE) -> np.ndarray:
    return rng.integers(-50, 50, (rows, free)).astype(np.float32)


def _count(rows: int, columns: int) -> int:
    return rows % 16 if rows % 16 else 16 * columns


@nki.jit
def gathered(data, index, count, copy):
    out = nl.ndarray((data.shape[0], count), data.dtype, buffer=nl.shared_hbm)
    tile, taken = nl.load(data), nl.ndarray((data.shape[0], count), data.dtype)
    copy(taken, tile.indirect(nl.load(index), count))
    nl.store(out, taken)
    return out


@nki.jit
def scattered(values, index, before, copy):
    out = nl.ndarray(before.shape, before.dtype, buffer=nl.shared_hbm)
    tile = nl.load(before)
    copy(tile.indirect(nl.load(index), values.shape[1]), nl.load(values))
    nl.store(out, tile)
    return out


COPIES: dict[str, Callable[[Any, Any], Any]] = {
    "dma_copy": lambda dst, src: nisa.dma_copy(dst=dst, src=src),
    "tensor_copy": lambda dst, src: nisa.tensor_copy(dst=dst, src=src),
    "scalar": lambda dst, src: nisa.tensor_copy(dst=dst, src=src, engine=nisa.engine.scalar),
    "tensor_scalar": lambda dst, src: nisa.tensor_scalar(dst=dst, data=src, op0=nl.add, operand0=0.0),
    "activation": lambda dst, src: nisa.activation(dst=dst, data=src, op=nl.copy),
    "activate2": lambda dst, src: nisa.activate2(
        dst=dst, op=nl.copy, data=src, imm0=None, imm1=None, op0=nl.bypass, op1=nl.bypass
    ),
}


@pytest.mark.parametrize("rows", PARTITIONS)
def test_a_gather_takes_each_groups_own_offsets(rows: int) -> None:
    rng = np.random.default_rng(rows)
    data, index = _data(rng, rows), _index(rng, rows, 2)
    count = _count(rows, 2)
    expected = np.take_along_axis(data, _lists(index, count).astype(np.int64), 1)
    np.testing.assert_array_equal(gathered(data, index, count, COPIES["tensor_copy"]), expected)


@pytest.mark.parametrize("rows", PARTITIONS)
def test_a_scatter_writes_each_groups_own_offsets_and_no_others(rows: int) -> None:
    rng = np.random.default_rng(rows)
    count = _count(rows, 2)
    values, index, before = _data(rng, rows, count), _index(rng, rows, 2), _data(rng, rows)
    expected = before.copy()
    np.put_along_axis(expected, _lists(index, count).astype(np.int64), values, 1)
    np.testing.assert_array_equal(scattered(values, index, before, COPIES["tensor_copy"]), expected)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
@pytest.mark.parametrize("name", COPIES)
def test_every_instruction_gathers_and_scatters_alike(name: str, dtype: str) -> None:
    rng = np.random.default_rng(7)
    data, index = _data(rng, 32), _index(rng, 32, 2, dtype)
    lists = _lists(index, 20).astype(np.int64)
    np.testing.assert_array_equal(gathered(data, index, 20, COPIES[name]), np.take_along_axis(data, lists, 1))
    values, expected = _data(rng, 32, 20), data.copy()
    np.put_along_axis(expected, lists, values, 1)
    np.testing.assert_array_equal(scattered(values, index, data, COPIES[name]), expected)


@nki.jit
def worked(data, other, index):
    count = other.shape[1]
    tile, second = nl.load(data), nl.load(other)
    taken = tile.indirect(nl.load(index), count)
    results = []

    def result(columns):
        results.append(nl.ndarray((data.shape[0], columns), nl.float32, buffer=nl.shared_hbm))
        return nl.ndarray((data.shape[0], columns), nl.float32)

    sums = result(count)
    nisa.tensor_tensor(dst=sums, data1=taken, data2=second, op=nl.add)
    total = result(1)
    nisa.tensor_reduce(dst=total, data=taken, op=nl.maximum, axis=1)
    running = result(count)
    nisa.tensor_scalar_cumulative(dst=running, src=taken, op0=nl.multiply, op1=nl.add, imm0=1.0)
    powers, last = result(count), nl.ndarray((data.shape[0], 1), nl.float32)
    nisa.tensor_scalar_reduce(
        dst=powers, data=taken, op0=nl.multiply, operand0=2.0, reduce_op=nl.add, reduce_res=last
    )
    chosen = result(count)
    nisa.memset(dst=chosen, value=0.0)
    flags = nl.ndarray(data.shape, nl.uint8)
    nisa.tensor_scalar(dst=flags, data=tile, op0=nl.greater, operand0=0.0)
    nisa.tensor_copy_predicated(dst=chosen, src=second, predicate=flags.indirect(nl.load(index), count))
    partly = result(data.shape[1])
    nisa.memset(dst=partly, value=0.0)
    nisa.tensor_copy_predicated(
        dst=partly.indirect(nl.load(index), count),
        src=second,
        predicate=flags.indirect(nl.load(index), count),
    )
    for out, value in zip(results, (sums, total, running, powers, chosen, partly)):
        nl.store(out, value)
    return tuple(results)


def test_the_vector_engines_instructions_read_the_gathered_elements() -> None:
    rng = np.random.default_rng(3)
    data, other, index = _data(rng, 48), _data(rng, 48, 24), _index(rng, 48, 2)
    lists = _lists(index, 24).astype(np.int64)
    taken = np.take_along_axis(data, lists, 1)
    partly = np.zeros_like(data)
    np.put_along_axis(partly, lists, np.where(taken > 0, other, 0), 1)
    expected = (
        taken + other,
        taken.max(1, keepdims=True),
        np.cumsum(taken, 1),
        2 * taken,
        np.where(taken > 0, other, 0),
        partly,
    )
    for seen, wanted in zip(worked(data, other, index), expected):
        np.testing.assert_array_equal(seen, wanted)


@nki.jit
def exponents(data, index):
    tile, taken = nl.load(data), nl.ndarray((data.shape[0], 16), nl.float32)
    nisa.exponential(dst=taken, src=tile.indirect(nl.load(index)))
    out = nl.ndarray(taken.shape, taken.dtype, buffer=nl.shared_hbm)
    nl.store(out, taken)
    return out


def test_exponential_reads_the_gathered_elements_and_num_elem_defaults_to_the_index_size() -> None:
    rng = np.random.default_rng(4)
    data, index = _data(rng, 16), _index(rng, 16, 1)
    expected = np.exp(np.take_along_axis(data, _lists(index, 16).astype(np.int64), 1))
    np.testing.assert_array_equal(exponents(data, index), expected)


@nki.jit
def multiplied(stationary, moving, rows, columns, slots, written, accumulate):
    """Compute the product of gathered operands, its columns scattered over 40 columns of PSUM, twice."""
    left, right = nl.load(stationary), nl.load(moving)
    total = nl.ndarray((24, 40), nl.float32, buffer=nl.psum)
    for repeat in range(2):
        nisa.nc_matmul(
            dst=total.indirect(nl.load(slots), 20),
            stationary=left.indirect(nl.load(rows), 24),
            moving=right.indirect(nl.load(columns), 20),
            accumulate=repeat > 0 if accumulate == "sum" else None if accumulate == "auto" else False,
        )
    out = nl.ndarray((24, 20), nl.float32, buffer=nl.shared_hbm)
    taken = nl.ndarray((24, 20), nl.float32)
    for index, column in enumerate(written):
        nisa.tensor_copy(dst=taken[:, index : index + 1], src=total[:, column : column + 1])
    nl.store(out, taken)
    return out


@pytest.mark.parametrize(("accumulate", "times"), [("sum", 2), ("auto", 2), ("over", 1)])
def test_nc_matmul_gathers_and_scatters_by_groups_of_32(accumulate: str, times: int) -> None:
    rng = np.random.default_rng(9)
    left, right = (_data(rng, 64).astype("float16") for _ in range(2))
    rows, columns = (rng.integers(0, FREE, (64, 1)).astype("uint16") for _ in range(2))
    slots = rng.permutation(FREE)[:24].reshape(24, 1).astype("uint16")
    first = np.take_along_axis(left, _lists(rows, 24, 32).astype(np.int64), 1).astype(np.float64)
    second = np.take_along_axis(right, _lists(columns, 20, 32).astype(np.int64), 1).astype(np.float64)
    written = tuple(int(slot) for slot in slots[:20, 0])
    seen = multiplied(left, right, rows, columns, slots, written, accumulate)
    np.testing.assert_array_equal(seen, times * (first.T @ second))


def test_nc_matmul_leaves_the_columns_beside_a_scatter_unwritten() -> None:
    rng = np.random.default_rng(9)
    ones, index = np.ones((64, FREE), "float16"), np.zeros((64, 1), "uint16")
    slots = rng.permutation(20).tolist() + [20, 21, 22, 23]
    scatter = np.array(slots, "uint16").reshape(24, 1)
    multiplied(ones, ones, index, index, scatter, tuple(range(20)), "auto")
    with pytest.raises(NkwError, match="NKW-UNWRITTEN"):
        multiplied(ones, ones, index, index, scatter, tuple(range(1, 21)), "auto")


def test_what_a_matmul_scatters_counts_as_written_by_a_matmul() -> None:
    def kernel(x, index, slots):
        total = nl.ndarray((24, 40), nl.float32, buffer=nl.psum)
        operand = nl.load(x)
        nisa.nc_matmul(
            dst=total.indirect(nl.load(slots), 20), stationary=operand[:, :24], moving=operand[:, :20]
        )
        states.append(total.storage.validity.states(*total.byte_view()[1:]))
        return x

    states: list[Any] = []
    slots = np.random.default_rng(9).permutation(40)[:24].reshape(24, 1).astype("uint16")
    ones = np.ones((64, FREE), "float16")
    launch(kernel, [((ones, None, slots), {})], hardware("trn3"))
    expected = np.full((24, 40), EMPTY)
    expected[:, slots[:20, 0]] = ACCUMULATED
    np.testing.assert_array_equal(states[0], expected)


# -- out of range, written in part, replay ------------------------------------------------------------------


@nki.jit
def moved(data, index, before, skip, scatter):
    mode = nisa.oob_mode.skip if skip else nisa.oob_mode.error
    out = nl.ndarray(before.shape, before.dtype, buffer=nl.shared_hbm)
    target = nl.load(before)
    offsets = nl.load(index)
    if scatter:
        nisa.dma_copy(dst=target.indirect(offsets, data.shape[1]), src=nl.load(data), oob_mode=mode)
    else:
        nisa.dma_copy(dst=target, src=nl.load(data).indirect(offsets, before.shape[1]), oob_mode=mode)
    nl.store(out, target)
    return out


@pytest.mark.parametrize("beyond", [-1, FREE - 1, FREE])
@pytest.mark.parametrize("scatter", [False, True])
def test_offsets_out_of_range_are_refused_or_skipped(scatter: bool, beyond: int) -> None:
    rng = np.random.default_rng(5)
    index = _index(rng, 16, 1, "int32")
    index[index == FREE - 1] = 0
    index[3, 0] = beyond
    before = _data(rng, 16, FREE if scatter else 16)
    data = _data(rng, 16, 16 if scatter else FREE)
    outside = not 0 <= beyond < FREE
    if outside:
        with pytest.raises(OutOfBounds, match=rf"offset {beyond} of partition 0 is out of bounds .* {FREE} "):
            moved(data, index, before, False, scatter)
    else:
        moved(data, index, before, False, scatter)
    expected = before.copy()
    for partition in range(16):
        for i, offset in enumerate(index[:, 0]):
            if 0 <= offset < FREE:
                if scatter:
                    expected[partition, offset] = data[partition, i]
                else:
                    expected[partition, i] = data[partition, offset]
    np.testing.assert_array_equal(moved(data, index, before, True, scatter), expected)


@nki.jit
def half_written(data, index, count):
    tile = nl.ndarray((16, FREE), nl.float32)
    nisa.dma_copy(dst=tile[:, 0:20], src=data[:, 0:20])
    taken = nl.ndarray((16, count), nl.float32)
    nisa.tensor_copy(dst=taken, src=tile.indirect(nl.load(index), count))
    out = nl.ndarray(taken.shape, taken.dtype, buffer=nl.shared_hbm)
    nl.store(out, taken)
    return out


def test_only_gathered_elements_need_to_be_written() -> None:
    data = np.ones((16, FREE), np.float32)
    index = np.arange(16, dtype=np.uint16).reshape(16, 1) + 4
    assert half_written(data, index, 16).all()
    with pytest.raises(NkwError, match="NKW-UNWRITTEN"):
        half_written(data, index + 1, 16)


@pytest.mark.parametrize("scatter", [False, True])
def test_a_replayed_launch_reads_its_own_offsets(scatter: bool) -> None:
    world = World("trn3")
    rng = np.random.default_rng(6)
    for _ in range(3):
        index = _index(rng, 16, 1)
        data = _data(rng, 16, 16 if scatter else FREE)
        before = _data(rng, 16, FREE if scatter else 16)
        launches = [((data, index, before, False, scatter), {})]
        seen = world.launch(moved, launches, Mode.replay).outputs[0]
        np.testing.assert_array_equal(seen, world.launch(moved, launches).outputs[0])
    assert world.replays.report.hits == 2


def test_what_a_scatter_leaves_unwritten_is_not_replayed() -> None:
    def kernel(values, index):
        tile = nl.ndarray((16, FREE), nl.float32)
        nisa.tensor_copy(dst=tile.indirect(nl.load(index)), src=nl.load(values))
        out = nl.ndarray((16, 16), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, tile[:, 0:16])
        return out

    world, values = World("trn3"), np.ones((16, 16), np.float32)
    index = np.arange(16, dtype=np.uint16).reshape(16, 1)
    world.launch(kernel, [((values, index), {})], Mode.replay)
    assert any("depends on data" in reason for reason in world.replays.report.refusals)
    with pytest.raises(NkwError, match="NKW-UNWRITTEN"):
        world.launch(kernel, [((values, index + 1), {})], Mode.replay)


def test_a_dry_run_counts_a_scattered_tile_as_written() -> None:
    def kernel(values, index):
        tile = nl.ndarray((16, 16), nl.float32)
        nisa.tensor_copy(dst=tile.indirect(nl.load(index)), src=nl.load(values))
        out = nl.ndarray((16, 16), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    arguments = ((np.ones((16, 16), np.float32), np.zeros((16, 1), np.uint16)), {})
    done = launch(kernel, [arguments], target_hardware("trn3"), mode=Mode.dry)
    assert len(done.streams[0]) == 4


# -- one offset for the whole tile --------------------------------------------------------------------------


@nki.jit
def windowed(data, offset, width, way):
    tile, where = nl.load(data), nl.load(offset)
    p, free = data.shape
    result = nl.ndarray((p, free), nl.float32)
    nisa.memset(dst=result, value=0.0)
    if way == "ap":
        source = tile.ap([[free, p], [1, width]], scalar_offset=where, indirect_dim=1)
        target = result.ap([[free, p], [1, width]], scalar_offset=where, indirect_dim=1)
    else:
        source = tile.reshape((p, free // width, width)).select(1, where)
        target = result.reshape((p, free // width, width)).select(1, where)
    nisa.tensor_scalar(dst=target, data=source, op0=nl.multiply, operand0=2.0)
    out = nl.ndarray((p, free), nl.float32, buffer=nl.shared_hbm)
    nl.store(out, result)
    return out


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize(
    ("way", "offset", "start"), [("ap", 0, 0), ("ap", 13, 13), ("select", 3, 24), ("select", 0, 0)]
)
def test_a_run_time_offset_moves_an_operand_of_any_engine(monkeypatch, target, way, offset, start) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    data = _data(np.random.default_rng(1), 17)
    expected = np.zeros_like(data)
    expected[:, start : start + 8] = 2 * data[:, start : start + 8]
    np.testing.assert_array_equal(windowed(data, np.array([[offset]], np.int32), 8, way), expected)


@pytest.mark.parametrize(("way", "offset"), [("ap", 33), ("ap", -1), ("select", 5)])
def test_a_run_time_offset_that_leaves_the_tile_is_refused(way: str, offset: int) -> None:
    with pytest.raises(OutOfBounds, match="NKW-OOB"):
        windowed(_data(np.random.default_rng(1), 17), np.array([[offset]], np.int32), 8, way)


def test_the_partition_dim_is_not_addressed_at_run_time() -> None:
    data, where = tile((32, 8)), tile((1, 1), "int32")
    for refused in (
        lambda: data.select(0, where),
        lambda: data.ap([[8, 1], [1, 8]], scalar_offset=where),
        lambda: data.ap([[8, 1], [1, 8]], scalar_offset=where, indirect_dim=0),
    ):
        with pytest.raises(NkwError, match="NKW-DYNAMIC-PARTITION"):
            refused()
    assert data.select(1, where).is_indirect()


@pytest.mark.parametrize(("dim", "exists"), [(-1, False), (0, True), (2, True), (3, False)])
def test_the_dim_of_a_run_time_offset_exists(dim: int, exists: bool) -> None:
    data, where = tile((4, 4, 8), buffer=nl.shared_hbm), tile((1, 1), "int32")
    if exists:
        assert data.ap([[8, 4], [1, 8]], scalar_offset=where, indirect_dim=dim).is_indirect()
        return
    with pytest.raises(NkwError, match="NKW-INDIRECT-DIM"):
        data.ap([[8, 4], [1, 8]], scalar_offset=where, indirect_dim=dim)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "index", "count", "code"),
    [
        (tile((32, 8)), tile((32, 2), "uint16"), 32, None),
        (tile((32, 8)), tile((32, 2), "uint16"), 64, None),
        (tile((32, 8)), tile((32, 2), "uint16"), 65, "NKW-INDIRECT-COUNT"),
        (tile((32, 8)), tile((32, 2), "uint16"), 0, "NKW-INDIRECT-COUNT"),
        (tile((128, 8)), tile((128, 1), "uint16"), None, "NKW-INDIRECT-COUNT"),
        (tile((32, 8)), tile((32, 1), "float32"), None, "NKW-INDIRECT-INDEX"),
        (tile((32, 8)), tile((16, 1), "uint16"), None, "NKW-INDIRECT-INDEX"),
        (tile((32, 8)), [1, 2], None, "NKW-INDIRECT-INDEX"),
        (tile((32, 8), buffer=nl.shared_hbm), tile((32, 1), "uint16"), None, "NKW-INDIRECT-DATA"),
        (tile((32, 8))[:, ::2], tile((32, 1), "uint16"), None, "NKW-INDIRECT-DATA"),
        (tile((32, 8))[:, 2:6], tile((32, 1), "uint16"), None, None),
        (tile((32, 8), buffer=nl.psum), tile((32, 1), "uint16"), None, None),
    ],
)
def test_what_an_index_must_be(data, index, count, code) -> None:
    if code is None:
        assert data.indirect(index, count).shape == (data.shape[0], count or index.size)
        return
    with pytest.raises(NkwError) as caught:
        data.indirect(index, count)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "again",
    [
        lambda view: view[:, 0:2],
        lambda view: view.reshape((32, 4, 8)),
        lambda view: view.view(nl.int32),
        lambda view: view.indirect(tile((32, 1), "uint16")),
        lambda view: view.ap([[8, 32], [1, 8]]),
    ],
)
def test_an_indirect_view_is_not_viewed_again(again) -> None:
    view = tile((32, 8)).indirect(tile((32, 1), "uint16"))
    with pytest.raises(NkwError, match=r"NKW-INDIRECT-FINAL|NKW-ONE-DYNAMIC|NKW-INDIRECT-DATA"):
        again(view)


def _copy(**changes: Any) -> dict[str, Any]:
    return {"dst": tile((32, 16)), "src": tile((32, 8)).indirect(tile((32, 1), "uint16"), 16), **changes}


def test_rules_of_indirection() -> None:
    plan("trn3", "tensor_copy", **_copy())
    refuses("NKW-INDIRECT-CHIP", "trn2", "tensor_copy", **_copy())
    refuses("NKW-ENGINE", "trn3", "tensor_copy", **_copy(engine=nisa.engine.gpsimd))
    # A list for groups of 32 is too long for the Vector engine, whose groups have 16 partitions.
    long = tile((32, 8)).indirect(tile((32, 1), "uint16"), 17)
    refuses("NKW-INDIRECT-COUNT", "trn3", "tensor_copy", **_copy(dst=tile((32, 17)), src=long))
    below = tile((32, 8)).indirect(tile((32, 1), "uint16", start_partition=32), 16)
    refuses("NKW-INDIRECT-START", "trn3", "tensor_copy", **_copy(src=below))
    shifted = tile((16, 8), start_partition=16).indirect(tile((16, 1), "uint16", start_partition=16), 16)
    refuses("NKW-PARTITION-START", "trn3", "tensor_copy", **_copy(dst=tile((16, 16)), src=shifted))


def test_rules_of_scatters() -> None:
    def into(buffer, start_partition=0):
        return tile((32, 16), buffer=buffer).indirect(
            tile((32, 1), "uint16", start_partition=start_partition), 16
        )

    operands = {"op": nl.exp, "data": tile((32, 16))}
    plan("trn3", "activation", dst=into(nl.sbuf), **operands)
    refuses("NKW-INDIRECT-SCATTER", "trn3", "activation", dst=into(nl.psum), **operands)
    plan("trn3", "tensor_copy", dst=into(nl.psum), src=tile((32, 16)))
    refuses("NKW-INDIRECT-START", "trn3", "tensor_copy", dst=into(nl.sbuf, 32), src=tile((32, 16)))
    plan("trn3", "tensor_copy", dst=into(nl.sbuf, 32), src=tile((32, 16), buffer=nl.psum))


def test_rules_of_nc_matmul() -> None:
    def call(dtype="bfloat16", **changes):
        moving = tile((64, 40), dtype).indirect(tile((64, 1), "uint16"), 20)
        dst = tile((24, 20), buffer=nl.psum)
        return {"dst": dst, "stationary": tile((64, 24), dtype), "moving": moving, **changes}

    plan("trn3", "nc_matmul", **call())
    refuses("NKW-MATMUL-INDIRECT", "trn3", "nc_matmul", **call("float32"))
    refuses("NKW-MATMUL-INDIRECT", "trn3", "nc_matmul", **call(tile_position=(32, 0), tile_size=(32, 128)))
    identity = {"dst": tile((24, 20), "bfloat16", nl.psum), "is_transpose": True}
    refuses("NKW-MATMUL-INDIRECT", "trn3", "nc_matmul", **call(**identity))


def test_nc_matmul_mx_scatters_and_says_that_it_does_not_gather() -> None:
    def call(**changes):
        operands = {side: tile((32, 64), "float8_e4m3fn_x4") for side in ("stationary", "moving")}
        scales = {f"{side}_scale": tile((4, 64), "uint8") for side in operands}
        return {"dst": tile((64, 64), buffer=nl.psum), **operands, **scales, **changes}

    index = tile((32, 2), "uint16")
    plan("trn3", "nc_matmul_mx", **call())
    scattered = tile((64, 80), buffer=nl.psum).indirect(tile((64, 2), "uint16"), 64)
    made = plan("trn3", "nc_matmul_mx", **call(dst=scattered))
    assert made.writes[0].dynamic.group == 32
    moving = tile((32, 80), "float8_e4m3fn_x4").indirect(index, 64)
    refuses("NKW-UNSUPPORTED", "trn3", "nc_matmul_mx", **call(moving=moving))


def test_the_other_dma_instructions_take_no_indirect_tile() -> None:
    operands = _copy()
    refuses(
        "NKW-INDIRECT", "trn3", "dma_compute", dst=operands["dst"], srcs=[operands["src"]], reduce_op=nl.add
    )
    plan("trn3", "dma_copy", **operands)
    refuses("NKW-INDIRECT-CHIP", "trn2", "dma_copy", **operands)
    gathered = tile((32, 8), "float16").indirect(tile((32, 1), "uint16"), 16)
    with pytest.raises(NkwError):
        plan("trn3", "dma_transpose", dst=tile((16, 32), "float16"), src=gathered)
