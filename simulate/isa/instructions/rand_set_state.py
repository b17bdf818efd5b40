"""rand_set_state: load the state of a random generator."""

from __future__ import annotations

import numpy as np

from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.generators import choose_state_engine, names_engine, state_words
from simulate.isa.plan import SEEDS, Domain, Plan
from simulate.memory import MemoryRegion, NkiTensor


@instruction
def rand_set_state(
    hardware: Hardware, src_seeds: NkiTensor, engine: Engine = Engine.gpsimd, name: str | None = None
) -> Plan:
    """Load the XORWOW state of the lanes of src_seeds, into GpSimd (gen3 on) or the Vector engine (gen4 on).

    src_seeds: [P, 6] (GpSimd: one generator per lane) or [P, 24] (Vector: four) uint32 @ SBUF. Lanes beyond P
    keep their state. The order of the six words is not documented; here it is x, y, z, w, v and the counter.

    Raises RuleViolation. Cost: none is published; one word per cycle.
    """
    rules.check_tile(hardware, "src_seeds", src_seeds, MemoryRegion.sbuf)
    requested = engine
    engine, generator = choose_state_engine(hardware, engine)
    state_words("src_seeds", src_seeds, engine)

    def compute(state: np.ndarray, words: np.ndarray) -> tuple[np.ndarray]:
        loaded = state.copy()
        loaded[: words.shape[0]] = words
        return (loaded,)

    return Plan(
        engine=engine,
        reads=(src_seeds,),
        writes=(),
        domain=Domain.bits,
        compute=compute,
        cost=costs.on_engine(hardware, engine, src_seeds.free_size),
        name=name,
        state=generator,
        effects=SEEDS,
        undocumented=rules.violations((names_engine, requested)),
    )
