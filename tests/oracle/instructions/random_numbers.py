"""Random numbers: which bits come is not documented, so what is compared is where, in which range, and the state."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.machine import Core, Operand


def rng(core: Core, dst: Operand, engine: str = "unknown") -> None:
    """Compute dst = random bits."""
    core.generators.clear()
    core.write(dst, np.zeros(dst.shape), np.full(dst.shape, np.inf))


def rand2(core: Core, dst: Operand, min: Any, max: Any) -> None:
    """Compute dst = numbers from min to max."""
    low, high = (np.broadcast_to(core.column(bound), dst.flat().shape) for bound in (min, max))
    core.generators.clear()
    core.write(dst, (low + high) / 2, (high - low) / 2)


def dropout(core: Core, dst: Operand, data: Operand, prob: Any) -> None:
    """Compute dst = 0 where prob is 1, data where it is 0; other probabilities are not drawn."""
    dropped, bits = core.column(prob) == 1, core.bits(data.flat()).astype(np.int64)
    core.generators.clear()
    core.write_bits(dst, np.where(dropped, 0, bits))


def set_rng_seed(core: Core, src_seeds: Operand) -> None:
    """Set another state of the Vector generator; which one is not documented."""
    core.bits(src_seeds)
    core.generators.clear()


def rand_set_state(core: Core, src_seeds: Operand, engine: str = "gpsimd") -> None:
    """Set the words of the lanes' generators of an engine, which hold until numbers are drawn."""
    for lane, words in enumerate(core.bits(src_seeds.flat()).astype(np.int64)):
        core.generators[engine, lane] = words


def rand_get_state(core: Core, dst: Operand, engine: str = "gpsimd") -> None:
    """Compute dst = the words of the lanes' generators, as far as they are known."""
    to = dst.flat()
    for lane in range(to.shape[0]):
        row = Operand(to.memory, to.format, to.addresses[lane : lane + 1])
        words = core.generators.get((engine, lane))
        if words is None:
            core.write(row, np.zeros(row.shape), np.full(row.shape, np.inf))
        else:
            core.write_bits(row, words)
