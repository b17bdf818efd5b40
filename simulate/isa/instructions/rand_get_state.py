"""rand_get_state: store the state of a random generator."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.generators import choose_state_engine, names_engine, state_words
from simulate.isa.plan import Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor


@instruction
def rand_get_state(
    hardware: Hardware, dst: NkiTensor, engine: Engine = Engine.gpsimd, name: str | None = None
) -> Plan:
    """Store the XORWOW state of the lanes of dst, from GpSimd (gen3 on) or the Vector engine (gen4 on).

    dst: [P, 6] (GpSimd) or [P, 24] (Vector) uint32 @ SBUF; from gen4 on also PSUM, but never with GpSimd.
    Loading the same words again with rand_set_state continues the same sequence of numbers.

    Raises RuleViolation. Cost: none is published; one word per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    requested = engine
    engine, generator = choose_state_engine(hardware, engine)
    rules.gpsimd_stays_in_sbuf(engine, dst=dst)
    state_into_psum(hardware, dst)
    state_words("dst", dst, engine)

    def compute(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return state[: dst.shape[0]], state

    return Plan(
        engine=engine,
        reads=(),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.on_engine(hardware, engine, dst.free_size),
        name=name,
        state=generator,
        undocumented=rules.violations((names_engine, requested)),
    )


@rule("NKW-RANDOM-STATE-PSUM", limit="sbuf before gen4", hint="allocate dst with buffer=nl.sbuf")
def state_into_psum(hardware: Hardware, dst: NkiTensor) -> None:
    """Generator state is stored to SBUF, and from gen4 on also to PSUM.

    Raises RuleViolation otherwise.
    """
    if dst.buffer is MemoryRegion.psum and not hardware.vector_random_state:
        raise RuleViolation(state_into_psum, f"dst lies in psum on {hardware.name}")
