"""Collectives on an instance: the chip's record with rates and latencies by what joins the instance's chips.

One sweep is published, on a 4x4 torus of Trainium chips with four links of 96 GB/s each: 2 ranks on one chip, 8 on a
row of four chips, 16 on two rows, 32 on all. One or two rows are a ring that uses two links of each chip, and reaches
67 GB/s of bus bandwidth; the whole torus uses all four, and reaches 128, about the same share of what its links can
carry. So a rate follows from
the links that a group of chips can use and from their bandwidth, and a latency from the number of chips, scaled by that
of two ranks on one chip. Groups inside one chip use none of the links and keep the chip's own figures.

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
"""Of a Trainium3 chip to the others of its server of four; Amazon EC2 Trn3 architecture page."""
_RACKS_GB_PER_S = 256.0 + 320.0 + 128.0
"""Of a Trainium3 chip inside its server, to other servers, and to the other rack; same page."""


def on_instance(
    record: Hardware, place: Instance, swept: Hardware = TRN1, logical_core_size: int = 1
) -> Hardware:
    """The record of a chip with the collectives of an instance, or of several; a rank is one logical core.

    `swept` is the record of the chip of the published sweep, whose tables are scaled. `logical_core_size` is the number
    of physical cores of a rank: as many ranks are on more chips where it is larger.
    Groups between two published sizes count as the larger, and those larger than an instance as all of its cores.
    """
    if place.part is not None and place.between_gb_per_s is not None:
        part = instance(place.part)
        inside = on_instance(record, part, swept, logical_core_size)
        if place.ring_gb_per_s_per_chip is None:
            rate, step_ns = place.between_gb_per_s, record.collective_efa_step_ns
        else:
            rate, step_ns = place.between_gb_per_s * _row_share(swept), record.collective_hop_ns
        ranks_each = part.physical_cores // logical_core_size
        return across(inside, place.parts, ranks_each, rate, step_ns, place.topology)
    cores = record.physical_cores_per_chip // logical_core_size
    groups = _groups(cores, place, swept)
    numbers = {}
    for name in _BY_LINKS + _BY_CHIPS:
        own: Mapping[int, float] = getattr(record, name)
        sweep: Mapping[int, float] = getattr(swept, name)
        table = {ranks: value for ranks, value in own.items() if ranks <= cores}
        table.setdefault(cores, own[min(ranks for ranks in own if ranks >= cores)])
        for ranks, (by_chips, by_links, ratio) in groups.items():
            if name in _BY_LINKS:
                table[ranks] = sweep[by_links] * ratio
            else:
                table[ranks] = sweep[by_chips] * own[2] / sweep[2]
        if table != dict(own):
            overlay = record.provenance[name].overlay or swept.provenance[name].overlay
            numbers[name] = replace(guessed(table, _SWEEP, place.topology), overlay=overlay)
    return record.with_numbers(**numbers) if numbers else record


def across(
    record: Hardware, parts: int, ranks_each: int, gb_per_s: float, step_ns: float, note: str
) -> Hardware:
    """A record with a group of `ranks_each` ranks on each of `parts` instances, and none that is larger.

    `gb_per_s` is what the ranks of one instance send to the others together, `step_ns` what a step between instances
    takes before its bytes.
    """
    ranks = parts * ranks_each
    steps = 2 * math.ceil(math.log2(parts))
    # ns per byte of payload: all-reduce among `parts`, of the share that every rank of an instance holds.
    between = 2 * (parts - 1) / parts / gb_per_s
    latency = of_ranks(record.collective_latency_ns, ranks_each)
    mesh = of_ranks(record.collective_mesh_gb_per_s, ranks_each)
    bus = of_ranks(record.collective_bus_gb_per_s, ranks_each)
    inside = 2 * (ranks_each - 1) / ranks_each / bus
    ring_latency = of_ranks(record.collective_ring_latency_ns, ranks_each)
    added = {
        "collective_latency_ns": latency + steps * step_ns,
        "collective_ring_latency_ns": ring_latency + steps * step_ns,
        "collective_mesh_gb_per_s": 1.0 / (1.0 / mesh + between),
        "collective_bus_gb_per_s": 2 * (ranks - 1) / ranks / (inside + between),
        "collective_switch_bytes": of_ranks(record.collective_switch_bytes, ranks_each),
    }
    tables = {
        name: {
            **{known: each for known, each in getattr(record, name).items() if known < ranks},
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


def of_ranks(by_ranks: Mapping[int, float], ranks: int) -> float:
    """The entry for the smallest known rank count that is at least `ranks`, else for the largest."""
    enough = [known for known in by_ranks if known >= ranks]
    return by_ranks[min(enough) if enough else max(by_ranks)]


def _row_share(swept: Hardware) -> float:
    """The share of its two links' bandwidth that a row of chips reaches in the sweep."""
    return swept.collective_bus_gb_per_s[_ROW] / (swept.neuronlink_gb_per_s_per_chip / 2)


def _groups(cores: int, place: Instance, swept: Hardware) -> dict[int, tuple[int, int, float]]:
    """By ranks of a group of chips: the ranks of the sweep it is like, by the number of chips and by the links that it
    uses, and the bandwidth of its links over those there. `cores` are the logical cores of a chip.
    """
    bandwidth = place.neuronlink_gb_per_s_per_chip
    if place.chips == 1 or bandwidth is None:
        return {}
    there = swept.neuronlink_gb_per_s_per_chip
    if "ring of chips" in place.topology:
        # Two links a chip, as the row of a torus uses them.
        ratio = bandwidth / (there / 2)
        return {cores * _ROW_CHIPS: (_ROW, _ROW, ratio), cores * place.chips: (_ALL, _ROW, ratio)}
    if "torus" in place.topology:
        ratio = bandwidth / there
        return {
            cores * _ROW_CHIPS: (_ROW, _ROW, ratio),
            cores * 2 * _ROW_CHIPS: (_HALF, _HALF, ratio),
            cores * place.chips: (_ALL, _ALL, ratio),
        }
    return {
        cores * _ROW_CHIPS: (_ROW, _ALL, _SERVER_GB_PER_S / there),
        cores * place.chips: (_ALL, _ALL, _RACKS_GB_PER_S / there),
    }
