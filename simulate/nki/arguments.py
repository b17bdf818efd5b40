"""Rules about arguments of `nki.language`, for functions and arguments that no instruction checks.

Each rule raises RuleViolation; its docstring begins with the sentence that it enforces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa.immediates import parse_integer
from simulate.isa.rules import HBM, violations
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.registers import VirtualRegister
from simulate.numerics import DType, as_dtype
from simulate.run import current_core
from simulate.run.machine import Rank

MATMUL_COLUMNS_MAX = 512
"""Free dimension of y that the reference of nl.matmul allows, for every generation."""

CONSTANT_DTYPES = frozenset(
    "float32 float16 bfloat16 int32 int16 int8 uint32 uint16 uint8 float8_e4m3fn float8_e5m2 float8_e8m0fnu "
    "float8_e4m3fn_x4 float8_e5m2_x4 float4_e2m1fn_x4 tfloat32".split()
)
"""Element types that the reference of nl.shared_constant lists, those not yet tested on hardware included."""

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def judge(function: str, *applications: tuple[Any, ...]) -> None:
    """Apply rules to a call of a function that has no planner; the launch's rules refuse or tolerate what they break.

    A tolerated violation is recorded in the launch.

    Args:
        function: Name of the function, for the message.
        applications: Tuples of a rule function and its arguments.

    Raises:
        RuleViolation: A rule is broken that the rules of the launch refuse.
    """
    for violation in violations(*applications):
        current_core().rank.report_violation(violation, function)


def resolve_dtype(like: NkiTensor, dtype: Any) -> DType:
    """Return the dtype of an optional argument `dtype`, or that of the tile `like` if the argument is None."""
    return like.dtype if dtype is None else as_dtype(dtype)


@rule("NKW-NL-OPERANDS", hint="give one of them as a tile; Python computes with numbers alone")
def one_is_a_tile(x: Any, y: Any) -> None:
    """At least one of x and y is a tile.

    Raises RuleViolation otherwise.
    """
    if not (isinstance(x, NkiTensor) or isinstance(y, NkiTensor)):
        raise RuleViolation(one_is_a_tile, f"x is {type(x).__name__}, y is {type(y).__name__}")


@rule("NKW-NL-MEMORY", hint="nisa.tensor_copy inside SBUF, nisa.dma_copy between HBM tensors")
def lies_in_memory(argument: str, tensor: Any, *allowed: MemoryRegion) -> None:
    """nl.load and nl.load_transpose2d read HBM tensors; nl.store writes an SBUF tile to an HBM tensor.

    Raises RuleViolation for a tensor that is in none of the memories `allowed`; other objects pass.
    """
    if isinstance(tensor, NkiTensor) and tensor.buffer not in allowed:
        raise RuleViolation(
            lies_in_memory,
            f"{argument} lies in {tensor.buffer.value}",
            limit=" or ".join(region.value for region in allowed),
        )


def lies_in_hbm(argument: str, tensor: Any) -> tuple[Any, ...]:
    """Return the tuple for `judge` that applies `lies_in_memory`: the argument `tensor` must be in HBM."""
    return (lies_in_memory, argument, tensor, *HBM)


@rule("NKW-WHERE-TILES", hint="nl.full makes a tile of a number; nl.greater and its like make a condition")
def selects_between_tiles(condition: NkiTensor, x: Any, y: Any) -> None:
    """nl.where takes a condition tile of a floating-point dtype, and tiles as x and y.

    Raises RuleViolation otherwise.
    """
    if not condition.dtype.is_float:
        raise RuleViolation(selects_between_tiles, f"condition is {condition.dtype}")
    for argument, value in (("x", x), ("y", y)):
        if not isinstance(value, NkiTensor):
            raise RuleViolation(selects_between_tiles, f"{argument} is {type(value).__name__} {value!r:.40}")


@rule("NKW-NL-MATMUL-COLUMNS", limit=f"{MATMUL_COLUMNS_MAX} columns", hint="nisa.nc_matmul, or slices of y")
def moving_columns_within_limit(y: NkiTensor) -> None:
    """The free dimension of nl.matmul's y has at most 512 elements, on every generation.

    Raises RuleViolation otherwise.
    """
    if y.free_size > MATMUL_COLUMNS_MAX:
        raise RuleViolation(moving_columns_within_limit, f"y has {y.free_size} columns")


@rule("NKW-DEVICE-PRINT", hint='nl.device_print("scores", tile); copy a PSUM tile to SBUF first')
def prints_a_tensor(print_prefix: Any, tensor: Any) -> None:
    """nl.device_print takes a string, which is constant, and a tensor in SBUF or HBM.

    Raises RuleViolation otherwise.
    """
    if not isinstance(print_prefix, str):
        raise RuleViolation(prints_a_tensor, f"print_prefix is {type(print_prefix).__name__}")
    if not isinstance(tensor, NkiTensor):
        raise RuleViolation(prints_a_tensor, f"tensor is {type(tensor).__name__}")
    if tensor.buffer is MemoryRegion.psum:
        raise RuleViolation(prints_a_tensor, f"tensor lies in {tensor.buffer.value}")


@rule("NKW-CONSTANT-DTYPE", limit=", ".join(sorted(CONSTANT_DTYPES)), hint="convert the array on the host")
def constant_has_a_supported_dtype(dtype: DType) -> None:
    """nl.shared_constant takes arrays of the element types that its reference lists.

    Raises RuleViolation otherwise.
    """
    if str(dtype) not in CONSTANT_DTYPES:
        raise RuleViolation(constant_has_a_supported_dtype, f"the array is {dtype}")


@rule("NKW-CONSTANT-SHARED", hint="let both cores give the same array; select rows by nl.program_id")
def constants_of_cores_agree(rank: Rank, core: int, index: int, array: np.ndarray) -> None:
    """The cores of a logical core share every constant, so they give the same data.

    Compares the constant with index `index` of one core with the constant that the other core gave at that index.

    Raises RuleViolation otherwise.
    """
    first = rank.constants.setdefault(index, (core, array))
    if first[0] == core or first[1] is array:
        return
    other = first[1]
    if (other.shape, other.dtype) != (array.shape, array.dtype) or other.tobytes() != array.tobytes():
        raise RuleViolation(
            constants_of_cores_agree,
            f"constant {index} of core {core} is {array.shape} {array.dtype} and differs from that of "
            f"core {first[0]}, {other.shape} {other.dtype}",
        )


@rule("NKW-RANGE", hint="nl.fori_loop counts to a register; a Python range counts with integers")
def range_is_of_integers(start: Any, stop: Any, step: Any) -> None:
    """start, stop and step of a range are integers, and step is not 0.

    Raises RuleViolation otherwise; a register is accepted, and None as stop.
    """
    for argument, value in (("start", start), ("stop", stop), ("step", step)):
        optional = argument == "stop" and value is None
        if not (optional or isinstance(value, VirtualRegister) or _is_integer(value)):
            raise RuleViolation(range_is_of_integers, f"{argument}={value!r:.40}")
    if _is_integer(step) and step == 0:
        raise RuleViolation(range_is_of_integers, "step=0")


@rule("NKW-DS", hint="nl.ds(first, count), count being 1 or more")
def slice_has_a_size(start: Any, size: Any) -> None:
    """nl.ds takes the first index and the number of elements, both integers; the number is 1 or more.

    Raises RuleViolation otherwise.
    """
    if isinstance(start, (float, str, NkiTensor, np.floating)):
        raise RuleViolation(slice_has_a_size, f"start={start!r:.40}")
    if parse_integer(size, 1, _INT32_MAX) is None:
        raise RuleViolation(slice_has_a_size, f"size={size!r:.40}")


@rule("NKW-RMS-COUNT", hint="n=x.shape[-1]")
def norm_counts_values(n: Any) -> None:
    """n of nl.rms_norm is the number of values, an integer of 1 or more.

    Raises RuleViolation otherwise.
    """
    if parse_integer(n, 1, _INT32_MAX) is None:
        raise RuleViolation(norm_counts_values, f"n={n!r:.40}")


@rule("NKW-EXPAND-AXIS", hint="axis=1 puts the new dim after the partitions, axis=-1 puts it last")
def axis_of_expanded_shape(axis: Any, ndim: int) -> None:
    """axis of nl.expand_dims is a position in the expanded shape, counted from the front or from the end.

    Raises RuleViolation otherwise.
    """
    if parse_integer(axis, -ndim - 1, ndim) is None:
        raise RuleViolation(axis_of_expanded_shape, f"axis={axis!r:.40}", limit=f"{-ndim - 1} to {ndim}")


@rule("NKW-LOOP-BOUND", hint="load the number into a register with nisa.register_load")
def bound_is_integer_or_register(argument: str, bound: Any) -> None:
    """A bound of a device loop is an integer or a register.

    Raises RuleViolation otherwise.
    """
    if not (isinstance(bound, VirtualRegister) or _is_integer(bound)):
        raise RuleViolation(
            bound_is_integer_or_register, f"{argument} is {type(bound).__name__} {bound!r:.40}"
        )


@rule("NKW-LOOP-FUNCTION", hint="def body(i): …, then nl.fori_loop(0, n, body)")
def body_is_function(body_fun: Any) -> None:
    """The body of a device loop is a function of the iteration value or of the condition register.

    Raises RuleViolation if body_fun cannot be called.
    """
    if not callable(body_fun):
        raise RuleViolation(body_is_function, f"body_fun is {type(body_fun).__name__}")


def _is_integer(value: Any) -> bool:
    return parse_integer(value, _INT32_MIN, _INT32_MAX) is not None
