"""dma_copy: bits between HBM and SBUF, run-time rows, descriptors, and what a DMA cannot reach."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import OutOfBounds
from simulate.hardware import hardware
from simulate.isa import Engine
from simulate.memory import Dynamic, NkiTensor
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import launch
from tests.isa.reference import FLOATS, INTEGERS, assert_same_bits, every_bit_pattern, sample
from tests.isa.tiles import HBM, PSUM, SHARED_HBM, TARGETS, Fresh, Given, execute, plan, refuses, tile


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("shape", [(1, 3), (127, 11), (128, 2, 5)])
def test_equal_dtypes_keep_every_bit(dtype: str, shape: tuple[int, ...]) -> None:
    bits = every_bit_pattern(dtype, shape)
    for dst, src in (
        (Fresh(shape, dtype), Given(bits, HBM)),
        (Fresh(shape, dtype, HBM), Given(bits)),
        (Fresh(shape, dtype), Given(bits)),
        (Fresh(shape, dtype, SHARED_HBM), Given(bits, HBM)),
    ):
        assert_same_bits(execute("trn1", "dma_copy", dst=dst, src=src)["dst"], bits)


def test_only_the_counts_of_elements_agree() -> None:
    values = sample("float32", (6, 10))
    copied = execute("trn2", "dma_copy", dst=Fresh((5, 12)), src=Given(values, HBM))["dst"]
    assert_same_bits(copied, values.reshape(5, 12))
    for columns in (11, 13):
        refuses("NKW-DMA-COUNT", "trn2", "dma_copy", dst=tile((5, columns)), src=tile((6, 10), buffer=HBM))


def test_psum_and_too_many_partitions_are_out_of_reach() -> None:
    for operands in ({"dst": PSUM, "src": HBM}, {"dst": HBM, "src": PSUM}):
        refuses("NKW-BUFFER", "trn2", "dma_copy", **{k: tile((4, 4), buffer=b) for k, b in operands.items()})
    refuses("NKW-PARTITION-COUNT", "trn2", "dma_copy", dst=tile((129, 1)), src=tile((129, 1), buffer=HBM))
    plan("trn2", "dma_copy", dst=tile((128, 1)), src=tile((128, 1), buffer=HBM))
    plan("trn2", "dma_copy", dst=tile((129, 1), buffer=HBM), src=tile((129, 1), buffer=HBM))
    refuses("NKW-OPERAND", "trn2", "dma_copy", dst=tile((4, 4)), src=np.zeros((4, 4)))


def test_packed_elements_are_never_cast() -> None:
    packed = "float4_e2m1fn_x4"
    plan("trn3", "dma_copy", dst=tile((4, 4), packed), src=tile((4, 4), packed, HBM))
    for dst, src in ((packed, "uint16"), ("uint16", packed)):
        refuses("NKW-PACKED-DTYPE", "trn3", "dma_copy", dst=tile((4, 4), dst), src=tile((4, 4), src, HBM))


@pytest.mark.parametrize("target", TARGETS)
def test_hardware_descriptors(target: str) -> None:
    call = {"dst": tile((4, 4)), "src": tile((4, 4), buffer=HBM), "dge_mode": nisa.dge_mode.hwdge}
    if target == "trn1":
        refuses("NKW-DMA-HWDGE", target, "dma_copy", **call)
        return
    for engine in (Engine.unknown, Engine.sync, Engine.scalar):
        plan(target, "dma_copy", **call, engine=engine)
    refuses("NKW-ENGINE", target, "dma_copy", **call, engine=Engine.vector)
    refuses("NKW-DMA-HWDGE", target, "dma_copy", **{**call, "dst": tile((4, 4), "bfloat16")})
    refuses("NKW-DMA-HWDGE", target, "dma_copy", **{**call, "src": _rows(4)})
    plan(target, "dma_copy", **{**call, "src": _rows(4), "dge_mode": nisa.dge_mode.swdge})


@pytest.mark.parametrize("engine", Engine, ids=lambda engine: engine.name)
@pytest.mark.parametrize("mode", nisa.dge_mode, ids=lambda mode: mode.name)
def test_an_engine_comes_with_hardware_descriptors_alone(mode: nisa.dge_mode, engine: Engine) -> None:
    call = {"dst": tile((4, 4)), "src": tile((4, 4), buffer=HBM), "dge_mode": mode, "engine": engine}
    if engine is Engine.unknown or (mode is nisa.dge_mode.hwdge and engine in (Engine.sync, Engine.scalar)):
        assert plan("trn2", "dma_copy", **call).undocumented == ()
    elif mode is nisa.dge_mode.hwdge:
        refuses("NKW-ENGINE", "trn2", "dma_copy", **call)
    else:
        refuses("NKW-DMA-ENGINE", "trn2", "dma_copy", **call)


@pytest.mark.parametrize("target", TARGETS)
def test_priorities(target: str) -> None:
    call = {"dst": tile((4, 4)), "src": tile((4, 4), buffer=HBM)}
    plan(target, "dma_copy", **call, priority=None)
    for priority in (-1, 0, 3, 4):
        if target == "trn3" and 0 <= priority <= 3:
            plan(target, "dma_copy", **call, priority=priority)
        else:
            refuses("NKW-DMA-PRIORITY", target, "dma_copy", **call, priority=priority)


def _rows(count: int) -> NkiTensor:
    """Return `count` rows of an HBM tensor of ten, named by a tile."""
    table = tile((10, 4), buffer=HBM)
    return NkiTensor.from_storage(
        (count, 4), table.dtype, table.storage, (0, 1), 0, Dynamic(tile((count, 1), "int32"), 4, 10, True)
    )


def test_one_side_at_most_is_addressed_at_run_time() -> None:
    plan("trn2", "dma_copy", dst=tile((4, 4)), src=_rows(4))
    plan("trn2", "dma_copy", dst=_rows(4), src=tile((4, 4)))
    refuses("NKW-DMA-ONE-DYNAMIC", "trn2", "dma_copy", dst=_rows(4), src=_rows(4))


@pytest.mark.parametrize(
    ("dst", "src", "trigger"),
    [
        (tile((4, 4)), tile((4, 4), buffer=HBM), Engine.sync),
        (tile((4, 4), buffer=HBM), tile((4, 4)), Engine.gpsimd),
        # A cast whose addresses are known: software writes its descriptors, but waits on the stream of a load.
        (tile((4, 4), "bfloat16"), tile((4, 4), buffer=HBM), Engine.sync),
        (tile((4, 4), "bfloat16", HBM), tile((4, 4)), Engine.gpsimd),
        (tile((4, 4), "bfloat16"), _rows(4), Engine.gpsimd),
        (tile((4, 4)), _rows(4), Engine.gpsimd),
    ],
)
def test_who_triggers_a_dma(dst: NkiTensor, src: NkiTensor, trigger: Engine) -> None:
    made = plan("trn2", "dma_copy", dst=dst, src=src)
    assert made.engine is Engine.dma and made.trigger is trigger
    assert made.cost.dma is not None and made.cost.dma.bytes == 64


def _gather(indices: list[int], skip: bool) -> np.ndarray:
    table = np.arange(40, dtype=np.int32).reshape(10, 4)
    rows = np.array(indices, np.int32).reshape(-1, 1)

    def kernel(table, rows):
        taken = nl.full((len(indices), 4), -1, nl.int32)
        mode = nisa.oob_mode.skip if skip else nisa.oob_mode.error
        nisa.dma_copy(dst=taken, src=table.vector_select(0, nl.load(rows)), oob_mode=mode)
        out = nl.ndarray(taken.shape, nl.int32, nl.shared_hbm)
        nl.store(out, taken)
        return out

    return launch(kernel, [((table, rows), {})], hardware("trn2")).outputs[0]


def test_rows_named_by_a_tile_are_gathered() -> None:
    assert _gather([9, 0, 3, 3], skip=False)[:, 0].tolist() == [36, 0, 12, 12]


@pytest.mark.parametrize("index", [-1, 10, 2**31 - 1])
def test_a_row_out_of_range_is_refused_or_skipped(index: int) -> None:
    with pytest.raises(
        OutOfBounds, match=f"index {index} is out of bounds for axis 0 with size 10"
    ) as caught:
        _gather([2, index], skip=False)
    assert isinstance(caught.value, IndexError)
    assert _gather([2, index], skip=True).tolist() == [[8, 9, 10, 11], [-1, -1, -1, -1]]


def test_rows_named_by_a_tile_are_scattered() -> None:
    def kernel(rows, values):
        out = nl.ndarray((4, 2), nl.int32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.full((4, 2), 7, nl.int32))
        nisa.dma_copy(
            dst=out.vector_select(0, nl.load(rows)), src=nl.load(values), oob_mode=nisa.oob_mode.skip
        )
        return out

    rows = np.array([[3], [8], [0]], np.int32)
    values = np.arange(6, dtype=np.int32).reshape(3, 2)
    result = launch(kernel, [((rows, values), {})], hardware("trn2")).outputs[0]
    assert result.tolist() == [[4, 5], [7, 7], [7, 7], [0, 1]]


@pytest.mark.parametrize("rows", [4, 8])
def test_elements_wider_than_a_row_of_hbm_take_the_rows_they_touch(rows: int) -> None:
    def kernel(x):
        words = nl.ndarray((1, rows // 4), nl.int32)
        nisa.dma_copy(dst=words, src=x.ap([[rows // 4, 1], [1, rows // 4]], dtype=nl.int32))
        out = nl.ndarray((1, rows // 4), nl.int32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=words)
        return out

    x = np.arange(rows, dtype=np.uint8)[:, None]
    done = launch(kernel, [((x,), {})], hardware("trn2"))
    assert_same_bits(done.outputs[0].ravel(), x.ravel().view(np.int32))
    read = done.streams[0].event(0).accesses[0]
    assert (read.first_row, read.end_row, read.first_byte, read.end_byte) == (0, rows, 0, 1)
