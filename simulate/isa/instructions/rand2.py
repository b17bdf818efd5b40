"""rand2: uniform random numbers."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import broadcast, costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.generators import choose_vector_generator, draw
from simulate.isa.plan import DRAWS, Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import random

_DTYPES = (
    *("float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32"),
)


@instruction
def rand2(
    hardware: Hardware,
    dst: NkiTensor,
    min: NkiTensor | float,
    max: NkiTensor | float,
    name: str | None = None,
) -> Plan:
    """Draw float32 numbers uniform on [min, max] from the Vector engine's generators, cast to dst. gen4.

    dst: [P, ...] @ SBUF or PSUM. min, max: numbers or float32 [P, 1] tiles, min below max. A number is min +
    u * (max - min) with u of 24 random bits in [0, 1), so max itself appears only by rounding. Element i of a
    lane comes from its generator i mod 4.

    Raises RuleViolation, for tiles when the instruction runs. Cost: four elements per cycle.
    """
    on_chip(hardware)
    rules.check_tile(hardware, "dst", dst)
    rules.dtype_among("dst", dst, *_DTYPES)
    reads = (
        *broadcast.check_operand(hardware, "min", min, dst, "float32"),
        *broadcast.check_operand(hardware, "max", max, dst, "float32"),
    )
    if not isinstance(min, NkiTensor) and not isinstance(max, NkiTensor):
        range_not_empty(np.float32(min), np.float32(max))
    generator = choose_vector_generator(hardware)

    def compute(state: np.ndarray, *bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        operand = iter(bounds)
        low, high = (
            np.asarray(broadcast.take_broadcast_value(bound, operand, 2), np.float64) for bound in (min, max)
        )
        range_not_empty(low, high)
        words, state = draw(generator, state, dst)
        # float64, because max - min of two float32 numbers may not be one.
        values = (low + random.scale_to_unit_interval(words) * (high - low)).astype(np.float32)
        return np.clip(values, np.float32(low), np.float32(high)), state

    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,),
        domain=Domain.float32,
        compute=compute,
        cost=costs.vector(hardware, dst.free_size, "vector_random_elements_per_cycle"),
        name=name,
        state=generator,
        effects=DRAWS,
    )


@rule("NKW-RAND2-CHIP", hint="nisa.rng and a tensor_scalar that scales its bits")
def on_chip(hardware: Hardware) -> None:
    """rand2 exists from gen4 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.rand2:
        raise RuleViolation(on_chip, f"rand2 on {hardware.name}")


@rule("NKW-RAND2-RANGE", hint="pass min below max, for each partition where they are tiles")
def range_not_empty(low: np.ndarray | np.float32, high: np.ndarray | np.float32) -> None:
    """min is below max.

    Raises RuleViolation otherwise.
    """
    if not np.all(low < high):
        raise RuleViolation(range_not_empty, f"min={np.max(low)}, max={np.min(high)}")
