"""The program of each of three processes for `test_processes`: replayed launches, until one rank is gone.

The arguments are the rank that fails, and how. A rank that this stops prints the code of its error and exits with 3.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import simulate

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402

from tests.run.rendezvous_kernels import reduced  # noqa: E402

LAUNCHES_BEFORE = 3


def main(failing: int, how: str) -> int:
    """Return the exit code of this process's rank."""
    world = simulate.World.from_torchrun("trn1")
    everyone = ncc.ReplicaGroup([[0, 1, 2]])
    for launch in range(LAUNCHES_BEFORE + 1):
        if launch == LAUNCHES_BEFORE and world.rank == failing:
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "ends":
                return 0
            raise ValueError(how)
        try:
            world.launch(reduced, [((np.ones((5, 7), np.float32), everyone), {})], mode=simulate.Mode.replay)
        except simulate.NkwError as error:
            print(error.code, flush=True)
            return 3
    return 4


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
