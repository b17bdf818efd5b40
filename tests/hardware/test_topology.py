"""Collectives by what joins the chips of an instance."""

from __future__ import annotations

import pytest

from nkw.errors import InvalidArgument
from simulate.hardware import INSTANCES, Hardware, hardware, instance
from simulate.hardware.topology import add_group_across
from simulate.isa import dma_costs

MB = 1_000_000


def all_reduce_us(target: str | Hardware, ranks: int, size: int) -> float:
    chip = hardware(target) if isinstance(target, str) else target
    return dma_costs.collective(chip, ranks, size, 1.0).rendezvous_ns / 1000.0


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_is_its_chip_but_for_collectives(name: str) -> None:
    chip, joined = hardware(INSTANCES[name].target), hardware(name)
    differing = {field for field in chip.provenance if getattr(chip, field) != getattr(joined, field)}
    assert all(field.startswith("collective_") for field in differing)
    assert hardware(name) is joined


@pytest.mark.parametrize("name", INSTANCES)
def test_inside_a_chip_no_link_counts(name: str) -> None:
    chip, joined = hardware(INSTANCES[name].target), hardware(name)
    for size in (1000, 100 * MB):
        for ranks in (2, chip.physical_cores_per_chip):
            assert all_reduce_us(joined, ranks, size) == all_reduce_us(chip, ranks, size)


@pytest.mark.parametrize("name", INSTANCES)
def test_tables_reach_to_the_last_core(name: str) -> None:
    joined = hardware(name)
    for table in (
        joined.collective_latency_ns,
        joined.collective_mesh_gb_per_s,
        joined.collective_bus_gb_per_s,
        joined.collective_switch_bytes,
    ):
        assert max(table) == INSTANCES[name].physical_cores


@pytest.mark.parametrize(
    "name",
    [name for name, instance_record in INSTANCES.items() if instance_record.target in ("trn2", "trn3")],
)
def test_logical_cores_are_half_as_many_ranks_on_the_same_chips(name: str) -> None:
    """Of a chip or more, n ranks of two cores are on the chips of 2 n physical cores; fewer are on one chip."""
    physical, logical = hardware(name), hardware(name, 2)
    whole_chip, cores = physical.physical_cores_per_chip // 2, INSTANCES[name].physical_cores // 2
    ranks = 4 * whole_chip
    while ranks <= cores:
        assert all_reduce_us(logical, ranks, 100_000) == all_reduce_us(physical, 2 * ranks, 100_000)
        ranks *= 4
    assert all_reduce_us(logical, 2, 1000) == all_reduce_us(physical, 2, 1000)
    assert max(logical.collective_latency_ns) == cores


def test_the_node_of_the_sweep_keeps_its_figures() -> None:
    assert hardware("trn1.32xlarge") is hardware("trn1")


@pytest.mark.parametrize("ranks", [8, 32])
def test_links_twice_as_fast_halve_what_bytes_take(ranks: int) -> None:
    slow, fast = hardware("trn1.32xlarge"), hardware("trn1n.32xlarge")
    latency = slow.collective_ring_latency_ns[ranks] / 1000.0  # above the switch size, round the ring
    assert fast.collective_ring_latency_ns[ranks] == slow.collective_ring_latency_ns[ranks]
    assert fast.collective_latency_ns[ranks] == slow.collective_latency_ns[ranks]
    wires = [all_reduce_us(chip, ranks, 256 * MB) - latency for chip in (slow, fast)]
    assert wires[0] == pytest.approx(2 * wires[1])


def test_a_ring_of_chips_is_a_row_of_a_torus_with_its_own_links() -> None:
    ring, torus = hardware("inf2.48xlarge"), hardware("trn1.32xlarge")
    per_link = (206.0 / 2) / (384.0 / 4)
    assert ring.collective_bus_gb_per_s[24] == torus.collective_bus_gb_per_s[8] * per_link
    assert ring.collective_bus_gb_per_s[8] == ring.collective_bus_gb_per_s[24]


def test_four_chips_of_a_torus_use_half_of_their_links() -> None:
    joined, sweep = hardware("trn2.48xlarge"), hardware("trn1")
    assert joined.collective_bus_gb_per_s[32] == sweep.collective_bus_gb_per_s[8] * 1024.0 / 384.0
    assert joined.collective_bus_gb_per_s[128] == sweep.collective_bus_gb_per_s[32] * 1024.0 / 384.0


def test_more_servers_use_more_links() -> None:
    joined = hardware("trn3 UltraServer Gen1")
    assert joined.collective_bus_gb_per_s[512] == joined.collective_bus_gb_per_s[32] * (256 + 320 + 128) / 256


def test_an_ultraserver_is_four_instances_and_their_ring() -> None:
    joined, member = instance("trn2 UltraServer"), INSTANCES["trn2u.48xlarge"]
    assert (joined.chips, joined.physical_cores) == (64, 512)
    assert joined.hbm_bytes == 4 * member.hbm_bytes
    chip, inside = hardware("trn2 UltraServer"), hardware("trn2u.48xlarge")
    for ranks in (2, 8, 32, 128):
        assert all_reduce_us(chip, ranks, 100 * MB) == all_reduce_us(inside, ranks, 100 * MB)
    # Doubling and halving among four takes four steps; sixteen rings, of two links to a row's two.
    latency_us = (chip.collective_latency_ns[512] - inside.collective_latency_ns[128]) / 1000.0
    assert latency_us == pytest.approx(4 * 1.5)
    ring_gb_per_s = 16 * 67.0 * 256.0 / (384.0 / 2)
    each_byte = 2 * 127 / 128 / inside.collective_bus_gb_per_s[128] + 2 * 3 / 4 / ring_gb_per_s
    assert 2 * 511 / 512 / chip.collective_bus_gb_per_s[512] == pytest.approx(each_byte)


@pytest.mark.parametrize(("count", "steps"), [(2, 2), (3, 4), (4, 4), (5, 6), (16, 8)])
def test_several_instances_add_steps_and_bytes_over_efa(count: int, steps: int) -> None:
    joined, one = hardware(f"{count} x trn1.32xlarge"), hardware("trn1.32xlarge")
    ranks = 32 * count
    assert max(joined.collective_latency_ns) == ranks
    for size in (256_000, 512 * MB):
        added = all_reduce_us(joined, ranks, size) - all_reduce_us(one, 32, size)
        sent_us = 2 * (count - 1) / count * size / 100.0 / 1000.0
        assert added == pytest.approx(steps * 165.0 + sent_us, rel=1e-9)


def test_several_instances_agree_with_the_sweeps_over_nodes() -> None:
    """All-reduces of 32 ranks on two and four nodes, 355 and 705 us; 64 ranks on two, 398 us."""
    one = hardware("trn1.32xlarge")
    for nodes, measured_us in ((2, 355.2), (4, 705.4)):
        ranks_per_node = 32 // nodes
        spread = add_group_across(
            one, nodes, ranks_per_node, 100.0 * ranks_per_node / 32, one.collective_efa_step_ns, "test"
        )
        assert all_reduce_us(spread, 32, 262_144) == pytest.approx(measured_us, rel=0.02)
    assert all_reduce_us("2 x trn1.32xlarge", 64, 102_400) == pytest.approx(398.0, rel=0.15)


@pytest.mark.parametrize("name", ["2 x trn1n.32xlarge", "3 x trn2 UltraServer", "2 x trn3 UltraServer Gen1"])
def test_groups_inside_one_of_several_go_over_its_own_links(name: str) -> None:
    joined, one = hardware(name), hardware(name[4:])
    cores = INSTANCES[name[4:]].physical_cores
    for ranks in (2, cores):
        assert all_reduce_us(joined, ranks, 100 * MB) == all_reduce_us(one, ranks, 100 * MB)
    assert all_reduce_us(joined, cores + 1, 100 * MB) > all_reduce_us(one, cores, 100 * MB)
    assert instance(name).physical_cores == int(name[0]) * cores


def test_spaces_in_several_do_not_count() -> None:
    assert instance("4xtrn1.32xlarge").name == instance("4x trn1.32xlarge").name == "4 x trn1.32xlarge"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "1 x trn1.32xlarge",
            "asks for 1 instances, and a group has at least two; for a single instance write 'trn1.32xlarge'",
        ),
        ("0 x trn1.32xlarge", "asks for 0 instances, and a group has at least two"),
        (
            "2 x inf2.48xlarge",
            "no EFA rate of inf2.48xlarge is on record; instance types with one are trn1.32xlarge, ",
        ),
        ("2 x trn2.3xlarge", "no EFA rate of trn2.3xlarge is on record"),
        ("2 x trn2.47xlarge", "is not known; did you mean 2 x trn2.48xlarge\\? known are trn1.2xlarge, "),
        ("2 x p5", "instance '2 x p5' is not known; known are trn1.2xlarge, "),
        ("10000 x trn1.32xlarge", "is not known"),
        ("2 x 2 x trn1.32xlarge", "is not known"),
    ],
)
def test_refuses_several_of_what_cannot_be_joined(name: str, sentence: str) -> None:
    for look_up in (instance, hardware):
        with pytest.raises(InvalidArgument, match=sentence) as refused:
            look_up(name)
        assert refused.value.code == "NKW-INSTANCE"


def test_refuses_an_unknown_instance() -> None:
    with pytest.raises(InvalidArgument, match="no known target"):
        hardware("trn2.47xlarge")
