"""dropout: replace elements by zero at random."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import accumulator, broadcast, costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.generators import choose_vector_generator, draw
from simulate.isa.plan import DRAWS, Domain, Plan
from simulate.isa.shapes import column
from simulate.memory import NkiTensor
from simulate.numerics import random, to_float32


@instruction
def dropout(
    hardware: Hardware, dst: NkiTensor, data: NkiTensor, prob: NkiTensor | float, name: str | None = None
) -> Plan:
    """Replace elements by 0 with probability `prob`, others unchanged and unscaled, on the Vector engine.

    dst, data: [P, ...] @ SBUF or PSUM, one dtype. prob: a number from 0 to 1, or a [P, 1] tile: float32 for
    integer data, of any float dtype otherwise. An element is dropped when a 24-bit uniform number of the
    Vector generator is below prob, so 1.0 drops all and 0.0 none; the hardware's comparison is not
    documented.

    Raises RuleViolation. Cost: one element per cycle.
    """
    rules.check_unpacked(hardware, dst=dst, data=data)
    rules.same_elements("dst", dst, "data", data)
    rules.same_dtype("dst", dst, "data", data)
    allowed = ("float32",) if data.dtype.is_integer else accumulator.FLOATS
    reads = (data, *broadcast.check_operand(hardware, "prob", prob, data, *allowed))
    if not isinstance(prob, NkiTensor):
        is_probability(prob)

    def compute(state: np.ndarray, values: np.ndarray, *chances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words, state = draw(generator, state, data)
        chance = np.float32(prob) if not isinstance(prob, NkiTensor) else to_float32(chances[0], prob.dtype)
        below = column(chance, values.ndim) if chances else chance
        kept = values.copy()
        kept[random.scale_to_unit_interval(words).reshape(values.shape) < below] = 0
        return kept, state

    generator = choose_vector_generator(hardware)
    return Plan(
        engine=Engine.vector,
        reads=reads,
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.vector(hardware, data.free_size),
        name=name,
        state=generator,
        effects=DRAWS,
    )


@rule(
    "NKW-DROPOUT-PROBABILITY", limit="0 to 1", hint="pass the probability that an element is dropped, as 0.1"
)
def is_probability(prob: float) -> None:
    """prob is the probability that an element is dropped, from 0 to 1.

    Raises RuleViolation otherwise.
    """
    if not 0 <= prob <= 1:
        raise RuleViolation(is_probability, f"prob={prob}")
