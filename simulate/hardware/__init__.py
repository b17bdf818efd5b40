"""Hardware records: one frozen record for each chip, in which every number has a source and a confidence.

`hardware` returns the record of a chip. `use_overlay` replaces numbers of all records by those of a file for this
process.
"""

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
from simulate.hardware.overlay import apply_overlay, find_stand_in
from simulate.hardware.record import Confidence, Hardware, Number, derived, documented, guessed
from simulate.hardware.topology import add_instance_collectives

__all__ = [
    "INSTANCES",
    "TARGETS",
    "Confidence",
    "Hardware",
    "Instance",
    "Number",
    "derived",
    "documented",
    "guessed",
    "hardware",
    "instance",
    "list_chips_with",
    "use_overlay",
]

RECORDS = dict(zip(TARGETS, (TRN1, INF2, TRN2, TRN3)))
"""Hardware record of each chip by its name, without an overlay."""


def list_chips_with(capability: Callable[[Hardware], bool]) -> list[str]:
    """Return the names of the chips whose record, without an overlay, satisfies a predicate, oldest chip first."""
    return [record.name for record in RECORDS.values() if capability(record)]


def hardware(target: str, logical_core_size: int = 1) -> Hardware:
    """Return the hardware record of a chip, of a generation or of an instance.

    Numbers of the overlay file that NKW_HARDWARE names replace those of the record.

    Args:
        target: A chip (`trn2`), a generation (`gen2` is trn1), an instance type (`trn1.32xlarge`), or several
            instances (`4 x trn1.32xlarge`). The record of an instance has the collectives of its topology.
        logical_core_size: Physical cores of a rank, for the collectives of an instance; without effect for a chip.

    Raises:
        InvalidArgument: The name is none of these, or the overlay cannot be used.
    """
    known = {**RECORDS, **{name: RECORDS[target] for name, target in GENERATIONS.items()}}
    if isinstance(target, str) and target in known:
        return _current(known[target])
    if isinstance(target, str) and (target in INSTANCES or " x " in target):
        machine = instance(target)
        return _add_instance_collectives(
            _current(RECORDS[machine.target]), _current(TRN1), machine.name, logical_core_size
        )
    raise InvalidArgument("NKW-TARGET", f"{target!r} is no known target; known are {', '.join(known)}")


def use_overlay(path: Named) -> None:
    """Apply the overlay in a file to later calls of `hardware` in this process and its children.

    Sets the environment variable NKW_HARDWARE to the absolute path; an earlier overlay no longer applies.

    Raises:
        InvalidArgument: The file cannot be read or is not an overlay; the variable is left as it is then.
    """
    absolute = os.path.abspath(path)
    _load_overlaid(absolute)
    os.environ[HARDWARE_VARIABLE] = absolute


def _current(record: Hardware) -> Hardware:
    """Return the record to use for a chip now.

    This is the record that `overlay.use_stand_in` set, else the record with the overlay of NKW_HARDWARE, else `record`.
    """
    path = os.environ.get(HARDWARE_VARIABLE, "")
    return find_stand_in(record.name) or (_load_overlaid(path)[record.name] if path else record)


@lru_cache
def _load_overlaid(path: str) -> dict[str, Hardware]:
    """Return the records of all chips by name, with the overlay in a file applied; a process reads a file once."""
    return apply_overlay(path, RECORDS)


@lru_cache
def _add_instance_collectives(
    record: Hardware, swept: Hardware, name: str, logical_core_size: int
) -> Hardware:
    """Return a chip's record with the collectives of the instance of this name, see `add_instance_collectives`."""
    return add_instance_collectives(record, instance(name), swept, logical_core_size)
