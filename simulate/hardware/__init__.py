"""One frozen record for each chip: every number has a source and a confidence."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

from nkw.errors import InvalidArgument
from nkw.files import Named
from nkw.targets import GENERATIONS, HARDWARE_VARIABLE, TARGETS
from simulate.hardware.gen2 import INF2, TRN1
from simulate.hardware.gen3 import TRN2
from simulate.hardware.gen4 import TRN3
from simulate.hardware.instances import INSTANCES, Instance, instance
from simulate.hardware.overlay import overlaid, stand_in
from simulate.hardware.record import Confidence, Hardware, Number, derived, documented, guessed
from simulate.hardware.topology import on_instance

__all__ = [
    "INSTANCES",
    "TARGETS",
    "Confidence",
    "Hardware",
    "Instance",
    "Number",
    "chips_with",
    "derived",
    "documented",
    "guessed",
    "hardware",
    "instance",
    "use_overlay",
]

RECORDS = dict(zip(TARGETS, (TRN1, INF2, TRN2, TRN3)))
"""The chips as this project knows them, without an overlay."""


def chips_with(capability: Callable[[Hardware], bool]) -> list[str]:
    """The names of the chips that have a capability."""
    return [record.name for record in RECORDS.values() if capability(record)]


def hardware(target: str, logical_core_size: int = 1) -> Hardware:
    """The record of a chip by its name, or by its generation; gen2 means trn1.

    The name of an instance type, or of several (`4 x trn1.32xlarge`), gives the record of its chip, with the
    collectives of that instance (`topology`) between ranks of `logical_core_size` physical cores. Numbers of the
    overlay that NKW_HARDWARE names, if any, stand in the place of the record's own. Raises InvalidArgument for a name
    that is none of these, and for what is no overlay.
    """
    known = {**RECORDS, **{name: RECORDS[target] for name, target in GENERATIONS.items()}}
    if isinstance(target, str) and target in known:
        return _current(known[target])
    if isinstance(target, str) and (target in INSTANCES or " x " in target):
        place = instance(target)
        return _on_instance(_current(RECORDS[place.target]), _current(TRN1), place.name, logical_core_size)
    raise InvalidArgument("NKW-TARGET", f"{target!r} is no known target; known are {', '.join(known)}")


def use_overlay(path: Named) -> None:
    """Apply an overlay to this process and its children. Raises InvalidArgument for a file that is none."""
    place = os.path.abspath(path)
    _overlaid(place)
    os.environ[HARDWARE_VARIABLE] = place


def _current(record: Hardware) -> Hardware:
    """The record that counts for a chip at this moment."""
    place = os.environ.get(HARDWARE_VARIABLE, "")
    return stand_in(record.name) or (_overlaid(place)[record.name] if place else record)


@lru_cache
def _overlaid(place: str) -> dict[str, Hardware]:
    """The chips with the overlay in a file, which a process reads once."""
    return overlaid(place, RECORDS)


@lru_cache
def _on_instance(record: Hardware, swept: Hardware, name: str, logical_core_size: int) -> Hardware:
    return on_instance(record, instance(name), swept, logical_core_size)
