"""Reductions, the accumulator registers of the Scalar and Vector engines, and scans."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle import operators
from tests.oracle.formats import TINY, UNIT, single
from tests.oracle.functions import activated
from tests.oracle.machine import Accumulators, Core, Operand

FLOAT32_MINIMUM = -3.4028234663852886e38


def tensor_reduce(
    core: Core,
    dst: Operand,
    op: str,
    data: Operand,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
) -> None:
    """Compute dst = op over the trailing dims `axis` of data; float32 sums in any order."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    first = min(a % len(data.shape) for a in axes)
    kept = int(np.prod(data.shape[:first]))
    grouped = Operand(data.memory, data.format, data.addresses.reshape(kept, -1))
    if op in operators.BITVEC:
        bits = core.bits(grouped).astype(np.int64)
        result = bits[:, 0]
        for i in range(1, bits.shape[1]):
            result = operators.bitvec(op, result, bits[:, i], data.format)
        core.write_bits(dst, result)
        return
    values, slack = operators.folded(op, core.values(grouped))
    core.write(dst, -values if negate else values, slack)


def tensor_partition_reduce(core: Core, dst: Operand, op: str, data: Operand) -> None:
    """Compute dst[0, f] = op over the partitions of data[:, f]."""
    if op in operators.BITVEC:
        bits = core.bits(data.flat()).astype(np.int64)
        result = bits[0]
        for row in bits[1:]:
            result = operators.bitvec(op, result, row, data.format)
        core.write_bits(dst, result)
        return
    rows = core.matrix(data).T
    values, slack = operators.folded("add" if op == "average" else op, rows)
    if op == "average":
        values, slack = values / rows.shape[1], slack / rows.shape[1]
        slack = slack + UNIT * np.where(np.isfinite(values), np.abs(values), 0.0) + TINY
    core.write(dst, values, slack)


# -- the accumulator registers -------------------------------------------------------------------------------------


def _accumulate(
    registers: Accumulators,
    command: str,
    op: str,
    values: np.ndarray,
    slack: np.ndarray,
    initial: np.ndarray | float,
) -> None:
    """Apply `command` to the registers of an instruction whose float32 results are `values`."""
    rows = values.shape[0]
    before, error = registers.values[:rows, None].copy(), registers.slack[:rows, None].copy()
    if command in ("reset", "reset_reduce"):
        before, error = np.full((rows, 1), operators.IDENTITY[op]), np.zeros((rows, 1))
    elif command == "load_reduce":
        before, error = np.broadcast_to(initial, (rows, 1)), np.zeros((rows, 1))
    if command != "reset":
        everything = np.concatenate([before, values], axis=1)
        unknown = np.isinf(np.concatenate([error, slack], axis=1)).any(axis=1, keepdims=True)
        errors = np.concatenate([error, slack], axis=1)
        errors = np.where(np.isinf(errors), 0.0, errors)
        if op in ("add", "multiply"):
            after, rounding = operators.folded(op, everything)
            if op == "multiply":
                # Only basic operations, which have no error of their own, are reduced by multiplication.
                unknown = unknown | (errors != 0).any(axis=1, keepdims=True)
                error = rounding
            else:
                error = rounding + errors.sum(axis=1, keepdims=True)
        else:
            after, _ = operators.folded(op, everything)
            error = errors.max(axis=1, keepdims=True)
            if op.startswith("abs") and errors.any():
                unknown = unknown | True
        before, error = after, np.where(unknown, np.inf, error)
    registers.values[:rows], registers.slack[:rows] = before[:, 0], error[:, 0]


def _forget(registers: Accumulators, rows: int) -> None:
    """Leave the Vector registers undefined, as idle does."""
    registers.values[:rows], registers.slack[:rows] = np.nan, np.inf


def _read_out(core: Core, registers: Accumulators, reduce_res: Operand | None, sign: float = 1.0) -> None:
    if reduce_res is not None:
        rows = reduce_res.shape[0]
        core.write(reduce_res, sign * registers.values[:rows], registers.slack[:rows])


def activation(
    core: Core,
    dst: Operand,
    op: str,
    data: Operand,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: str | None = None,
    reduce_res: Operand | None = None,
    reduce_cmd: str = "idle",
) -> None:
    """Compute dst = op(data * scale + bias), and the sum of the results into the Scalar registers."""
    x = core.matrix(data)
    scaled = single(x * core.column(scale))
    argument = single(scaled + core.column(0.0 if bias is None else bias))
    # Whether product and sum are rounded once or twice is not documented.
    error = np.where(
        np.isfinite(scaled) & np.isfinite(argument), UNIT * (np.abs(scaled) + np.abs(argument)), 0.0
    )
    plain = isinstance(scale, float) and scale == 1.0 and bias is None
    values, slack = activated(op, argument, np.zeros_like(x) if plain else error, None)
    core.write(dst, values, slack)
    if reduce_cmd != "idle":
        _accumulate(core.scalar, reduce_cmd, "add", values, slack, 0.0)
    _read_out(core, core.scalar, reduce_res)


def activation_reduce(
    core: Core,
    dst: Operand,
    op: str,
    data: Operand,
    reduce_op: str,
    reduce_res: Operand,
    bias: Any = None,
    scale: Any = 1.0,
) -> None:
    """Run activation with reset_reduce."""
    activation(core, dst, op, data, bias, scale, reduce_op, reduce_res, "reset_reduce")


def activate2(
    core: Core,
    dst: Operand,
    op: str,
    data: Operand,
    imm0: Any,
    imm1: Any,
    op0: str,
    op1: str,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: str | None = None,
    reduce_res: Operand | None = None,
    reduce_cmd: str = "idle",
) -> None:
    """Compute dst = op(op1(op0(data, imm0), imm1)), and a reduction of the results into the Scalar registers."""
    x = core.matrix(data)
    error = np.zeros_like(x)
    for stage, immediate, reverse in ((op0, imm0, reverse0), (op1, imm1, reverse1)):
        if stage == "bypass":
            continue
        y = np.broadcast_to(core.column(immediate), x.shape)
        x = operators.ARITHMETIC[stage](y, x) if reverse else operators.ARITHMETIC[stage](x, y)
        error = error + np.where(np.isfinite(x), UNIT * np.abs(x), 0.0)
    if op1 == "bypass":
        error = np.zeros_like(x)
    values, slack = activated(op, x, error, core.column(relu_param) if op == "prelu" else None)
    core.write(dst, values, slack)
    if reduce_cmd != "idle":
        _accumulate(core.scalar, reduce_cmd, str(reduce_op), values, slack, 0.0)
    _read_out(core, core.scalar, reduce_res)


def exponential(
    core: Core,
    dst: Operand,
    src: Operand,
    max_value: Any = 0.0,
    reduce_res: Operand | None = None,
    reduce_cmd: str = "idle",
    reduce_init: Any = 0.0,
) -> None:
    """Compute dst = exp(src - max_value), and the sum of the results into the Vector registers."""
    initial = core.column(reduce_init)
    argument = single(core.matrix(src) - core.column(max_value))
    values, slack = activated("exp", argument, np.zeros_like(argument), None)
    core.write(dst, values, slack)
    _vector_reduce(core, reduce_cmd, "add", values, slack, initial)
    _read_out(core, core.vector, reduce_res)


def _vector_reduce(
    core: Core, command: str, op: str, values: np.ndarray, slack: np.ndarray, initial: Any = 0.0
) -> None:
    if command == "idle":
        _forget(core.vector, values.shape[0])
    else:
        _accumulate(core.vector, command, op, values, slack, initial)


def tensor_scalar_reduce(
    core: Core,
    dst: Operand,
    data: Operand,
    op0: str,
    operand0: Any,
    reduce_op: str,
    reduce_res: Operand | None = None,
    reduce_cmd: str = "reset_reduce",
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> None:
    """Compute dst = op0(data, operand0), and a reduction of the results into the Vector registers."""
    initial = 0.0 if reduce_init is None else core.column(reduce_init)
    x = core.matrix(data)
    if op0 in operators.UNARY:
        values = operators.UNARY[op0](x)
    else:
        values = operators.ARITHMETIC[op0](x, np.broadcast_to(core.column(operand0), x.shape))
    core.write(dst, values, operators.slack_of(op0, values.shape))
    _vector_reduce(core, reduce_cmd, reduce_op, values, np.zeros_like(values), initial)
    _read_out(core, core.vector, reduce_res, -1.0 if reduce_res_negate else 1.0)


def range_select(
    core: Core,
    dst: Operand,
    on_true_tile: Operand,
    comp_op0: str,
    comp_op1: str,
    bound0: Operand,
    bound1: Operand,
    reduce_cmd: str = "reset_reduce",
    reduce_res: Operand | None = None,
    reduce_op: str = "maximum",
    range_start: int = 0,
) -> None:
    """Compute dst = on_true_tile where both comparisons hold, else the float32 minimum; and its maximum."""
    data = core.matrix(on_true_tile)
    position = np.broadcast_to(range_start + np.arange(data.shape[1], dtype=np.float64), data.shape)
    inside = operators.ARITHMETIC[comp_op0](position, core.column(bound0)) * operators.ARITHMETIC[comp_op1](
        position, core.column(bound1)
    )
    values = np.where(inside == 1, data, FLOAT32_MINIMUM)
    core.write(dst, values)
    _vector_reduce(core, reduce_cmd, "maximum", values, np.zeros_like(values))
    _read_out(core, core.vector, reduce_res)


def select_reduce(
    core: Core,
    dst: Operand,
    predicate: Operand,
    on_true: Operand,
    on_false: Any,
    reduce_res: Operand | None = None,
    reduce_cmd: str = "idle",
    reduce_op: str = "maximum",
    reverse_pred: bool = False,
) -> None:
    """Compute dst = on_true where the predicate is not zero, else on_false; and its maximum."""
    chosen = (core.bits(predicate.flat()) != 0) != reverse_pred
    values = np.where(chosen, core.matrix(on_true), core.column(on_false))
    core.write(dst, values)
    _vector_reduce(core, reduce_cmd, "maximum", values, np.zeros_like(values))
    _read_out(core, core.vector, reduce_res)


# -- scans ---------------------------------------------------------------------------------------------------------


def tensor_tensor_scan(
    core: Core,
    dst: Operand,
    data0: Operand,
    data1: Operand,
    initial: Any,
    op0: str,
    op1: str,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """Compute state = op1(op0(data0[i], state), data1[i]), written to dst[i]; the state is float32."""
    x, y = core.matrix(data0), core.matrix(data1)
    state = np.broadcast_to(core.column(initial), (x.shape[0], 1))
    result = np.empty_like(x)
    first, second = operators.ARITHMETIC[op0], operators.ARITHMETIC[op1]
    for i in range(x.shape[1]):
        inner = first(state, x[:, i : i + 1]) if reverse0 else first(x[:, i : i + 1], state)
        state = second(y[:, i : i + 1], inner) if reverse1 else second(inner, y[:, i : i + 1])
        result[:, i : i + 1] = state
    open_zero = {op0, op1} & operators.ZERO_SIGN_OPEN
    core.write(dst, result, np.zeros_like(result) if open_zero else None)


def tensor_scalar_cumulative(
    core: Core,
    dst: Operand,
    src: Operand,
    op0: str,
    op1: str,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: str = "reset_reduce",
) -> None:
    """Compute reg = op1(op0(src[i], imm0), reg), written to dst[i]; reg is the Vector register."""
    x = core.matrix(src)
    rows = x.shape[0]
    state = core.vector.values[:rows, None]
    known = np.isfinite(core.vector.slack[:rows, None]) & (core.vector.slack[:rows, None] == 0)
    if reduce_cmd == "reset_reduce":
        state = np.full((rows, 1), operators.IDENTITY[op1])
    elif reduce_cmd == "load_reduce":
        state = np.broadcast_to(core.column(imm1), (rows, 1))
    known = known | (reduce_cmd != "reduce")
    elements = operators.ARITHMETIC[op0](x, np.broadcast_to(core.column(imm0), x.shape))
    result = np.empty_like(x)
    for i in range(x.shape[1]):
        state = operators.ARITHMETIC[op1](elements[:, i : i + 1], state)
        result[:, i : i + 1] = state
    slack = np.where(known, 0.0, np.inf)
    core.write(dst, result, np.broadcast_to(slack, result.shape))
    core.vector.values[:rows], core.vector.slack[:rows] = state[:, 0], slack[:, 0]
