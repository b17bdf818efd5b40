"""The program of each of three processes that torchrun starts for `test_processes`; it prints results as lines of JSON.

Each rank writes to a file of its own in the folder that is the argument; lines of one stream could run into each other.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

import simulate
from nkw.errors import Location
from simulate.isa.plan import Rendezvous
from simulate.run.processes import Processes

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402

from tests.run.rendezvous_kernels import crossed, gathered, left_out, reduced, summed_by_both_cores  # noqa: E402


def argument_of(rank: int, launch: int = 0) -> np.ndarray:
    """Return the argument of one rank; sums of it depend on their order."""
    return np.random.default_rng([rank, launch]).standard_normal((5, 7)).astype(np.float32)


def rendezvous(key: int) -> Rendezvous:
    """Return a rendezvous of all ranks that has no results."""
    return Rendezvous(key, True, (0, 1, 2), {"operation": "rendezvous"}, lambda operands: operands)


def main(folder: Path) -> None:
    """Print the results of this process's rank, for the test to compare."""
    world = simulate.World.from_torchrun("trn1")
    rank = world.rank
    everyone = ncc.ReplicaGroup([[0, 1, 2]])
    pair = ncc.ReplicaGroup([[0, 2], [1]])

    def say(**fields: object) -> None:
        with (folder / f"rank{rank}").open("a") as file:
            file.write(json.dumps({"rank": rank, **fields}) + "\n")

    def refused(topic: str, action: object) -> None:
        began = time.monotonic()
        try:
            action()  # type: ignore[operator]
        except simulate.NkwError as error:
            say(topic=topic, code=error.code, text=str(error), seconds=time.monotonic() - began)

    say(topic="world", size=world.size, ranks=world.ranks)
    for launch in range(3):
        done = world.launch(reduced, [((argument_of(rank, launch), everyone), {})], mode=simulate.Mode.replay)
        say(topic="reduced", launch=launch, mode=done.mode.value, bytes=done.outputs[0].tobytes().hex())
    shorter = (
        argument_of(rank)[:4] if rank == 1 else argument_of(rank)
    )  # one rank records a launch that the others replay
    refused(
        "replayed shapes",
        lambda: world.launch(reduced, [((shorter, everyone), {})], mode=simulate.Mode.replay),
    )
    dist.barrier()
    out = world.launch(gathered, [((argument_of(rank), pair, 1 if rank == 1 else 2), {})]).outputs[0]
    say(topic="gathered", bytes=out.tobytes().hex())
    both = simulate.World.from_torchrun("trn2", logical_core_size=2)
    out = both.launch(summed_by_both_cores, [((argument_of(rank), everyone), {})]).outputs[0]
    say(topic="both cores", bytes=out.tobytes().hex())
    say(topic="world gather", sums=[float(array.sum()) for array in world.gather([np.full(rank, 2.0)])])
    peers = Processes.join()
    met = [
        peers.post(rendezvous(index), [argument_of(rank, index)], Location("", 0, "")) for index in range(3)
    ]
    for index in (rank, (rank + 1) % 3, (rank + 2) % 3):  # each rank completes another one first
        _, arrived = peers.wait([met[index]])
        sums = [float(operands[0].sum()) for _, operands, _ in arrived]
        say(topic="several at once", index=index, sums=sums)
    refused("shapes", lambda: world.launch(reduced, [((argument_of(rank)[: 5 - rank], everyone), {})]))
    dist.barrier()
    refused("crossed", lambda: world.launch(crossed, [((argument_of(rank), rank), {})]))
    dist.barrier()
    refused("left out", lambda: world.launch(left_out, [((argument_of(rank), everyone, rank == 1), {})]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
