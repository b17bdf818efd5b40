"""Programs of random kernels on new arrays, exactly and fused, against eager launches on the same arrays."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from simulate.replay import Program, why_not_replayed
from tests.replay.test_fusion import random_kernel, whole_numbers


def replayed_instructions(seed: int) -> int:
    """Compare the replays of one random kernel; returns how many instructions it has."""
    rows = (128, 127, 33, 129 - 64)[seed % 4]

    def arrays(number: int) -> list[np.ndarray]:
        first, second = whole_numbers(number, rows, 64), whole_numbers(number + 1, rows, 64)
        return [first, second, whole_numbers(number + 2, 64, 64, largest=1)]

    kernel, target = random_kernel(seed), ("trn1", "trn2", "trn3")[seed % 3]
    chip = simulate.hardware(target)
    done = simulate.launch(kernel, [(tuple(arrays(seed)), {})], chip)
    assert why_not_replayed(done) is None
    program = Program(done)
    eager = arrays(seed + 100)
    (wanted,) = simulate.launch(kernel, [(tuple(eager), {})], chip).outputs
    for exact in (True, False):
        if not exact:
            program.rewrite()
            assert program.why_not_fused is None
        arguments = arrays(seed + 100)
        (seen,) = program.run([arguments], exact=exact)
        for one, other in zip((*seen, *arguments), (*wanted, *eager), strict=True):
            assert one.tobytes() == other.tobytes(), (seed, exact)
    return len(done.streams[0])


@pytest.mark.slow
def test_programs_of_random_kernels_give_eagers_bytes() -> None:
    assert sum(replayed_instructions(seed) for seed in range(1000, 1012)) > 300


@pytest.mark.deep
def test_programs_of_100_000_random_instructions_give_eagers_bytes() -> None:
    seed, instructions = 2000, 0
    while instructions < 100_000:
        instructions += replayed_instructions(seed)
        seed += 1
