"""Arguments that the reference does not document: refused on the chip, a warning in the vendor's simulator.

Every kernel makes the refused call with `wrong` and its accepted twin without; both compute the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.check import Severity, examine
from simulate.check.findings import fails_a_check
from simulate.isa import book
from simulate.level import UNDOCUMENTED, WARNED, Rules
from simulate.nki import collectives as ncc
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run.launcher import ToleratedRule
from simulate.world import World
from tests.isa.tiles import PSUM, TARGETS, plan, tile

X = np.arange(128 * 8, dtype=np.float32).reshape(128, 8)
Kernel = Callable[[Any, bool], Any]


def _stored(made):
    out = nl.ndarray(made.shape, made.dtype, buffer=nl.shared_hbm)
    if made.buffer == nl.psum:
        kept = nl.ndarray(made.shape, made.dtype)
        nisa.tensor_copy(dst=kept, src=made)
        made = kept
    nisa.dma_copy(dst=out, src=made)
    return out


def flag(x, wrong):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.subtract, operand0=1.0, reverse0="yes" if wrong else True)
    return _stored(tile)


def name(x, wrong):
    tile = nl.load(x)
    nisa.tensor_copy(dst=tile, src=tile, name=7 if wrong else "seven")
    return _stored(tile)


def negative_axis(x, wrong):
    sums = nl.ndarray((128, 1), nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=nl.load(x), axis=-1 if wrong else 1)
    return _stored(sums)


def narrow_column(x, wrong):
    tile, column = nl.load(x), nl.ndarray((128, 1), nl.bfloat16 if wrong else nl.float32)
    nisa.memset(dst=column, value=2.0)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=column)
    return _stored(tile)


def indirect_address(x, wrong):
    tile = nl.ndarray((128, 8), nl.int32 if wrong else nl.float32)
    nisa.tensor_copy(dst=tile, src=nl.load(x))
    index = nl.ndarray((128, 1), nl.uint16)
    nisa.iota(dst=index, pattern=[[0, 1]], offset=3)
    taken = nl.ndarray((128, 16), tile.dtype)
    nisa.tensor_scalar(dst=taken, data=tile.indirect(index, 16), op0=nl.add, operand0=1.0)
    out = nl.ndarray((128, 16), nl.float32)
    nisa.tensor_copy(dst=out, src=taken)
    return _stored(out)


def perf_mode(x, wrong):
    pairs = nl.ndarray((128, 2, 8), nl.float8_e4m3)
    nisa.memset(dst=pairs, value=1.0)
    sums = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
    mode = "double_row" if wrong else nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(dst=sums, stationary=pairs, moving=pairs, perf_mode=mode)
    return _stored(sums)


def onezero(x, wrong):
    moving = nl.load(x)
    sums = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=moving, moving=moving, is_moving_onezero=wrong)
    return _stored(sums)


def random_engine(x, wrong):
    words = nl.ndarray((128, 8), nl.uint32)
    nisa.rng(dst=words, engine=nisa.engine.unknown if wrong else nisa.engine.vector)
    return _stored(words)


def eight_in_two_dims(x, wrong):
    largest = nl.ndarray((128, 2, 4) if wrong else (128, 8), nl.float32)
    nisa.max8(dst=largest, src=nl.load(x))
    return _stored(largest.reshape((128, 8)))


def values_in_four_dims(x, wrong):
    tile, indices = nl.load(x), nl.ndarray((128, 8), nl.uint32)
    values = tile.reshape((128, 2, 2, 2)) if wrong else tile
    nisa.nc_find_index8(dst=indices, data=tile, vals=values)
    return _stored(indices)


def barrier_on_a_tile(x, wrong):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    half = 64 * nl.program_id(0)
    nisa.dma_copy(dst=out[half : half + 64], src=tile[half : half + 64])
    nisa.core_barrier(data=tile if wrong else out, cores=(0, 1))
    return out


def address_at_run_time(x, wrong):
    table = nl.ndarray((2, 128, 8), nl.float32, buffer=nl.private_hbm)
    for number in range(2):
        nisa.dma_copy(dst=table[number], src=x)
    total = table[1]
    if wrong:
        register = nisa.register_alloc(1)
        total = table.ap([[8, 128], [1, 8]], scalar_offset=register, indirect_dim=0)
    nisa.dma_compute(dst=total, srcs=[total, nl.load(x)], reduce_op=nl.add)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=table[1])
    return out


def register_of_a_tensor(x, wrong):
    one = nl.ndarray((1, 1), nl.int32)
    nisa.memset(dst=one, value=5)
    if wrong:
        register = nisa.register_alloc(one)
    else:
        register = nisa.register_alloc()
        nisa.register_load(register, one)
    nisa.register_store(one, register)
    return _stored(one)


def register_of_three_dims(x, wrong):
    one = nl.ndarray((1, 1, 1) if wrong else (1, 1), nl.int32)
    nisa.memset(dst=one, value=5)
    nisa.register_load(nisa.register_alloc(), one)
    return _stored(one.reshape((1, 1)))


def fifth_channel(x, wrong):
    ring = ncc.ReplicaGroup([[0]])
    rank = ncc.collective_permute_implicit_current_processing_rank_id(0, ring, channel_id=4 if wrong else 3)
    one = nl.ndarray((1, 1), nl.int32)
    nisa.register_store(one, rank)
    return _stored(one)


def placed_chunks(x, wrong):
    rows = 4 if wrong else 3
    src, dst = (nl.ndarray((8,), nl.float32, buffer=nl.private_hbm) for _ in range(2))
    nisa.dma_copy(dst=src, src=x[0])
    nisa.dma_copy(dst=dst, src=x[0])
    metadata = nl.ndarray((rows, 1), nl.uint32, buffer=nl.private_hbm)
    numbers = nl.ndarray((1, rows), nl.uint32)
    nisa.memset(dst=numbers, value=0)
    nisa.memset(dst=numbers[:, 0:1], value=8)
    nisa.dma_copy(dst=metadata, src=numbers.reshape((1, rows)))
    ncc.all_to_all_v([src], [dst], ncc.ReplicaGroup([[0]]), metadata, has_rdispls=wrong)
    out = nl.ndarray((8,), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=dst)
    return out


def engine_without_hwdge(x, wrong):
    tile = nl.ndarray(x.shape, x.dtype)
    if wrong:
        nisa.dma_copy(dst=tile, src=x, engine=nisa.engine.scalar)
    else:
        nisa.dma_copy(dst=tile, src=x, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)
    return _stored(tile)


def prepared_rows(x, wrong):
    numbers = nl.ndarray((128, 1), nl.int32)
    nisa.iota(dst=numbers, pattern=[[0, 1]], offset=3)
    tile = nl.ndarray(x.shape, x.dtype)
    rows = x.ap(pattern=[[8, 128], [1, 8]], vector_offset=numbers)
    nisa.dma_copy(dst=tile, src=rows, dge_mode=nisa.dge_mode.none if wrong else nisa.dge_mode.swdge)
    return _stored(tile)


def prepared_transpose(x, wrong):
    tile = nl.ndarray((8, 128), x.dtype)
    mode = nisa.dge_mode.none if wrong else nisa.dge_mode.unknown
    nisa.dma_transpose(dst=tile, src=x, dge_mode=mode)
    return _stored(tile)


def load_of_a_tile(x, wrong):
    tile = nl.load(x)
    return _stored(nl.load(tile) if wrong else nl.copy(tile))


def store_of_hbm(x, wrong):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, x if wrong else nl.load(x))
    return out


def transposing_load_of_a_tile(x, wrong):
    return _stored(nl.load_transpose2d(nl.load(x) if wrong else x))


def chosen_number(x, wrong):
    tile = nl.load(x)
    return _stored(nl.where(tile, tile, 7.0 if wrong else nl.full(x.shape, 7.0, nl.float32)))


def integer_condition(x, wrong):
    tile = nl.load(x)
    return _stored(nl.where(nl.copy(tile, nl.int32) if wrong else tile, tile, nl.zeros(x.shape, nl.float32)))


def wide_matmul(x, wrong):
    y = nl.full((128, 513), 0.5, nl.float32)
    if wrong:
        return _stored(nl.matmul(nl.load(x), y, transpose_x=True))
    out = nl.ndarray((8, 513), nl.float32)
    for columns in (nl.ds(0, 512), nl.ds(512, 1)):
        nisa.tensor_copy(dst=out[:, columns], src=nl.matmul(nl.load(x), y[:, columns], transpose_x=True))
    return _stored(out)


def transposed_by_a_number(x, wrong):
    tile = nl.load(x)
    return _stored(nl.matmul(tile, tile, transpose_x=1 if wrong else True))


def printed_sums(x, wrong):
    tile = nl.load(x)
    sums = nl.matmul(tile, tile, transpose_x=True)
    nl.device_print("sums", sums if wrong else nl.copy(sums))
    return _stored(sums)


def printed_under_a_number(x, wrong):
    tile = nl.load(x)
    nl.device_print(7 if wrong else "7", tile)
    return _stored(tile)


def printed_number(x, wrong):
    tile = nl.load(x)
    nl.device_print("seven", 7 if wrong else tile)
    return _stored(tile)


def constant_of_booleans(x, wrong):
    ones = np.ones((8, 8), bool)
    return _stored(nl.load(nl.shared_constant(ones if wrong else ones.astype(np.uint8)), dtype=nl.uint8))


def constant_of_each_core(x, wrong):
    core = nl.program_id(0)
    constant = nl.shared_constant(np.full((8, 8), core if wrong else 0, np.float32))
    out = nl.ndarray((16, 8), nl.float32, buffer=nl.shared_hbm)
    rows = nl.add(nl.load(constant), 0.0 if wrong else float(core))
    nisa.dma_copy(dst=out[nl.ds(8 * core, 8)], src=rows)
    return out


def placed_in_hbm(x, wrong):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, address=(0, 0) if wrong else None)
    nisa.dma_copy(dst=out, src=nl.load(x))
    return out


def allocation_named_by_a_number(x, wrong):
    tile = nl.ndarray(x.shape, x.dtype, name=7 if wrong else "seven")
    nisa.dma_copy(dst=tile, src=x)
    return _stored(tile)


TWO_CORES = (barrier_on_a_tile, constant_of_each_core)
CASES: list[tuple[str, Kernel, str]] = [
    ("NKW-ADDRESS-HBM", placed_in_hbm, "trn2"),
    ("NKW-CONSTANT-DTYPE", constant_of_booleans, "trn2"),
    ("NKW-CONSTANT-SHARED", constant_of_each_core, "trn2"),
    ("NKW-DEVICE-PRINT", printed_number, "trn2"),
    ("NKW-DEVICE-PRINT", printed_sums, "trn2"),
    ("NKW-DEVICE-PRINT", printed_under_a_number, "trn2"),
    ("NKW-DMA-ENGINE", engine_without_hwdge, "trn2"),
    ("NKW-DMA-ROWS", prepared_rows, "trn2"),
    ("NKW-DMA-TRANSPOSE-NONE", prepared_transpose, "trn2"),
    ("NKW-BARRIER-DATA", barrier_on_a_tile, "trn2"),
    ("NKW-DMA-COMPUTE-ADDRESS", address_at_run_time, "trn2"),
    ("NKW-FLAG", flag, "trn2"),
    ("NKW-FLAG", transposed_by_a_number, "trn2"),
    ("NKW-MATMUL-ONEZERO", onezero, "trn2"),
    ("NKW-MATMUL-PERF-MODE-NAME", perf_mode, "trn2"),
    ("NKW-METADATA-DISPLACEMENTS", placed_chunks, "trn2"),
    ("NKW-NAME-TEXT", allocation_named_by_a_number, "trn2"),
    ("NKW-NAME-TEXT", name, "trn2"),
    ("NKW-NL-MATMUL-COLUMNS", wide_matmul, "trn3"),
    ("NKW-NL-MEMORY", load_of_a_tile, "trn2"),
    ("NKW-NL-MEMORY", store_of_hbm, "trn2"),
    ("NKW-NL-MEMORY", transposing_load_of_a_tile, "trn2"),
    ("NKW-RANDOM-ENGINE", random_engine, "trn2"),
    ("NKW-REDUCE-AXIS-NEGATIVE", negative_axis, "trn2"),
    ("NKW-REGISTER-INITIAL", register_of_a_tensor, "trn2"),
    ("NKW-REGISTER-SHAPE", register_of_three_dims, "trn2"),
    ("NKW-RING-CHANNEL", fifth_channel, "trn2"),
    ("NKW-SEARCH-MATRIX", eight_in_two_dims, "trn2"),
    ("NKW-SEARCH-VALUES", values_in_four_dims, "trn2"),
    ("NKW-TENSOR-SCALAR-COLUMN", narrow_column, "trn2"),
    ("NKW-TENSOR-SCALAR-INDIRECT", indirect_address, "trn3"),
    ("NKW-WHERE-TILES", chosen_number, "trn2"),
    ("NKW-WHERE-TILES", integer_condition, "trn2"),
]
IDS = [f"{code}-{kernel.__name__}" for code, kernel, _ in CASES]


def _launch(kernel: Kernel, target: str, wrong: bool, rules: str):
    cores = 2 if kernel in TWO_CORES else 1
    world = World(target, logical_core_size=cores, rules=rules)
    return world.launch(kernel, [((X.copy(), wrong), {})])


@pytest.mark.parametrize(("code", "kernel", "target"), CASES, ids=IDS)
def test_an_undocumented_argument_is_refused_on_the_chip_only(code: str, kernel: Kernel, target: str) -> None:
    clean = _launch(kernel, target, False, "chip")
    assert clean.tolerated == ()
    if code in UNDOCUMENTED:
        with pytest.raises(RuleViolation) as refused:
            _launch(kernel, target, True, "chip")
        assert refused.value.code == code
        assert refused.value.where is not None and "test_undocumented.py" in refused.value.where.file
    with pytest.warns(ToleratedRule, match=rf"^\[{code}\]"):
        tolerated = _launch(kernel, target, True, "simulator")
    assert [error.code for error in tolerated.tolerated] == [code]
    assert tolerated.tolerated[0].instruction
    np.testing.assert_array_equal(tolerated.outputs[0], clean.outputs[0])


@pytest.mark.parametrize(("code", "kernel", "target"), [case for case in CASES if case[0] in WARNED])
def test_a_sentence_that_public_kernels_break_is_a_warning_on_the_chip(
    code: str, kernel: Kernel, target: str
) -> None:
    with pytest.warns(ToleratedRule, match="public kernels that compile break this documented sentence too"):
        launched = _launch(kernel, target, True, "chip")
    assert [error.code for error in launched.tolerated] == [code]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = [
            finding
            for finding in examine(lambda: _launch(kernel, target, True, "chip"))
            if finding.code == code
        ]
    assert [finding.severity for finding in findings] == [Severity.warning] and not fails_a_check(
        findings[0], False
    )


def test_every_rule_about_undocumented_arguments_is_tried() -> None:
    assert {code for code, _, _ in CASES} == UNDOCUMENTED | WARNED


@pytest.mark.parametrize("target", TARGETS)
def test_displacements_exist_where_the_chip_has_them(target: str) -> None:
    has_switch = target == "trn3"
    world = World(target, rules=Rules.chip)
    if has_switch:
        assert world.launch(placed_chunks, [((X.copy(), True), {})]).tolerated == ()
        return
    with pytest.raises(RuleViolation, match="NKW-METADATA-DISPLACEMENTS"):
        world.launch(placed_chunks, [((X.copy(), True), {})])


@pytest.mark.parametrize(("axis", "refused"), [(0 - 1, True), ((-1,), True), (1, False), ((1,), False)])
def test_axes_are_counted_from_the_front(axis: Any, refused: bool) -> None:
    made = book.plan(
        book.INSTRUCTIONS["tensor_reduce"],
        (World("trn2").hardware,),
        (),
        {"dst": tile((128, 1)), "op": nl.add, "data": tile((128, 8)), "axis": axis},
    )
    assert [rule.code for rule in made.undocumented] == ["NKW-REDUCE-AXIS-NEGATIVE"] * refused


@pytest.mark.parametrize("value", [True, False, np.True_, 0, 1, None, "False"])
def test_a_flag_is_true_or_false(value: Any) -> None:
    def planned():
        operands = {"dst": tile((8, 4)), "src": tile((8, 4)), "predicate": tile((8, 4), "uint8")}
        return plan("trn2", "tensor_copy_predicated", **operands, reverse_pred=value)

    if isinstance(value, (bool, np.bool_)):
        assert planned().undocumented == ()
    else:
        with pytest.raises(RuleViolation, match="NKW-FLAG"):
            planned()


@pytest.mark.parametrize("hint", ["is_stationary_onezero", "is_moving_onezero"])
def test_a_hint_holds_for_ones_and_zeros_of_every_dtype(hint: str) -> None:
    operands = {"dst": tile((8, 8), buffer=PSUM), "stationary": tile((4, 8)), "moving": tile((4, 8))}
    made = plan("trn2", "nc_matmul", **operands, **{hint: True})
    assert made.value_rule is not None
    masks, halves = np.eye(4, 8, dtype=np.float32), np.full((4, 8), 0.5, np.float32)
    made.value_rule(masks, masks)
    operand_values = (halves, masks) if "stationary" in hint else (masks, halves)
    made.value_rule(*operand_values[::-1])
    with pytest.raises(RuleViolation, match="NKW-MATMUL-ONEZERO"):
        made.value_rule(*operand_values)
