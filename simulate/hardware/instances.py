"""EC2 instance types, UltraServers and groups of instances: their chips, memory and links, with sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nkw.errors import InvalidArgument
from nkw.suggestions import did_you_mean
from simulate.hardware.record import Number, build, derived, documented, guessed

_TRN1_PAGE = "Amazon EC2 Trn1/Trn1n architecture page"
_INF2_PAGE = "Amazon EC2 Inf2 architecture page"
_TRN2_PAGE = "Amazon EC2 Trn2 architecture page"
_TRN3_PAGE = "Amazon EC2 Trn3 architecture page"
_TRN2_DEVICE = "Trainium2 device page"
_TRN3_DEVICE = "Trainium3 device page"

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance type, or `members` equal instances of the type `member`; counts are of all members together.

    `target` is the chip's name. `topology` describes the links between chips in words. A rate is None if nothing is
    published, or if there is no such link; `efa_gbit_per_s` is in Gbit/s, other rates are in GB/s. `member` is None for
    a single instance, and `members` 1. Otherwise each member sends `between_gb_per_s` to the other members: over links
    between chips at `ring_gb_per_s_per_chip`, or over EFA if that is None.
    """

    name: str
    target: str
    chips: int
    physical_cores: int
    hbm_bytes: int
    neuronlink_gb_per_s_per_chip: float | None
    efa_gbit_per_s: float | None
    topology: str
    members: int
    member: str | None
    between_gb_per_s: float | None
    ring_gb_per_s_per_chip: float | None
    provenance: Mapping[str, Number]


_SINGLE = "one chip"
_TORUS = "4x4 2-D torus of chips"


def _make_instance(
    name: str,
    target: str,
    chips: Number,
    cores: Number,
    hbm: Number,
    neuronlink: Number,
    efa: Number,
    topology: Number,
    members: int = 1,
    member: str | None = None,
    between: Number | None = None,
    ring: Number | None = None,
) -> Instance:
    """Return an instance from its numbers with their sources.

    Args:
        name: The instance type.
        target: The chip.
        chips: The number of chips.
        cores: The number of physical cores of all chips.
        hbm: The bytes of HBM of all chips.
        neuronlink: The GB/s of a chip to the other chips, or a number of value None.
        efa: The Gbit/s of EFA of all members together, or a number of value None.
        topology: The links between chips in words.
        members: The number of instances of which it consists.
        member: The type of these instances; None for a single one.
        between: The GB/s that a member sends to the others; by default None.
        ring: The GB/s of the ring between members, for each chip; by default None.
    """
    none = derived(None, topology.source, "no parts")
    return build(
        Instance,
        {
            "name": documented(name, chips.source),
            "target": documented(target, chips.source),
            "chips": chips,
            "physical_cores": cores,
            "hbm_bytes": hbm,
            "neuronlink_gb_per_s_per_chip": neuronlink,
            "efa_gbit_per_s": efa,
            "topology": topology,
            "members": derived(members, topology.source),
            "member": derived(member, topology.source),
            "between_gb_per_s": between or none,
            "ring_gb_per_s_per_chip": ring or none,
        },
    )


def _make_gen2(
    name: str, target: str, page: str, chips: int, link: Number, efa: float | None, topology: str
) -> Instance:
    """Return a gen2 instance with two cores and 32 GiB of HBM for each chip.

    Args:
        name: The instance type.
        target: The chip, trn1 or inf2.
        page: The source of its numbers.
        chips: The number of chips.
        link: The GB/s of NeuronLink of a chip, None as its value without links.
        efa: The Gbit/s of EFA, None if the page lists none.
        topology: The links between chips in words.
    """
    cores = documented(2 * chips, page) if target == "trn1" else derived(2 * chips, page, "two cores a chip")
    return _make_instance(
        name,
        target,
        documented(chips, page),
        cores,
        documented(32 * chips * _GIB, page),
        link,
        documented(efa, page, "" if efa else "not listed"),
        documented(topology, page),
    )


def _make_inf2(name: str, chips: int) -> Instance:
    """Return an Inf2 instance, whose chips form a ring if there are several."""
    link = documented(206.0, _INF2_PAGE, "192 GiB/s") if chips > 1 else documented(None, _INF2_PAGE)
    return _make_gen2(name, "inf2", _INF2_PAGE, chips, link, None, "ring of chips" if chips > 1 else _SINGLE)


def _make_trn2_48xlarge(name: str, note: str, topology: Number) -> Instance:
    """Return an instance of sixteen trn2 chips; `note` is the note of its NeuronLink rate."""
    return _make_instance(
        name,
        "trn2",
        documented(16, _TRN2_PAGE),
        documented(128, _TRN2_PAGE),
        documented(1536 * _GIB, _TRN2_PAGE),
        documented(1024.0, _TRN2_PAGE, note),
        documented(3200.0, _TRN2_PAGE),
        topology,
    )


def _make_trn2_ultraserver() -> Instance:
    """Return an UltraServer of four trn2u.48xlarge, whose chips are joined in rings."""
    return _make_instance(
        "trn2 UltraServer",
        "trn2",
        documented(64, _TRN2_PAGE),
        derived(512, _TRN2_PAGE, "eight cores a chip"),
        derived(4 * 1536 * _GIB, _TRN2_PAGE, "four instances"),
        documented(1024.0, _TRN2_PAGE, "inside an instance"),
        derived(4 * 3200.0, _TRN2_PAGE, "four instances"),
        documented("4 instances of a 4x4 2-D torus of chips, joined in a Z ring", _TRN2_PAGE),
        members=4,
        member="trn2u.48xlarge",
        between=derived(16 * 256.0, _TRN2_PAGE, "sixteen chips of 256 GB/s each"),
        ring=documented(256.0, _TRN2_PAGE),
    )


def _make_trn3_ultraserver(name: str, chips: int, hbm_gib: int, efa_gbit: float) -> Instance:
    """Return an UltraServer of trn3 chips, with GiB of HBM and Gbit/s of EFA for all chips together."""
    return _make_instance(
        name,
        "trn3",
        documented(chips, _TRN3_PAGE),
        derived(8 * chips, _TRN3_DEVICE, "eight cores a chip"),
        documented(hbm_gib * _GIB, _TRN3_PAGE),
        documented(2560.0, _TRN3_DEVICE, "the connectivity section lists 704 GB/s of PCIe links"),
        documented(efa_gbit, _TRN3_PAGE),
        guessed(
            "switched all-to-all", _TRN3_PAGE, "links inside a server, between servers and between racks"
        ),
    )


_ALL = (
    _make_gen2("trn1.2xlarge", "trn1", _TRN1_PAGE, 1, documented(None, _TRN1_PAGE), None, _SINGLE),
    _make_gen2("trn1.32xlarge", "trn1", _TRN1_PAGE, 16, documented(384.0, _TRN1_PAGE), 800.0, _TORUS),
    _make_gen2(
        "trn1n.32xlarge",
        "trn1",
        _TRN1_PAGE,
        16,
        documented(768.0, _TRN1_PAGE, "the chip page gives one figure, 384, for both"),
        1600.0,
        _TORUS,
    ),
    _make_inf2("inf2.xlarge", 1),
    _make_inf2("inf2.8xlarge", 1),
    _make_inf2("inf2.24xlarge", 6),
    _make_inf2("inf2.48xlarge", 12),
    _make_instance(
        "trn2.3xlarge",
        "trn2",
        derived(1, "instance type in published trace metadata"),
        documented(8, _TRN2_DEVICE),
        documented(96 * _GIB, _TRN2_DEVICE),
        derived(None, _TRN2_DEVICE, "one chip"),
        guessed(None, _TRN2_PAGE, "not listed"),
        derived(_SINGLE, "instance type in published trace metadata"),
    ),
    _make_trn2_48xlarge("trn2.48xlarge", "", documented(_TORUS, _TRN2_PAGE)),
    _make_trn2_48xlarge(
        "trn2u.48xlarge",
        "and 256 GB/s per chip to the other instances of the UltraServer",
        documented(
            "4x4 2-D torus of chips, a Z ring of 4 instances", _TRN2_PAGE, "64 chips in an UltraServer"
        ),
    ),
    _make_trn2_ultraserver(),
    _make_instance(
        "trn3.3xlarge",
        "trn3",
        derived(1, "instance name in public kernel logs and runtime documentation"),
        documented(8, _TRN3_DEVICE),
        documented(144 * _GIB, _TRN3_DEVICE),
        derived(None, _TRN3_DEVICE, "one chip"),
        guessed(None, _TRN3_PAGE, "not listed"),
        derived(_SINGLE, "instance name in public kernel logs and runtime documentation"),
    ),
    _make_trn3_ultraserver("trn3 UltraServer Gen1", 64, 9216, 12800.0),
    _make_trn3_ultraserver("trn3 UltraServer Gen2", 144, 20736, 28800.0),
)

INSTANCES: Mapping[str, Instance] = MappingProxyType({instance.name: instance for instance in _ALL})
"""Every known instance type by its name."""

_SEVERAL = re.compile(r"(\d{1,4}) ?x ?(.+)")


def instance(name: str) -> Instance:
    """Return an instance type or UltraServer by its name, or several instances over EFA (`4 x trn1.32xlarge`).

    Raises:
        InvalidArgument: The name is not known, the number of instances is below two, or the record of the instance
            type has no EFA.
    """
    if name in INSTANCES:
        return INSTANCES[name]
    several = _SEVERAL.fullmatch(name)
    if several is None or several[2] not in INSTANCES:
        meant = (
            did_you_mean(name, INSTANCES)
            if several is None
            else did_you_mean(several[2], INSTANCES, f"{several[1]} x ")
        )
        raise InvalidArgument(
            "NKW-INSTANCE",
            f"instance {name!r} is not known{meant or ';'} known are {', '.join(INSTANCES)}, and several over EFA, as "
            "in '4 x trn1.32xlarge'",
        )
    count, instance_type = int(several[1]), INSTANCES[several[2]]
    if count < 2:
        raise InvalidArgument(
            "NKW-INSTANCE",
            f"{name!r} asks for {count} instances, and a group has at least two; for a single instance write "
            f"{instance_type.name!r}",
        )
    if instance_type.efa_gbit_per_s is None:
        having = ", ".join(record.name for record in INSTANCES.values() if record.efa_gbit_per_s)
        raise InvalidArgument(
            "NKW-INSTANCE",
            f"{name!r} needs EFA between its instances, and no EFA rate of {instance_type.name} is on record; "
            f"instance types with one are {having}",
        )
    return _join_over_efa(count, instance_type)


def _join_over_efa(count: int, instance_type: Instance) -> Instance:
    """Return `count` instances of a type, joined over EFA, each with the rate that the type has on record."""
    known = instance_type.provenance
    return _make_instance(
        f"{count} x {instance_type.name}",
        instance_type.target,
        derived(count * instance_type.chips, known["chips"].source),
        derived(count * instance_type.physical_cores, known["physical_cores"].source),
        derived(count * instance_type.hbm_bytes, known["hbm_bytes"].source),
        known["neuronlink_gb_per_s_per_chip"],
        derived(count * known["efa_gbit_per_s"].value, known["efa_gbit_per_s"].source),
        derived(f"{count} over EFA, each a {instance_type.topology}", known["topology"].source),
        members=count,
        member=instance_type.name,
        between=derived(known["efa_gbit_per_s"].value / 8, known["efa_gbit_per_s"].source),
    )
