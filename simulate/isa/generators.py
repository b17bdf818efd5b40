"""Random generators of the engines: which one an instruction draws from, how it draws, rules of their state tiles."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.enums import Engine
from simulate.isa.plan import State
from simulate.memory import NkiTensor
from simulate.numerics import random


def choose_vector_generator(hardware: Hardware) -> State:
    """Return the kind of the Vector engine's generator: four XORWOW generators per lane from gen4 on, else an LFSR."""
    return State.vector_xorwow if hardware.vector_random_state else State.vector_lfsr


def draw(generator: State, state: np.ndarray, tile: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return random words uint32 (P, elements) for a tile of P partitions, and the next state of all lanes.

    The first P lanes advance, the others keep their state; `state` itself is not changed.

    Args:
        generator: Kind of generator.
        state: State of all lanes, uint32 (lanes, words).
        tile: The tile to fill, of which shape and elements per partition count.
    """
    rows = tile.shape[0]
    advance = random.advance_lfsr if generator is State.vector_lfsr else random.advance_xorwow
    words, lanes = advance(state[:rows], tile.free_size)
    after = state.copy()
    after[:rows] = lanes
    return words, after


def choose_state_engine(hardware: Hardware, engine: Engine) -> tuple[Engine, State]:
    """Return the engine whose generator state an instruction reads or writes, and the kind of that generator.

    unknown means GpSimd, which has a generator on every chip with readable state.

    Raises:
        RuleViolation: The chip's generator state cannot be read, or the engine has none.
    """
    generator_state_on_chip(hardware)
    if engine is Engine.unknown:
        engine = Engine.gpsimd
    rules.engine_can(engine, Engine.gpsimd, *((Engine.vector,) if hardware.vector_random_state else ()))
    return engine, State.vector_xorwow if engine is Engine.vector else State.gpsimd_xorwow


@rule("NKW-RANDOM-ENGINE", limit="nisa.engine.vector or nisa.engine.gpsimd", hint="leave engine out")
def names_engine(engine: Engine) -> None:
    """engine of rng, rand_get_state and rand_set_state is vector or gpsimd; the state belongs to that engine.

    Raises RuleViolation if the engine is unknown.
    """
    if engine is Engine.unknown:
        raise RuleViolation(names_engine, "engine=unknown")


@rule("NKW-RANDOM-STATE-CHIP", hint="nisa.set_rng_seed")
def generator_state_on_chip(hardware: Hardware) -> None:
    """rand_set_state and rand_get_state exist from gen3 on.

    Raises RuleViolation on an earlier chip.
    """
    if not hardware.random_state:
        raise RuleViolation(generator_state_on_chip, f"generator state on {hardware.name}")


@rule("NKW-RANDOM-STATE-SHAPE", hint="allocate it as a 2D uint32 tile of that shape")
def state_words(operand: str, tile: NkiTensor, engine: Engine) -> None:
    """Generator state is a 2D uint32 tile with 6 words per partition for GpSimd, 24 for Vector.

    Raises RuleViolation otherwise.
    """
    words = random.XORWOW_WORDS * (4 if engine is Engine.vector else 1)
    if tile.ndim != 2 or tile.shape[1] != words or tile.dtype != "uint32":
        raise RuleViolation(
            state_words,
            f"{operand} is {tile.shape} {tile.dtype} for engine {engine.name}",
            limit=f"({tile.shape[0]}, {words}) uint32",
        )
