"""exponential: exp(src - max_value) on the Vector engine, with an optional sum per partition."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, broadcast, costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import PLAIN, Domain, Effects, Plan, Registers, State
from simulate.memory import NkiTensor
from simulate.numerics import ALU_OPERATORS

_DTYPES = (
    "float8_e4m3",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float32",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
)
_RESULTS = ("float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32")
_COMMANDS = (ReduceCmd.idle, ReduceCmd.reset_reduce, ReduceCmd.reduce, ReduceCmd.load_reduce)
_DIMS_MAX = 4
_ADD = ALU_OPERATORS["add"]
_IDLE = Effects(is_idle_exponential=True)


@instruction
def exponential(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor,
    max_value: NkiTensor | float = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_init: NkiTensor | float = 0.0,
    name: str | None = None,
) -> Plan:
    """Compute dst = exp(src - max_value) in float32 on the Vector engine, with an optional running sum. gen4.

    dst, src: [P, ...] @ SBUF or PSUM, up to four dims; fp8_e4m3, fp8_e5m2, fp16, bf16, float32, int8 to
    int32, uint8 or uint16, dst also tfloat32 and src also uint32. max_value, reduce_init: a number or a
    float32 [P, 1] tile. reduce_res: [P, 1] of a float dtype.

    The sum is taken in float32 before rounding to dst's dtype and goes through the Vector accumulators:
    reset_reduce starts from 0, reduce from what they hold, load_reduce from reduce_init, which stays 0.0
    otherwise. With idle, the default, they are undefined afterwards and reduce_res, if given, gets NaN.

    Raises RuleViolation. Cost: four elements per cycle.
    """
    on_chip(hardware)
    for operand, tile, also in (("dst", dst, "tfloat32"), ("src", src, "uint32")):
        rules.check_tile(hardware, operand, tile, indirect=True)
        rules.dtype_among(operand, tile, *_DTYPES, also)
        up_to_four_dims(operand, tile)
    rules.same_elements("dst", dst, "src", src)
    indirection.check(hardware, Engine.vector, dst, src)
    accumulator.command_among(reduce_cmd, *_COMMANDS)
    reads = (src, *broadcast.check_operand(hardware, "max_value", max_value, src, "float32"))
    if reduce_cmd is ReduceCmd.load_reduce:
        reads += broadcast.check_operand(hardware, "reduce_init", reduce_init, src, "float32")
    else:
        no_initial_sum(reduce_init, reduce_cmd)
    if reduce_res is not None:
        accumulator.check_result(hardware, reduce_res, src, *_RESULTS)

    def compute(registers: np.ndarray, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
        operand = iter(operands)
        values = next(operand)
        result = np.exp(values - broadcast.take_broadcast_value(max_value, operand, values.ndim))
        initial = broadcast.take_broadcast_value(reduce_init, operand, 2)
        updated = accumulator.accumulate(registers, reduce_cmd, _ADD, result, initial)
        return accumulator.collect_results(result, updated, reduce_res)

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,) if reduce_res is None else (dst, reduce_res),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(
            hardware, src.free_size, "vector_exponential_elements_per_cycle", reduce_res is not None
        ),
        name=name,
        state=State.vector_accumulator,
        registers=Registers(reduce_cmd, _ADD.name, src.shape[0], reduce_res is not None),
        propagate=propagation.within_partitions,
        effects=_IDLE if reduce_cmd is ReduceCmd.idle else PLAIN,
    )


@rule("NKW-EXPONENTIAL-CHIP", hint="nisa.activation(op=nl.exp)")
def on_chip(hardware: Hardware) -> None:
    """exponential exists from gen4 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.vector_exponential:
        raise RuleViolation(on_chip, f"exponential on {hardware.name}")


@rule("NKW-EXPONENTIAL-DIMS", hint="flatten free dims that are contiguous, with .flatten_dims or .reshape")
def up_to_four_dims(operand: str, tile: NkiTensor) -> None:
    """Operands of exponential have at most four dims.

    Raises RuleViolation otherwise.
    """
    if tile.ndim > _DIMS_MAX:
        raise RuleViolation(up_to_four_dims, f"{operand} has {tile.ndim} dims", limit=f"{_DIMS_MAX}")


@rule("NKW-EXPONENTIAL-INIT", hint="reduce_cmd=nisa.reduce_cmd.load_reduce")
def no_initial_sum(reduce_init: NkiTensor | float, command: ReduceCmd) -> None:
    """reduce_init is left at 0.0 unless reduce_cmd is load_reduce.

    Raises RuleViolation if reduce_init is a tile or not 0; the planner applies it if reduce_cmd is not load_reduce.
    """
    if isinstance(reduce_init, NkiTensor) or reduce_init != 0:
        raise RuleViolation(no_initial_sum, f"reduce_init={reduce_init!r:.40}, reduce_cmd={command.name}")
