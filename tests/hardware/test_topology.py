"""Collectives by what joins the chips of an instance."""

from __future__ import annotations

import pytest

from simulate.errors import InvalidArgument
from simulate.hardware import INSTANCES, Hardware, hardware
from simulate.isa import costs

MB = 1_000_000


def all_reduce_us(target: str | Hardware, ranks: int, size: int) -> float:
    chip = hardware(target) if isinstance(target, str) else target
    return costs.collective(chip, ranks, size, 1.0).meeting_ns / 1000.0


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_is_its_chip_but_for_collectives(name: str) -> None:
    chip, own = hardware(INSTANCES[name].target), hardware(name)
    differing = {field for field in chip.provenance if getattr(chip, field) != getattr(own, field)}
    assert all(field.startswith("collective_") for field in differing)
    assert hardware(name) is own


@pytest.mark.parametrize("name", INSTANCES)
def test_inside_a_chip_no_link_counts(name: str) -> None:
    chip, own = hardware(INSTANCES[name].target), hardware(name)
    for size in (1000, 100 * MB):
        for ranks in (2, chip.physical_cores_per_chip):
            assert all_reduce_us(own, ranks, size) == all_reduce_us(chip, ranks, size)


@pytest.mark.parametrize("name", INSTANCES)
def test_tables_reach_to_the_last_core(name: str) -> None:
    own = hardware(name)
    for table in (
        own.collective_latency_ns,
        own.collective_mesh_gb_per_s,
        own.collective_bus_gb_per_s,
        own.collective_switch_bytes,
    ):
        assert max(table) == INSTANCES[name].physical_cores


def test_the_node_of_the_sweep_keeps_its_figures() -> None:
    assert hardware("trn1.32xlarge") is hardware("trn1")


@pytest.mark.parametrize("ranks", [8, 32])
def test_links_twice_as_fast_halve_what_bytes_take(ranks: int) -> None:
    slow, fast = hardware("trn1.32xlarge"), hardware("trn1n.32xlarge")
    latency = slow.collective_latency_ns[ranks] / 1000.0
    assert fast.collective_latency_ns[ranks] == slow.collective_latency_ns[ranks]
    wires = [all_reduce_us(chip, ranks, 256 * MB) - latency for chip in (slow, fast)]
    assert wires[0] == pytest.approx(2 * wires[1])


def test_a_ring_of_chips_is_a_row_of_a_torus_with_its_own_links() -> None:
    ring, torus = hardware("inf2.48xlarge"), hardware("trn1.32xlarge")
    per_link = (206.0 / 2) / (384.0 / 4)
    assert ring.collective_bus_gb_per_s[24] == torus.collective_bus_gb_per_s[8] * per_link
    assert ring.collective_bus_gb_per_s[8] == ring.collective_bus_gb_per_s[24]


def test_four_chips_of_a_torus_use_half_of_their_links() -> None:
    own, sweep = hardware("trn2.48xlarge"), hardware("trn1")
    assert own.collective_bus_gb_per_s[32] == sweep.collective_bus_gb_per_s[8] * 1024.0 / 384.0
    assert own.collective_bus_gb_per_s[128] == sweep.collective_bus_gb_per_s[32] * 1024.0 / 384.0


def test_more_servers_use_more_links() -> None:
    own = hardware("trn3 UltraServer Gen1")
    assert own.collective_bus_gb_per_s[512] == own.collective_bus_gb_per_s[32] * (256 + 320 + 128) / 256


def test_refuses_an_unknown_instance() -> None:
    with pytest.raises(InvalidArgument, match="no known target"):
        hardware("trn2.47xlarge")
