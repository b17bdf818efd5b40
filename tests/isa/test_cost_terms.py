"""Laws of a cost's terms: they add up to its times, and they name every number that decides them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from itertools import product

import pytest

from nkw.errors import Unsupported
from simulate.calibrate.numbers import change_record, list_parameters
from simulate.hardware import Hardware, derived, hardware
from simulate.isa import costs, dma_costs, plan_for
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost, Phase
from tests.deep import deep_except
from tests.isa.tiles import HEALTHY, TARGETS, tile

RELATIVE = 1e-12  # sums of a few float64 numbers in two orders
TIMES = (
    "_ns",
    "_ghz",
    "_cycles",
    "_cycles_per_element",
    "_per_cycle",
    "_cycles_per_row",
    "_fraction",
    "_gb_per_s",
)
OTHER_TIMES = (
    "dma_engine_bytes_per_ns dma_cast_bytes_per_ns dma_piece_bytes_per_ns vector_reduce_16bit "
    "vector_memset_zero_16bit vector_fast_mode_16bit vector_fast_mode_16bit_strided vector_fast_mode_fp32 "
    "vector_tensor_tensor_16bit"
).split()
Made = Callable[[Hardware], tuple[Engine, Cost]]


def _instruction(name: str) -> Made:
    def made(chip: Hardware) -> tuple[Engine, Cost]:
        plan = plan_for(name, chip, **HEALTHY[name](128))
        return plan.engine, plan.cost

    return made


def _dma(mode: DgeMode, **more: object) -> Made:
    arguments = {"total_bytes": 1 << 16, "piece_bytes": 512, "load": True, **more}
    return lambda chip: (Engine.gpsimd, dma_costs.dma(chip, Engine.gpsimd, mode, **arguments))  # type: ignore[arg-type]


def _copy(dtype: str, columns: int, step: int = 1) -> Made:
    def made(chip: Hardware) -> tuple[Engine, Cost]:
        src = tile((128, columns * step), dtype)[:, ::step]
        return Engine.vector, costs.copied(chip, Engine.vector, tile((128, columns), dtype), src)

    return made


CASES: dict[str, Made] = {
    **{name: _instruction(name) for name in HEALTHY},
    **{
        f"vector {n:g}": lambda chip, n=n: (Engine.vector, costs.vector(chip, n))
        for n in (1.0, 64.0, 65.0, 512.0)
    },
    **{
        f"vector {n} accumulates": lambda chip, n=n: (Engine.vector, costs.vector(chip, n, accumulates=True))
        for n in (1, 512)
    },
    **{
        f"scalar {n} {table} {adds} {psum}": lambda chip, a=(n, table, adds, psum): (
            Engine.scalar,
            costs.scalar(chip, *a),
        )
        for n in (1, 512)
        for table in ("copy", "exp")
        for adds in (False, True)
        for psum in (False, True)
    },
    **{
        f"matmul {k}x{n} {fp32}": lambda chip, a=(k, n, fp32): (
            Engine.tensor,
            costs.matmul(chip, a[0], 128, *a[1:]),
        )
        for k in (1, 128)
        for n in (1, 64, 512)
        for fp32 in (False, True)
    },
    **{
        f"copy {dtype} {step}": _copy(dtype, 512, step)
        for dtype in ("bfloat16", "float32")
        for step in (1, 2)
    },
    "bits of words": lambda chip: (
        Engine.vector,
        costs.copied(chip, Engine.vector, tile((128, 512), "int32"), tile((128, 512), "int32"), bitvec=True),
    ),
    "topk": lambda chip: (Engine.gpsimd, costs.largest(chip, 4096, 256)),
    "dma none": _dma(DgeMode.none),
    "dma store": _dma(DgeMode.none, load=False),
    "dma cast": _dma(DgeMode.swdge, casts=True),
    "dma cast of short pieces": _dma(DgeMode.swdge, piece_bytes=16, casts=True),
    "dma of short pieces": _dma(DgeMode.none, piece_bytes=16),
    "dma of pieces apart": _dma(DgeMode.none, piece_bytes=256, apart=True),
    "dma of whole descriptors": _dma(DgeMode.none, piece_bytes=4096),
    "dma hwdge, many": _dma(DgeMode.hwdge, piece_bytes=32),
    "dma rows": _dma(DgeMode.swdge, piece_bytes=4, by_row=True, at_run_time=True),
    "dma found": _dma(DgeMode.swdge, total_bytes=4, at_run_time=True),
    "dma hwdge": _dma(DgeMode.hwdge, piece_bytes=64),
    "dma of HBM": _dma(DgeMode.none, total_bytes=1 << 24, piece_bytes=4096, hbm_bytes=2 << 24),
    "dma transpose": _dma(DgeMode.none, result_bytes=1 << 16, fraction="dma_transpose_hbm_fraction"),
    "dma transpose on chip": _dma(
        DgeMode.none, hbm_bytes=0, result_bytes=1 << 16, fraction="dma_transpose_sbuf_fraction"
    ),
    "dma compute": _dma(
        DgeMode.none, total_bytes=1 << 24, result_bytes=1 << 23, fraction="dma_compute_fraction"
    ),
    "dma compute of many sources": _dma(
        DgeMode.none, total_bytes=1 << 20, hbm_bytes=0, result_bytes=1 << 10, fraction="dma_compute_fraction"
    ),
    "sendrecv": lambda chip: (Engine.sync, dma_costs.exchanged(chip, 1 << 16, 512, False)),
    "sendrecv by GpSimd": lambda chip: (Engine.gpsimd, dma_costs.exchanged(chip, 1 << 16, 512, True)),
    "barrier": lambda chip: (
        Engine.vector,
        costs.fixed(chip, Engine.vector, "core_barrier_ns", rendezvous=True),
    ),
    "register load": lambda chip: (Engine.sync, costs.fixed(chip, Engine.sync, "register_load_hbm_ns")),
    **{
        f"collective of {ranks}, {size} bytes, {hops:g}": lambda chip, a=(ranks, size, hops): (
            Engine.sync,
            dma_costs.collective(chip, *a),
        )
        for ranks in (1, 2, 8, 32)
        for size in (8, 1 << 20, 1 << 28)
        for hops in (0.5, 1.0)
    },
}


def _on(chip: Hardware, case: str) -> tuple[Engine, Cost]:
    return CASES[case](chip)


def _sum(cost: Cost, *phases: Phase) -> float:
    return sum(term.ns for term in cost.terms if term.phase in phases)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_terms_add_up_to_the_times_of_the_cost(case: str, target: str) -> None:
    chip = hardware(target)
    engine, cost = _on(chip, case)
    clock = costs.clock_ghz(chip, engine)
    interval, latency = cost.interval_cycles / clock, cost.latency_cycles / clock
    assert _sum(cost, Phase.issue) == pytest.approx(interval, rel=RELATIVE)
    assert _sum(cost, *Phase) == pytest.approx(max(latency, interval), rel=RELATIVE)
    if cost.dma is not None:
        assert _sum(cost, Phase.issue) == pytest.approx(
            cost.dma.trigger_ns + cost.dma.gpsimd_ns, rel=RELATIVE
        )
        assert _sum(cost, Phase.first_byte) == pytest.approx(cost.dma.first_byte_ns, rel=RELATIVE)
        assert _sum(cost, Phase.data) == pytest.approx(cost.dma.transfer_ns, rel=RELATIVE)
    assert not {term.phase for term in cost.terms} & {Phase.table_load, Phase.semaphore}


@pytest.mark.parametrize(("case", "target"), deep_except(product(CASES, TARGETS), 10))
def test_terms_name_every_number_that_changes_a_time(case: str, target: str) -> None:
    """Each time and rate of the record is changed by a thousandth, both ways; what that changes must be named.

    The numbers of a collective are tables by ranks: all of a table are changed together.
    """
    chip = hardware(target)
    _, cost = _on(chip, case)
    named = {number for term in cost.terms for number in term.numbers}
    for name, number in chip.provenance.items():
        if not (name.endswith(TIMES) or name in OTHER_TIMES) or isinstance(number.value, bool):
            continue
        times = _times(chip, *_on(chip, case))
        changed_chips = [
            chip.with_numbers(**{name: derived(_scaled(number.value, factor), "tests")})
            for factor in (0.999, 1.001)
        ]
        if all(_times(other, *_on(other, case)) != pytest.approx(times, rel=1e-9) for other in changed_chips):
            assert name in named


def _scaled(value: float | Mapping[int, float], factor: float) -> float | dict[int, float]:
    if isinstance(value, Mapping):
        return {ranks: number * factor for ranks, number in value.items()}
    return value * factor


def _times(chip: Hardware, engine: Engine, cost: Cost) -> list[float]:
    clock = costs.clock_ghz(chip, engine)
    phases = [] if cost.dma is None else [cost.dma.trigger_ns, cost.dma.first_byte_ns, cost.dma.transfer_ns]
    return [cost.interval_cycles / clock, cost.latency_cycles / clock, *phases]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_terms_name_numbers_of_the_record(case: str, target: str) -> None:
    _, cost = _on(hardware(target), case)
    assert cost.terms
    assert {number for term in cost.terms for number in term.numbers} <= set(hardware(target).provenance)


def test_fixed_terms_do_not_grow_with_the_elements() -> None:
    chip = hardware("trn2")
    pairs = (
        (costs.vector(chip, 512), costs.vector(chip, 1024)),
        (costs.gpsimd(chip, 8), costs.gpsimd(chip, 9)),
    )
    for few, many in pairs:
        issues = [(a, b) for a, b in zip(few.terms, many.terms) if a.phase is Phase.issue]
        assert issues and all((a.ns != b.ns) == a.grows == b.grows for a, b in issues)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", TARGETS)
def test_a_cost_worked_out_again_is_that_of_planning_by_the_other_record(target: str, seed: int) -> None:
    """What a planner decides follows from no number of times; so launches are timed by other records as they are."""
    chip, generator = hardware(target), random.Random(seed)
    other = change_record(
        chip,
        {parameter: math.log(generator.choice((0.5, 0.8, 1.25, 2.0))) for parameter in list_parameters(chip)},
    )
    planned, differ = 0, 0
    for name, made in CASES.items():
        try:
            engine, cost = made(chip)
        except Unsupported:
            continue
        assert (engine, cost.on(other)) == made(other), name
        assert cost.on(other).terms == made(other)[1].terms, name
        assert cost.on(chip) is cost, name
        planned, differ = planned + 1, differ + (cost.on(other) != cost)
    assert differ > 0.9 * planned > 50
