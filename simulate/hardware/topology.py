"""Collectives on an instance: the chip's record with rates and latencies by what joins the instance's chips.

One sweep is published, on a 4x4 torus of Trainium chips with four links of 96 GB/s each: 2 ranks on one chip, 8 on a
row of four chips, 32 on all. A row is a ring that uses two links of each chip, and reaches 67 GB/s of bus bandwidth;
the whole torus uses all four, and reaches 128, about the same share of what its links can carry. So a rate follows from
the links that a group of chips can use and from their bandwidth, and a latency from the number of chips, scaled by that
of two ranks on one chip. Groups inside one chip use none of the links and keep the chip's own figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulate.hardware.gen2 import TRN1
from simulate.hardware.instances import Instance
from simulate.hardware.record import Hardware, guessed

_SWEEP = "published sweep of all-reduce on one Trainium node, rates by links and their bandwidth"
_BY_LINKS = ("collective_mesh_gb_per_s", "collective_bus_gb_per_s")
_BY_CHIPS = ("collective_latency_ns", "collective_switch_bytes")
_ROW, _ALL = 8, 32  # ranks of the sweep on one row of four chips, and on all sixteen
_ROW_CHIPS = 4
_SERVER_GB_PER_S = 256.0
"""Of a Trainium3 chip to the others of its server of four; Amazon EC2 Trn3 architecture page."""
_RACKS_GB_PER_S = 256.0 + 320.0 + 128.0
"""Of a Trainium3 chip inside its server, to other servers, and to the other rack; same page."""


def on_instance(record: Hardware, instance: Instance) -> Hardware:
    """The record of a chip with the collectives of an instance; a rank is one core.

    Groups between two published sizes count as the larger. Groups of several instances are not modelled.
    """
    groups = _groups(record, instance)
    cores = record.physical_cores_per_chip
    numbers = {}
    for name in _BY_LINKS + _BY_CHIPS:
        own: Mapping[int, float] = getattr(record, name)
        sweep: Mapping[int, float] = getattr(TRN1, name)
        table = {ranks: value for ranks, value in own.items() if ranks <= cores}
        table.setdefault(cores, own[min(ranks for ranks in own if ranks >= cores)])
        for ranks, (by_chips, by_links, ratio) in groups.items():
            if name in _BY_LINKS:
                table[ranks] = sweep[by_links] * ratio
            else:
                table[ranks] = sweep[by_chips] * own[2] / sweep[2]
        if table != dict(own):
            numbers[name] = guessed(table, _SWEEP, instance.topology)
    return record.with_numbers(**numbers) if numbers else record


def _groups(record: Hardware, instance: Instance) -> dict[int, tuple[int, int, float]]:
    """By ranks of a group of chips: the ranks of the sweep it is like, by the number of chips and by the links that it
    uses, and the bandwidth of its links over those there.
    """
    bandwidth = instance.neuronlink_gb_per_s_per_chip
    if instance.chips == 1 or bandwidth is None:
        return {}
    cores, there = record.physical_cores_per_chip, TRN1.neuronlink_gb_per_s_per_chip
    if "ring of chips" in instance.topology:
        # Two links a chip, as the row of a torus uses them.
        ratio = bandwidth / (there / 2)
        return {cores * _ROW_CHIPS: (_ROW, _ROW, ratio), cores * instance.chips: (_ALL, _ROW, ratio)}
    if "torus" in instance.topology:
        ratio = bandwidth / there
        return {cores * _ROW_CHIPS: (_ROW, _ROW, ratio), cores * instance.chips: (_ALL, _ALL, ratio)}
    return {
        cores * _ROW_CHIPS: (_ROW, _ALL, _SERVER_GB_PER_S / there),
        cores * instance.chips: (_ALL, _ALL, _RACKS_GB_PER_S / there),
    }
