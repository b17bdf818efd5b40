"""The Vector engine's accumulator registers: one float32 per partition, shared by five instructions.

After an instruction with reduce_cmd `idle` they are documented as possibly modified, so they then hold NaN here: a
later `reduce` or `reduce_res` without a reset shows it. reduce_res gets the registers as they are after the
instruction, hence NaN with `idle`. In this module `registers` is float32 (partitions of the chip, 1), and no function
changes it in place.
"""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.enums import ReduceCmd
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor
from simulate.numerics import AluOperator

FLOATS = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32")


def start_registers(
    registers: np.ndarray,
    rows: int,
    command: ReduceCmd,
    operator: AluOperator,
    initial: np.ndarray | np.float32 | float,
) -> np.ndarray:
    """Return the values, (rows, 1), with which the first `rows` registers begin to accumulate.

    These are the registers for `reduce`, `initial` for `load_reduce`, and the operator's identity for other commands.

    Args:
        registers: All registers before the instruction.
        rows: Number of partitions of the instruction.
        command: reduce_cmd of the instruction.
        operator: Operator that accumulates.
        initial: A number, or one value per partition.
    """
    if command is ReduceCmd.reduce:
        return registers[:rows]
    if command is ReduceCmd.load_reduce:
        return np.broadcast_to(np.asarray(initial, np.float32).reshape(-1, 1), (rows, 1))
    return np.full((rows, 1), operator.identity, np.float32)


def accumulate(
    registers: np.ndarray,
    command: ReduceCmd,
    operator: AluOperator,
    results: np.ndarray,
    initial: np.ndarray | np.float32 | float = 0.0,
) -> np.ndarray:
    """Return a copy of all registers after an instruction: those of its partitions are op(op over a partition, start).

    The later element is the operator's first argument, within an instruction and from one to the next. With `idle` the
    registers of the instruction's partitions become NaN.

    Args:
        registers: All registers before the instruction.
        command: reduce_cmd of the instruction.
        operator: Operator that accumulates.
        results: The instruction's results in float32; dim 0 is the partition.
        initial: Start value for `load_reduce`, a number or one value per partition.
    """
    rows = results.shape[0]
    if command is ReduceCmd.idle:
        return replace_rows(registers, np.full((rows, 1), np.nan, np.float32))
    assert operator.reduce is not None
    reduced = operator.reduce(flat(results), 1).reshape(rows, 1)
    return replace_rows(
        registers, operator.function(reduced, start_registers(registers, rows, command, operator, initial))
    )


def collect_results(
    result: np.ndarray, registers: np.ndarray, reduce_res: NkiTensor | None
) -> tuple[np.ndarray, ...]:
    """Return what an instruction writes, in order: its result, the registers for reduce_res if any, all registers.

    reduce_res gets the registers of the result's partitions, (rows, 1).
    """
    if reduce_res is None:
        return result, registers
    return result, registers[: result.shape[0]], registers


def replace_rows(registers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return a copy of `registers` whose first registers, as many as `rows` has, are replaced by `rows`."""
    updated_registers = registers.copy()
    updated_registers[: rows.shape[0]] = rows
    return updated_registers


@rule("NKW-VECTOR-REDUCE-CMD")
def command_among(command: ReduceCmd, *allowed: ReduceCmd) -> None:
    """reduce_cmd is one of the commands that the instruction takes.

    Raises RuleViolation if the command is not among those `allowed`.
    """
    if command not in allowed:
        raise RuleViolation(
            command_among,
            f"reduce_cmd={command.name if isinstance(command, ReduceCmd) else command!r}",
            limit=", ".join(member.name for member in allowed),
            hint=f"nisa.reduce_cmd.{allowed[0].name}",
        )


@rule(
    "NKW-VECTOR-REDUCE-INIT", hint="reduce_cmd=nisa.reduce_cmd.load_reduce and an initial value, or neither"
)
def initial_with_load_only(operand: str, is_given: bool, command: ReduceCmd) -> None:
    """The initial value of the registers is given with reduce_cmd load_reduce and with no other.

    Raises RuleViolation otherwise.
    """
    if is_given != (command is ReduceCmd.load_reduce):
        raise RuleViolation(
            initial_with_load_only,
            f"{operand} is {'given' if is_given else 'missing'}, reduce_cmd={command.name}",
        )


@rule(
    "NKW-VECTOR-REDUCE-OPERATOR",
    hint="use one of these operators, or nisa.tensor_reduce in an instruction of its own",
)
def reduction_among(operator: AluOperator, *allowed: str) -> None:
    """The instruction accumulates with one of the operators documented for it.

    Raises RuleViolation if the operator's name is not among those `allowed`.
    """
    if operator.name not in allowed:
        raise RuleViolation(reduction_among, f"operator {operator.name}", limit=", ".join(allowed))


def check_result(hardware: Hardware, reduce_res: NkiTensor, data: NkiTensor, *dtypes: str) -> None:
    """Check the rules of the (P, 1) tile `reduce_res`; raise RuleViolation if one is broken.

    Args:
        hardware: Record of the chip.
        reduce_res: The tile that receives the registers, on chip.
        data: Tile whose number of partitions it must have.
        dtypes: Dtypes that it may have; none for any that is not packed.
    """
    rules.check_tile(hardware, "reduce_res", reduce_res)
    rules.is_column("reduce_res", reduce_res, data)
    rules.not_packed("reduce_res", reduce_res)
    if dtypes:
        rules.dtype_among("reduce_res", reduce_res, *dtypes)
