"""Builder of collectives among the cores of one instance, or of several."""

from __future__ import annotations

import re

import nki.collectives as ncc
import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Quantity, Run, Schedule, array, chip_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import collectives
from simulate.hardware import INSTANCES, hardware, instance
from simulate.hardware.topology import add_group_across

_NODE = "trn1.32xlarge"  # which the sweeps over several nodes are consistent with


def build(entry: Entry) -> Case:
    """Return the case of an all-reduce or an all-gather timed alone; its ranks are the entry's cores.

    Raises NotCovered for other collectives, a size that is not given in bytes, and more ranks than any instance has
    cores.
    """
    chip = chip_of(entry)
    if "host" in entry.measured:
        raise NotCovered("the time of a whole graph on the host, of which the collective is a small part")
    if entry.says("framework-compiled"):
        raise NotCovered("an estimate of the authors, not a measurement of one collective")
    size = re.search(r"(\d+) B", entry.shapes)
    if size is None:
        raise NotCovered(f"shapes {entry.shapes!r} give no size in bytes")
    ranks, most = entry.cores, max(record.physical_cores for record in INSTANCES.values())
    if ranks > most:
        raise NotCovered(f"{ranks:,} ranks; the largest instance on record has {most:,} cores")
    nodes = _nodes(entry)
    if nodes > 1:
        ranks_per_node, node = ranks // nodes, instance(_NODE)
        assert node.efa_gbit_per_s is not None
        efa = node.efa_gbit_per_s / 8 * ranks_per_node / node.physical_cores
        chip = add_group_across(
            hardware(_NODE), nodes, ranks_per_node, efa, chip.collective_efa_step_ns, entry.kernel
        )
    group = ncc.ReplicaGroup([list(range(ranks))])
    data = array((1, int(size.group(1))), np.uint8)
    if entry.says("all-reduce"):
        data = array((1, int(size.group(1)) // 4), np.float32)
        kernel, extra = collectives.all_reduce, ()
    elif entry.says("all-gather"):
        kernel, extra = collectives.all_gather, (ranks,)  # type: ignore[assignment]
    else:
        raise NotCovered("neither an all-reduce nor an all-gather")
    collective = "all_reduce" if entry.says("all-reduce") else "all_gather"
    arguments = tuple((data, group, *extra) for _ in range(ranks))
    return Case(chip, (Run(kernel, arguments),), Quantity.latency, Schedule.collective, collective)


def _nodes(entry: Entry) -> int:
    """Return the number of nodes that the description names, 1 if it names none."""
    if entry.says("two nodes"):
        return 2
    match = re.search(r"(\d+) nodes|(\d+) node\(s\)", entry.kernel)
    return int(match[1] or match[2]) if match else 1
