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


def part(rank: int, launch: int = 0) -> np.ndarray:
    """The argument of one rank; sums of it depend on their order."""
    return np.random.default_rng([rank, launch]).standard_normal((5, 7)).astype(np.float32)


def rendezvous(place: int) -> Rendezvous:
    """A rendezvous of all ranks that has no results."""
    return Rendezvous(place, True, (0, 1, 2), {"operation": "rendezvous"}, lambda operands: operands)


def main(folder: Path) -> None:
    """Print the results of this process's rank, for the test to compare."""
    world = simulate.World.of_processes("trn1")
    rank = world.rank
    everyone = ncc.ReplicaGroup([[0, 1, 2]])
    pair = ncc.ReplicaGroup([[0, 2], [1]])

    def say(**found: object) -> None:
        with (folder / f"rank{rank}").open("a") as file:
            file.write(json.dumps({"rank": rank, **found}) + "\n")

    def refused(what: str, action: object) -> None:
        began = time.monotonic()
        try:
            action()  # type: ignore[operator]
        except simulate.NkwError as error:
            say(what=what, code=error.code, text=str(error), seconds=time.monotonic() - began)

    say(what="world", size=world.size, here=world.ranks)
    for launch in range(3):
        done = world.launch(reduced, [((part(rank, launch), everyone), {})], mode=simulate.Mode.replay)
        say(what="reduced", launch=launch, mode=done.mode.value, bytes=done.outputs[0].tobytes().hex())
    shorter = part(rank)[:4] if rank == 1 else part(rank)  # one rank records a launch that the others replay
    refused(
        "replayed shapes",
        lambda: world.launch(reduced, [((shorter, everyone), {})], mode=simulate.Mode.replay),
    )
    dist.barrier()
    out = world.launch(gathered, [((part(rank), pair, 1 if rank == 1 else 2), {})]).outputs[0]
    say(what="gathered", bytes=out.tobytes().hex())
    both = simulate.World.of_processes("trn2", logical_core_size=2)
    out = both.launch(summed_by_both_cores, [((part(rank), everyone), {})]).outputs[0]
    say(what="both cores", bytes=out.tobytes().hex())
    say(what="world gather", sums=[float(each.sum()) for each in world.gather([np.full(rank, 2.0)])])
    peers = Processes.join()
    met = [peers.post(rendezvous(place), [part(rank, place)], Location("", 0, "")) for place in range(3)]
    for place in (rank, (rank + 1) % 3, (rank + 2) % 3):  # each rank completes another one first
        _, arrived = peers.wait([met[place]])
        sums = [float(operands[0].sum()) for _, operands, _ in arrived]
        say(what="several at once", place=place, sums=sums)
    refused("shapes", lambda: world.launch(reduced, [((part(rank)[: 5 - rank], everyone), {})]))
    dist.barrier()
    refused("crossed", lambda: world.launch(crossed, [((part(rank), rank), {})]))
    dist.barrier()
    refused("left out", lambda: world.launch(left_out, [((part(rank), everyone, rank == 1), {})]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
