"""Collectives on an instance: rates and latencies of the chip's record, changed for the links between its chips.

One sweep is published, on a 4x4 torus of Trainium chips with four links of 96 GB/s each: 2 ranks on one chip, 8 on a
row of four chips, 16 on two rows, 32 on all. One or two rows are a ring that uses two links of each chip, and reaches
67 GB/s of bus bandwidth; the whole torus uses all four, and reaches 128, about the same share of what its links can
carry. So a rate follows from the links that a group of chips can use and from their bandwidth. A latency follows from
the number of chips, scaled by the latency of two ranks on one chip. Groups inside one chip use none of the links and
keep the chip's own figures. The group of a collective is the set of ranks that take part.

Several instances reduce in two levels, as the Neuron guide to inter-node collectives describes it: inside each, and
between those ranks that have the same place, each with its share of the bytes. Between instances they double and halve,
which takes 2 log2 of their number in steps. EFA carries its full documented rate, shared by the ranks of an instance;
the Z ring of an UltraServer as much of its links as a row of chips does of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from simulate.hardware.gen2 import TRN1
from simulate.hardware.instances import Instance, instance
from simulate.hardware.record import Hardware, guessed

_SWEEP = "published sweep of all-reduce on one Trainium node, rates by links and their bandwidth"
_BY_LINKS = ("collective_mesh_gb_per_s", "collective_bus_gb_per_s")
_BY_CHIPS = ("collective_latency_ns", "collective_ring_latency_ns", "collective_switch_bytes")
_ROW, _HALF, _ALL = 8, 16, 32  # ranks of the sweep on one row of four chips, on two rows, and on all sixteen
_ROW_CHIPS = 4
_LEVELS = "Neuron guide to inter-node collectives, hierarchical all-reduce; rates by links and EFA"
_SERVER_GB_PER_S = 256.0
"""Bandwidth of a Trainium3 chip to the other chips of its server of four; Amazon EC2 Trn3 architecture page."""
_RACKS_GB_PER_S = 256.0 + 320.0 + 128.0
"""Bandwidth of a Trainium3 chip inside its server, to other servers and to the other rack; same page."""


def add_instance_collectives(
    record: Hardware, machine: Instance, swept: Hardware = TRN1, logical_core_size: int = 1
) -> Hardware:
    """Return the record of a chip with the collectives of an instance, or of several instances.

    A rank is one logical core. A group whose size is between two published sizes counts as the larger one; a group
    larger than the instance counts as all of its cores.

    Args:
        record: Record of the chip.
        machine: The instance, or several equal instances.
        swept: Record of the chip of the published sweep, whose tables are scaled.
        logical_core_size: Physical cores of a rank.
    """
    if machine.member is not None and machine.between_gb_per_s is not None:
        member = instance(machine.member)
        inside = add_instance_collectives(record, member, swept, logical_core_size)
        if machine.ring_gb_per_s_per_chip is None:
            rate, step_ns = machine.between_gb_per_s, record.collective_efa_step_ns
        else:
            rate, step_ns = machine.between_gb_per_s * _compute_row_share(swept), record.collective_hop_ns
        ranks_each = member.physical_cores // logical_core_size
        return add_group_across(inside, machine.members, ranks_each, rate, step_ns, machine.topology)
    cores = record.physical_cores_per_chip // logical_core_size
    groups = _list_groups(cores, machine, swept)
    numbers = {}
    for name in _BY_LINKS + _BY_CHIPS:
        current: Mapping[int, float] = getattr(record, name)
        sweep: Mapping[int, float] = getattr(swept, name)
        table = {ranks: value for ranks, value in current.items() if ranks <= cores}
        table.setdefault(cores, current[min(ranks for ranks in current if ranks >= cores)])
        for ranks, (by_chips, by_links, ratio) in groups.items():
            if name in _BY_LINKS:
                table[ranks] = sweep[by_links] * ratio
            else:
                table[ranks] = sweep[by_chips] * current[2] / sweep[2]
        if table != dict(current):
            overlay = record.provenance[name].overlay or swept.provenance[name].overlay
            numbers[name] = replace(guessed(table, _SWEEP, machine.topology), overlay=overlay)
    return record.with_numbers(**numbers) if numbers else record


def add_group_across(
    record: Hardware, members: int, ranks_each: int, gb_per_s: float, step_ns: float, note: str
) -> Hardware:
    """Return a copy of a record whose tables of collectives have an entry for a group over several instances.

    The entry is under members * ranks_each ranks. Entries of larger groups are dropped, so that it is the last.

    Args:
        record: Record with the collectives inside one instance.
        members: Number of instances.
        ranks_each: Ranks of the group on each instance.
        gb_per_s: Rate at which all ranks of one instance together send to the other instances.
        step_ns: Latency of one step between instances; there are 2 log2(members) of them.
        note: Note of the new numbers.
    """
    ranks = members * ranks_each
    steps = 2 * math.ceil(math.log2(members))
    # ns per byte of payload: all-reduce among `members`, of the share that every rank of an instance holds.
    between = 2 * (members - 1) / members / gb_per_s
    latency = find_entry(record.collective_latency_ns, ranks_each)
    mesh = find_entry(record.collective_mesh_gb_per_s, ranks_each)
    bus = find_entry(record.collective_bus_gb_per_s, ranks_each)
    inside = 2 * (ranks_each - 1) / ranks_each / bus
    ring_latency = find_entry(record.collective_ring_latency_ns, ranks_each)
    added = {
        "collective_latency_ns": latency + steps * step_ns,
        "collective_ring_latency_ns": ring_latency + steps * step_ns,
        "collective_mesh_gb_per_s": 1.0 / (1.0 / mesh + between),
        "collective_bus_gb_per_s": 2 * (ranks - 1) / ranks / (inside + between),
        "collective_switch_bytes": find_entry(record.collective_switch_bytes, ranks_each),
    }
    tables = {
        name: {
            **{known: figure for known, figure in getattr(record, name).items() if known < ranks},
            ranks: value,
        }
        for name, value in added.items()
    }
    return record.with_numbers(
        **{
            name: replace(guessed(table, _LEVELS, note), overlay=record.provenance[name].overlay)
            for name, table in tables.items()
        }
    )


def find_entry(by_ranks: Mapping[int, float], ranks: int) -> float:
    """Return the entry of a table by ranks for a group of `ranks`.

    This is the entry of the smallest number of ranks in the table that is at least `ranks`, else of the largest.
    """
    enough = [known for known in by_ranks if known >= ranks]
    return by_ranks[min(enough) if enough else max(by_ranks)]


def _compute_row_share(swept: Hardware) -> float:
    """Return the share of the bandwidth of two links that a ring of four chips reached in the published sweep."""
    return swept.collective_bus_gb_per_s[_ROW] / (swept.neuronlink_gb_per_s_per_chip / 2)


def _list_groups(cores: int, machine: Instance, swept: Hardware) -> dict[int, tuple[int, int, float]]:
    """Return which entries of the published sweep describe groups of ranks over several chips, by number of ranks.

    Args:
        cores: The logical cores of a chip.
        machine: The instance.
        swept: The record of the chip of the sweep.

    Returns:
        For each number of ranks (rank count of the sweep for latencies: as many chips; rank count of the sweep for
        rates: as many links of a chip; factor on those rates: the ratio of link bandwidths). Empty for an instance of
        one chip, or without a published link rate.
    """
    bandwidth = machine.neuronlink_gb_per_s_per_chip
    if machine.chips == 1 or bandwidth is None:
        return {}
    swept_bandwidth = swept.neuronlink_gb_per_s_per_chip
    if "ring of chips" in machine.topology:
        # Two links a chip, as the row of a torus uses them.
        ratio = bandwidth / (swept_bandwidth / 2)
        return {cores * _ROW_CHIPS: (_ROW, _ROW, ratio), cores * machine.chips: (_ALL, _ROW, ratio)}
    if "torus" in machine.topology:
        ratio = bandwidth / swept_bandwidth
        return {
            cores * _ROW_CHIPS: (_ROW, _ROW, ratio),
            cores * 2 * _ROW_CHIPS: (_HALF, _HALF, ratio),
            cores * machine.chips: (_ALL, _ALL, ratio),
        }
    return {
        cores * _ROW_CHIPS: (_ROW, _ALL, _SERVER_GB_PER_S / swept_bandwidth),
        cores * machine.chips: (_ALL, _ALL, _RACKS_GB_PER_S / swept_bandwidth),
    }
