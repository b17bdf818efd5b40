"""rng: random bits."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.generators import choose_vector_generator, draw, names_engine
from simulate.isa.plan import DRAWS, Domain, Plan, State
from simulate.memory import NkiTensor

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


@instruction
def rng(hardware: Hardware, dst: NkiTensor, engine: Engine = Engine.vector, name: str | None = None) -> Plan:
    """Draw random bits: of 32 per element the lowest that fit dst's dtype, on the Vector or GpSimd engine.

    dst: [P, ...] @ SBUF or PSUM, an integer dtype. GpSimd from gen3 on and into SBUF only; engine=unknown
    means Vector. Each lane has a generator of its own, which keeps its state until the kernel ends. Its bit
    stream is not documented; `simulate.numerics.random` says which one is used.

    Raises RuleViolation. Cost: none is published; on Vector gen4's rate of rand2, else one element per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    rules.dtype_among("dst", dst, *_INTEGERS)
    requested = engine
    if engine is Engine.unknown:
        engine = Engine.vector
    rules.engine_can(engine, Engine.vector, *((Engine.gpsimd,) if hardware.gpsimd_random else ()))
    rules.gpsimd_stays_in_sbuf(engine, dst=dst)
    element = dst.dtype.storage
    generator = choose_vector_generator(hardware) if engine is Engine.vector else State.gpsimd_xorwow

    def compute(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words, state = draw(generator, state, dst)
        return words.astype(f"u{element.itemsize}").view(element), state

    return Plan(
        engine=engine,
        reads=(),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.on_engine(hardware, engine, dst.free_size, "vector_random_elements_per_cycle"),
        name=name,
        state=generator,
        effects=DRAWS,
        undocumented=rules.violations((names_engine, requested)),
    )
