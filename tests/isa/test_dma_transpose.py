"""dma_transpose: permutations, gathered rows, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from nkw.errors import OutOfBounds
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same_bits, every_bit_pattern, sample
from tests.isa.tiles import HBM, PSUM, TARGETS, Fresh, Given, execute, plan, refuses, tile

NAME = "dma_transpose"
DGE, OOB = nisa.dge_mode, nisa.oob_mode


def call(src=(16, 100), dst=None, dtype="bfloat16", **changes):
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(len(src), ())
    shape = dst or tuple(src[i] for i in order)
    return {"dst": tile(shape, dtype), "src": tile(src, dtype, HBM), **changes}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("src", "axes"), [((5, 7), (1, 0)), ((5, 3, 7), (2, 1, 0)), ((5, 2, 3, 7), (3, 1, 2, 0)), ((5, 7), None)]
)
def test_accepts_the_documented_axes(target, src, axes):
    plan(target, NAME, **call(src, axes=axes))


@pytest.mark.parametrize(
    ("code", "target", "bad", "good"),
    [
        ("NKW-DMA-TRANSPOSE-AXES", "trn2", call(axes=(0, 1)), call(axes=[1, 0])),
        ("NKW-DMA-TRANSPOSE-AXES", "trn2", call((5, 3, 7), axes=(0, 2, 1)), call((5, 3, 7))),
        ("NKW-DMA-TRANSPOSE-AXES", "trn2", call((2, 2, 2, 2, 2), dst=(2, 16)), call((2, 2, 2, 2))),
        ("NKW-DMA-TRANSPOSE-SHAPE", "trn2", call(dst=(16, 100)), call(dst=(100, 16))),
        ("NKW-DMA-TRANSPOSE-SHAPE", "trn2", call((5, 3, 7), dst=(7, 15)), call((5, 3, 7), dst=(7, 3, 5))),
        ("NKW-SAME-DTYPE", "trn2", call(src=(16, 100)) | {"dst": tile((100, 16))}, call()),
        (
            "NKW-BUFFER",
            "trn2",
            call() | {"src": tile((16, 100), "bfloat16", PSUM)},
            call() | {"src": tile((16, 100), "bfloat16")},
        ),
        ("NKW-PARTITION-COUNT", "trn2", call((5, 129)), call((5, 128))),
        ("NKW-DMA-TRANSPOSE-DGE", "trn2", call(dge_mode=DGE.swdge), call(dge_mode=DGE.hwdge)),
        ("NKW-DMA-TRANSPOSE-DGE", "trn2", call(dge_mode="none"), call(dge_mode=DGE.none)),
        ("NKW-DMA-TRANSPOSE-SKIP", "trn2", call(oob_mode=OOB.skip), call(oob_mode=OOB.error)),
        ("NKW-DMA-PRIORITY", "trn2", call(priority=0), call()),
        ("NKW-DMA-PRIORITY", "trn3", call(priority=4), call(priority=3)),
        ("NKW-DMA-TRANSPOSE-HWDGE", "trn1", call(dge_mode=DGE.hwdge), call()),
        (
            "NKW-DMA-TRANSPOSE-HWDGE",
            "trn2",
            call((15, 100), dge_mode=DGE.hwdge),
            call((16, 128), dge_mode=DGE.hwdge),
        ),
        (
            "NKW-DMA-TRANSPOSE-HWDGE",
            "trn2",
            call(dtype="float32", dge_mode=DGE.hwdge),
            call(dge_mode=DGE.hwdge),
        ),
        (
            "NKW-DMA-TRANSPOSE-HWDGE",
            "trn2",
            call((4, 3, 9), dge_mode=DGE.hwdge),
            call((4, 4, 9), dge_mode=DGE.hwdge),
        ),
    ],
)
def test_refuses_and_accepts_the_twin(code, target, bad, good):
    plan(target, NAME, **good)
    refuses(code, target, NAME, **bad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("memory", [HBM, None])
@pytest.mark.parametrize("shape", [(1, 1), (127, 128), (128, 127), (5, 3, 7), (4, 3, 2, 9)])
def test_permutes_dims_and_keeps_bits(dtype, memory, shape):
    data = every_bit_pattern(dtype, shape)
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    wanted = tuple(shape[i] for i in order)
    src = Given(data, memory) if memory else data
    result = execute("trn2", NAME, dst=Fresh(wanted, dtype), src=src)["dst"]
    assert result.shape == wanted
    for index in np.ndindex(wanted):
        source = [0] * len(shape)
        for dim, axis in enumerate(order):
            source[axis] = index[dim]
        assert result[index].tobytes() == data[tuple(source)].tobytes()


def gathered(table, indices, shape, skip=False, target="trn2", fill=7.0):
    """Compute dst after dma_transpose of the rows of `table` that `indices` names, gathered to `shape`."""
    order = {2: (1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    wanted = tuple(shape[i] for i in order)

    def kernel(rows, numbers):
        idx = nl.load(numbers)
        dst = nl.full(wanted, fill, rows.dtype)
        width = int(np.prod(shape[1:]))
        pattern = [[width, shape[0]]]
        for dim in range(1, len(shape)):
            pattern.append([int(np.prod(shape[dim + 1 :])), shape[dim]])
        src = rows.ap(pattern=pattern, vector_offset=idx, indirect_dim=0)
        nisa.dma_transpose(dst=dst, src=src, oob_mode=OOB.skip if skip else OOB.error)
        out = nl.ndarray(wanted, dtype=rows.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=dst)
        return out

    return simulate.launch(kernel, [((table, indices), {})], hardware(target)).outputs[0]


@pytest.mark.parametrize(
    ("index_shape", "rows"), [((16, 1), 16), ((128, 1), 128), ((128, 1), 48), ((128, 3), 288)]
)
def test_gathers_rows_by_the_columns_of_the_index(index_shape, rows):
    table = sample("bfloat16", (200, 24))
    indices = (sample("uint32", index_shape) % 200).astype(np.uint32)
    result = gathered(table, indices, (rows, 24))
    numbers = [indices[r % index_shape[0], r // index_shape[0]] for r in range(rows)]
    assert_same_bits(result, np.stack([table[i] for i in numbers], axis=1))


def test_gathers_blocks_of_four_dims():
    table = sample("float16", (64, 1, 3, 8))
    indices = (sample("uint32", (128, 2)) % 64).astype(np.uint32)
    result = gathered(table, indices, (256, 1, 3, 8))
    for r in range(256):
        assert_same_bits(
            result[:, :, :, r].copy(), table[indices[r % 128, r // 128]].transpose(2, 0, 1).copy()
        )


def test_rows_out_of_range_are_refused_or_left_alone():
    table = sample("bfloat16", (20, 8))
    indices = np.arange(16, dtype=np.uint32)[:, None].copy()
    indices[3] = 20
    with pytest.raises(OutOfBounds, match="index 20 is out of bounds"):
        gathered(table, indices, (16, 8))
    result = gathered(table, indices, (16, 8), skip=True)
    expected = table[:16].T.copy()
    expected[:, 3] = 7.0
    assert_same_bits(result, expected)


def test_gathering_has_limits_of_its_own():
    def attempt(
        code, target="trn2", table=(64, 8), dtype="bfloat16", index=(16, 1), index_dtype="uint32", rows=16
    ):
        src = tile(table, dtype, HBM).ap(
            [[table[1], rows], [1, table[1]]], vector_offset=tile(index, index_dtype)
        )
        arguments = {"dst": tile((table[1], rows), dtype), "src": src}
        if code:
            refuses(code, target, NAME, **arguments)
        else:
            plan(target, NAME, **arguments)

    attempt(None)
    attempt("NKW-DMA-TRANSPOSE-GATHER-CHIP", target="trn1")
    attempt("NKW-DMA-TRANSPOSE-GATHER", dtype="float32")
    attempt("NKW-DMA-TRANSPOSE-GATHER", rows=15)
    attempt("NKW-PARTITION-COUNT", table=(64, 129))
    attempt(None, table=(64, 128))
    attempt("NKW-DMA-TRANSPOSE-INDEX", index_dtype="int32")
    attempt("NKW-DMA-TRANSPOSE-INDEX", rows=32)
    attempt(None, index=(32, 1), rows=32)
    attempt("NKW-DMA-TRANSPOSE-INDEX", index=(24, 1))
    attempt("NKW-DMA-TRANSPOSE-INDEX", index=(64, 2), rows=128)
    attempt(None, index=(128, 2), rows=256)


def test_its_engines_write_at_the_documented_fraction_of_a_copys_rate():
    """Not what descriptors and HBM take, so the whole is less than a copy divided by the fraction."""
    chip = hardware("trn2")
    for memory, fraction in ((HBM, "dma_transpose_hbm_fraction"), (None, "dma_transpose_sbuf_fraction")):
        src = tile((64, 128), "bfloat16", memory) if memory else tile((64, 128), "bfloat16")
        turned = plan("trn2", NAME, dst=tile((128, 64), "bfloat16"), src=src).cost.dma
        size = 64 * 128 * 2
        descriptors = turned.descriptors * chip.dma_descriptor_ns
        written = size / chip.dma_engine_bytes_per_ns / getattr(chip, fraction)
        assert turned.busy_ns == pytest.approx((descriptors + written) / chip.dma_engines, rel=1e-12)
        assert turned.bytes == size
