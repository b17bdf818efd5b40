"""The layout rules of on-chip operands, tried on every tile operand of every instruction."""

from __future__ import annotations

from typing import Any

import pytest

from nkw.errors import RuleViolation, get_sentence
from simulate.hardware import hardware
from simulate.isa import plan_for, rules
from simulate.memory import Dynamic, MemoryRegion, NkiTensor
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import launch
from tests.isa.tiles import (
    HBM,
    HEALTHY,
    PARTITIONS,
    PSUM,
    SBUF,
    TARGETS,
    TILE_OPERANDS,
    healthy,
    like,
    plan,
    refuses,
    tile,
)

# Operands that may be a number as well, or None.
_OR_A_NUMBER = {
    *((name, operand) for name in ("activation", "activation_reduce") for operand in ("bias", "scale")),
    ("scalar_tensor_tensor", "operand0"),
    ("tensor_scalar", "operand0"),
    ("tensor_scalar", "operand1"),
}
# The operands that the reference lists for tensor indirection, of the instructions tried here (trn2).
INDIRECT = {
    *((name, operand) for name in ("activation", "activation_reduce") for operand in ("dst", "data")),
    *(("nc_matmul", operand) for operand in ("dst", "stationary", "moving")),
    *(("tensor_copy", operand) for operand in ("dst", "src")),
    *(("tensor_reduce", operand) for operand in ("dst", "data")),
    *(("tensor_scalar", operand) for operand in ("dst", "data")),
    *(("tensor_tensor", operand) for operand in ("dst", "data1")),
}
_PACKED_CODES = {
    "nc_matmul": {"stationary": "NKW-MATMUL-DTYPE", "moving": "NKW-MATMUL-DTYPE"},
    "nc_find_index8": {"dst": "NKW-DTYPE-ALLOWED"},
    "nc_match_replace8": {"dst_idx": "NKW-DTYPE-ALLOWED"},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("name", HEALTHY)
def test_accepts_a_healthy_call(target: str, partitions: int, name: str) -> None:
    made = plan(target, name, **HEALTHY[name](partitions))
    assert made.writes and made.cost.interval_cycles > 0 and made.cost.latency_cycles > 0


FEWER_DIMS = {
    ("max8", "dst"),
    ("max8", "src"),
    ("nc_find_index8", "data"),
    ("nc_find_index8", "dst"),
    ("nc_find_index8", "vals"),
    ("tensor_reduce", "data"),
}
"""Operands that rules of their instructions bind to fewer than five free dims."""


@pytest.mark.parametrize(("name", "operand"), TILE_OPERANDS)
def test_refuses_an_operand_of_129_partitions(name: str, operand: str) -> None:
    value = healthy(name, 128)[operand]
    wide = like(value, shape=(129, *value.shape[1:]))
    refuses("NKW-PARTITION-COUNT", "trn2", name, **healthy(name, 128, **{operand: wide}))


@pytest.mark.parametrize(("name", "operand"), TILE_OPERANDS)
def test_refuses_an_operand_between_quadrants(name: str, operand: str) -> None:
    value = healthy(name)[operand]
    refuses(
        "NKW-PARTITION-START", "trn2", name, **healthy(name, **{operand: like(value, start_partition=16)})
    )
    plan("trn2", name, **healthy(name, **{operand: like(value, start_partition=32)}))


@pytest.mark.parametrize(("name", "operand"), TILE_OPERANDS)
def test_refuses_an_operand_in_hbm(name: str, operand: str) -> None:
    value = healthy(name)[operand]
    refuses("NKW-BUFFER", "trn2", name, **healthy(name, **{operand: like(value, buffer=HBM)}))


@pytest.mark.parametrize(("name", "operand"), TILE_OPERANDS)
def test_refuses_an_operand_of_six_dims(name: str, operand: str) -> None:
    value = healthy(name)[operand]
    p, free = value.shape[0], value.free_size
    six = like(value, shape=(p, 1, 1, 1, 1, free))
    refuses("NKW-DIMS", "trn2", name, **healthy(name, **{operand: six}))
    five = like(value, shape=(p, 1, 1, 1, free))
    if (name, operand) not in FEWER_DIMS:
        plan("trn2", name, **healthy(name, **{operand: five}))


@pytest.mark.parametrize(("name", "operand"), TILE_OPERANDS)
def test_takes_one_run_time_offset_and_no_row_numbers(name: str, operand: str) -> None:
    value = healthy(name)[operand]

    def read_at_run_time(count: int, per_partition: bool, group: int = 0) -> dict[str, Any]:
        dynamic = Dynamic(tile((count, 1), "int32"), 1, 1, per_partition, group)
        moved = NkiTensor.from_storage(value.shape, value.dtype, value.storage, value.strides, 0, dynamic)
        return healthy(name, **{operand: moved})

    plan("trn2", name, **read_at_run_time(1, False))
    refuses("NKW-INDIRECT", "trn2", name, **read_at_run_time(value.shape[0], True))
    code = "NKW-INDIRECT-CHIP" if (name, operand) in INDIRECT else "NKW-INDIRECT"
    refuses(code, "trn2", name, **read_at_run_time(value.shape[0], True, 16))


@pytest.mark.parametrize(("name", "operand"), [o for o in TILE_OPERANDS if o not in _OR_A_NUMBER])
def test_refuses_what_is_no_tensor(name: str, operand: str) -> None:
    error = refuses("NKW-OPERAND", "trn2", name, **healthy(name, **{operand: 3}))
    assert f"{operand} is int 3" in str(error)


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        o
        for o in TILE_OPERANDS
        if o not in (*_OR_A_NUMBER, ("memset", "dst"), ("nc_matmul", "dst")) and o[1] != "reduce_res"
    ],
)
def test_refuses_packed_elements_where_values_count(name: str, operand: str) -> None:
    packed = like(healthy(name)[operand], dtype="float8_e4m3fn_x4")
    code = _PACKED_CODES.get(name, {}).get(operand, "NKW-PACKED-DTYPE")
    if name == "nc_transpose":
        code = "NKW-PACKED-DTYPE" if operand == "data" else "NKW-SAME-DTYPE"
    refuses(code, "trn3", name, **healthy(name, **{operand: packed}))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("partitions", "starts"),
    [
        (1, (0, 32, 64, 96)),
        (31, (0, 32, 64, 96)),
        (32, (0, 32, 64, 96)),
        (33, (0, 64)),
        (64, (0, 64)),
        (65, (0,)),
        (127, (0,)),
        (128, (0,)),
    ],
)
def test_start_partitions_by_the_number_of_partitions(
    target: str, partitions: int, starts: tuple[int, ...]
) -> None:
    chip = hardware(target)
    for start in range(129 - partitions):
        operand = tile((partitions, 4), start_partition=start)
        if start in starts:
            rules.starts_on_quadrant(chip, "dst", operand)
        else:
            with pytest.raises(RuleViolation, match="NKW-PARTITION-START"):
                rules.starts_on_quadrant(chip, "dst", operand)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("buffer", "limit"), [(SBUF, 65536), (PSUM, 4096)])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_free_size_has_a_limit(target: str, buffer: MemoryRegion, limit: int, beyond: int) -> None:
    shape = (2, 1, limit - 1) if beyond < 0 else (2, 2, limit // 2) if beyond == 0 else (2, limit + 1)
    arguments = {"dst": tile(shape, "uint8", buffer), "value": 1}
    if beyond <= 0:
        plan(target, "memset", **arguments)
    else:
        refuses("NKW-FREE-SIZE", target, "memset", **arguments)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("columns", "times", "accepted"),
    [(512, 8, True), (512, 9, True), (4096, 15, True), (4096, 16, True), (4096, 17, False), (4097, 2, False)],
)
def test_repetitions_take_no_psum(target: str, columns: int, times: int, accepted: bool) -> None:
    """A view that repeats its elements counts them once against PSUM, and each time against the 64K of any operand."""
    repeated = tile((2, 1, columns), "uint8", PSUM).broadcast(1, times)
    arguments = {"dst": tile((2, times, columns), "uint8"), "src": repeated}
    if accepted:
        plan(target, "tensor_copy", **arguments)
    else:
        refuses("NKW-FREE-SIZE", target, "tensor_copy", **arguments)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("shape", "accepted"),
    [
        ((2, 65534), True),
        ((2, 65535), True),
        ((2, 65536), False),
        ((2, 2, 32768), True),
        ((2, 1, 65536), False),
    ],
)
def test_one_free_dim_has_at_most_65535_elements(target: str, shape: tuple[int, ...], accepted: bool) -> None:
    arguments = {"dst": tile(shape, "uint8"), "value": 1}
    if accepted:
        plan(target, "memset", **arguments)
    else:
        refuses("NKW-DIM-SIZE", target, "memset", **arguments)


@pytest.mark.parametrize("stride", [32766, 32767, 32768, -32767, -32768])
@pytest.mark.parametrize(("name", "operand"), TILE_OPERANDS)
def test_steps_of_a_free_dim_are_at_most_32767_elements(name: str, operand: str, stride: int) -> None:
    value = healthy(name)[operand]
    shape, free = value.shape, value.free_size
    row = free * abs(stride)
    allocation = tile((shape[0], row), str(value.dtype), value.buffer)
    first = row - 1 if stride < 0 else 0
    inner = tuple(stride * size for size in NkiTensor(shape, value.dtype, value.storage).strides[1:])
    strided = NkiTensor.from_storage(shape, value.dtype, allocation.storage, (row, *inner), first)
    if free == 1 or abs(stride) <= 32767:
        rules.strides_within_limit(hardware("trn2"), operand, strided)
    else:
        refuses("NKW-STRIDE", "trn2", name, **healthy(name, **{operand: strided}))


@pytest.mark.parametrize(("rows", "accepted"), [(32767, True), (32768, False)])
def test_rows_of_a_block_are_at_most_a_stride_apart(rows: int, accepted: bool) -> None:
    allocation = tile((2, 3, rows), "uint8")
    block = NkiTensor.from_storage((2, 3, 8), allocation.dtype, allocation.storage, allocation.strides, 0)
    alone = NkiTensor.from_storage((2, 1, 8), allocation.dtype, allocation.storage, allocation.strides, 0)
    rules.strides_within_limit(hardware("trn2"), "dst", allocation)  # its rows follow one another
    plan("trn2", "memset", dst=alone, value=1)
    if accepted:
        plan("trn2", "memset", dst=block, value=1)
    else:
        refuses("NKW-STRIDE", "trn2", "memset", dst=block, value=1)


def test_a_dma_is_bound_by_no_limit_of_an_access_pattern() -> None:
    allocation = tile((2, 3, 40000), "uint8")
    block = NkiTensor.from_storage((2, 3, 8), allocation.dtype, allocation.storage, allocation.strides, 0)
    plan("trn2", "dma_copy", dst=tile((2, 3, 8), "uint8"), src=block)
    plan("trn2", "dma_copy", dst=tile((2, 70000), "uint8"), src=tile((2, 70000), "uint8", HBM))


def stored(result: NkiTensor) -> None:
    """Bring a result to HBM, where every byte has to be defined."""
    if result.buffer is PSUM:
        tile = nl.ndarray(result.shape, result.dtype)
        nisa.tensor_copy(dst=tile, src=result)
        result = tile
    if result.buffer is SBUF:
        nisa.dma_copy(dst=nl.ndarray(result.shape, result.dtype, nl.shared_hbm), src=result)


@pytest.mark.parametrize("name", HEALTHY)
def test_refuses_bytes_that_were_never_written(name: str) -> None:
    chip = hardware("trn2")
    arguments = healthy(name)
    planned = plan("trn2", name, **arguments)
    read = [key for key, value in arguments.items() if any(value is r for r in planned.reads)]
    written_to = [key for key, value in arguments.items() if any(value is w for w in planned.writes)]

    def run(unwritten: str | None) -> None:
        def kernel() -> None:
            made = {}
            for key, value in arguments.items():
                made[key] = value
                if isinstance(value, NkiTensor):
                    made[key] = nl.ndarray(value.shape, value.dtype, value.buffer)
                    # All but the last partition: a part that is missing is enough.
                    written = made[key] if key != unwritten else made[key][0 : value.shape[0] - 1]
                    if key in read:
                        nisa.memset(dst=written, value=1)
            getattr(nisa, name)(**made)
            for key in written_to:
                stored(made[key])

        launch(kernel, [((), {})], chip)

    run(None)
    for key in read:
        with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
            run(key)


def test_the_message_of_a_broken_rule_says_what_where_and_what_would_work() -> None:
    error = refuses(
        "NKW-PARTITION-COUNT",
        "trn2",
        "tensor_tensor",
        dst=tile((129, 4)),
        data1=tile((128, 4)),
        data2=tile((128, 4), "bfloat16", PSUM),
        op=nl.add,
    )
    assert str(error) == (
        "[NKW-PARTITION-COUNT] tensor_tensor: The partition dimension of a tile has at most as many partitions as the "
        "chip's SBUF.\n"
        "  seen:  dst partition dimension 129 exceeds maximum 128\n"
        "  limit: 128 partitions on trn2\n"
        "  dst = (129, 4) float32 in sbuf\n"
        "  data1 = (128, 4) float32 in sbuf\n"
        "  data2 = (128, 4) bfloat16 in psum\n"
        "  op = add\n"
        "  try:   loop over tiles of at most 128 rows"
    )
    assert get_sentence(rules.partitions_within_limit) in str(error)
    assert isinstance(error, AssertionError)


@pytest.mark.parametrize("name", HEALTHY)
def test_refuses_a_call_that_does_not_fit_the_signature(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: .*nonsense.*its parameters are .*name$"):
        plan_for(name, hardware("trn2"), **healthy(name), nonsense=1)
    with pytest.raises(TypeError, match=f"{name}: missing"):
        plan_for(name, hardware("trn2"))
