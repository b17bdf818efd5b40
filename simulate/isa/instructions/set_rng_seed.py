"""set_rng_seed: seed the Vector engine's random generator."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.generators import choose_vector_generator
from simulate.isa.plan import SEEDS, Domain, Plan
from simulate.memory import NkiTensor
from simulate.numerics import random


@instruction
def set_rng_seed(hardware: Hardware, src_seeds: NkiTensor, name: str | None = None) -> Plan:
    """Seed the Vector generator of every lane with one 32-bit value; equal seeds give equal numbers.

    src_seeds: [1, 1] @ SBUF or PSUM, a 32-bit dtype, of which the bits count. How one seed becomes the state
    of 128 lanes is not documented; here each lane gets another state (`simulate.numerics.random`).

    Raises RuleViolation. Cost: none is published; that of one element.
    """
    rules.check_tile(hardware, "src_seeds", src_seeds)
    one_word(src_seeds)
    generator = choose_vector_generator(hardware)

    def compute(state: np.ndarray, seed: np.ndarray) -> tuple[np.ndarray]:
        return (random.spread_seed(int(seed.view(np.uint32).reshape(-1)[0]), *state.shape),)

    return Plan(
        engine=Engine.vector,
        reads=(src_seeds,),
        writes=(),
        domain=Domain.bits,
        compute=compute,
        cost=costs.vector(hardware, 1),
        name=name,
        state=generator,
        effects=SEEDS,
    )


@rule(
    "NKW-RNG-SEED",
    limit="(1, 1) of a 32-bit dtype",
    hint="src_seeds = nl.ndarray((1, 1), nl.uint32), filled by nisa.memset or a DMA",
)
def one_word(src_seeds: NkiTensor) -> None:
    """A seed is one 32-bit element in a (1, 1) tile.

    Raises RuleViolation otherwise.
    """
    if src_seeds.shape != (1, 1) or src_seeds.dtype not in ("int32", "uint32", "float32", "tfloat32"):
        raise RuleViolation(one_word, f"src_seeds is {src_seeds.shape} {src_seeds.dtype}")
