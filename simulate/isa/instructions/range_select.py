"""range_select: keep the elements whose position satisfies two bounds, and their maximum."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import Domain, Plan, Registers, State
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor
from simulate.numerics import ALU_OPERATORS, AluOperator, alu_operator

FLOAT32_MIN = float(np.finfo(np.float32).min)
_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
_COMMANDS = (ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.idle)


@instruction
def range_select(
    hardware: Hardware,
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = ALU_OPERATORS["maximum"],
    range_start: int = 0,
    on_false_value: float = FLOAT32_MIN,
    name: str | None = None,
) -> Plan:
    """Select on_true_tile where comp_op0(i, bound0) and comp_op1(i, bound1), else float32 minimum, on Vector.

    i is range_start plus the element's position in its partition, as float32. dst, on_true_tile: [P, ...] @
    SBUF or PSUM, on_true_tile of a float dtype. bound0, bound1: [P, 1] float32. From gen3 on.

    The maximum of the selected row, before rounding to dst's dtype, goes into the Vector accumulators and
    from there to reduce_res [P, 1]. A dst of 16 bits or fewer gets -inf where nothing is selected; keep
    reduce_res float32 then. The signature hides on_false_value's default; only the float32 minimum is
    allowed, so that is it.

    Raises RuleViolation. Cost: one element per cycle.
    """
    on_chip(hardware)
    rules.check_unpacked(hardware, dst=dst)
    rules.check_tile(hardware, "on_true_tile", on_true_tile)
    rules.dtype_among("on_true_tile", on_true_tile, *accumulator.FLOATS)
    rules.same_elements("dst", dst, "on_true_tile", on_true_tile)
    for operand, bound in (("bound0", bound0), ("bound1", bound1)):
        rules.check_tile(hardware, operand, bound)
        rules.is_column(operand, bound, on_true_tile)
        rules.dtype_among(operand, bound, "float32")
    first, second = alu_operator(comp_op0), alu_operator(comp_op1)
    compares("comp_op0", first)
    compares("comp_op1", second)
    maximum = alu_operator(reduce_op)
    accumulator.reduction_among(maximum, "maximum")
    accumulator.command_among(reduce_cmd, *_COMMANDS)
    exact_positions(hardware, range_start, on_true_tile.free_size)
    fill_is_minimum(on_false_value)
    if reduce_res is not None:
        accumulator.check_result(hardware, reduce_res, on_true_tile)
    positions = np.arange(range_start, range_start + on_true_tile.free_size).astype(np.float32)[None]
    fill = np.float32(FLOAT32_MIN)

    def compute(
        registers: np.ndarray, values: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        inside = (first.function(positions, flat(low)) != 0) & (second.function(positions, flat(high)) != 0)
        selected = np.where(inside, flat(values), fill)
        updated = accumulator.accumulate(registers, reduce_cmd, maximum, selected)
        return accumulator.collect_results(selected, updated, reduce_res)

    return Plan(
        engine=Engine.vector,
        reads=(on_true_tile, bound0, bound1),
        writes=(dst,) if reduce_res is None else (dst, reduce_res),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, on_true_tile.free_size),
        name=name,
        state=State.vector_accumulator,
        registers=Registers(reduce_cmd, maximum.name, on_true_tile.shape[0], reduce_res is not None),
        propagate=propagation.within_partitions,
    )


@rule("NKW-RANGE-SELECT-CHIP", hint="nisa.affine_select, or iota and compare")
def on_chip(hardware: Hardware) -> None:
    """range_select exists from gen3 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.range_select:
        raise RuleViolation(on_chip, f"range_select on {hardware.name}")


@rule("NKW-RANGE-SELECT-COMPARE", hint="comp_op0=nl.greater_equal, comp_op1=nl.less, or others of these")
def compares(operand: str, operator: AluOperator) -> None:
    """range_select compares with equal, less, less_equal, greater or greater_equal.

    Raises RuleViolation for any other operator.
    """
    if operator.name not in _COMPARISONS:
        raise RuleViolation(compares, f"{operand}={operator.name}", limit=", ".join(_COMPARISONS))


@rule(
    "NKW-RANGE-SELECT-POSITION",
    hint="select from blocks of the row, with positions that count from the block",
)
def exact_positions(hardware: Hardware, range_start: Any, elements: int) -> None:
    """range_start is an integer, and every position is exact in float32: its magnitude stays below 2**24.

    Raises RuleViolation if range_start is no integer, or a position of `elements` is beyond that.
    """
    limit = hardware.exact_float_integer_max
    is_integer = isinstance(range_start, (int, np.integer)) and not isinstance(range_start, bool)
    if not is_integer or range_start <= -limit or range_start + elements > limit:
        raise RuleViolation(
            exact_positions,
            f"range_start={range_start!r:.40} with {elements} elements",
            limit=f"positions below {limit}",
        )


@rule(
    "NKW-RANGE-SELECT-FILL",
    hint="leave on_false_value out; select another value with nisa.tensor_copy_predicated",
)
def fill_is_minimum(on_false_value: Any) -> None:
    """on_false_value is the float32 minimum, the only value the hardware fills in.

    Raises RuleViolation otherwise.
    """
    if (
        not isinstance(on_false_value, (int, float, np.number))
        or not np.float32(on_false_value) == FLOAT32_MIN
    ):
        raise RuleViolation(fill_is_minimum, f"on_false_value={on_false_value!r:.40}", limit=f"{FLOAT32_MIN}")
