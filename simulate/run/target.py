"""Which chip is simulated, and with how many physical cores a rank."""

from __future__ import annotations

import os

from simulate.errors import InvalidArgument
from simulate.hardware import Hardware, hardware
from simulate.targets import DEFAULT_TARGET, TARGET_VARIABLE

PRECISE_VARIABLE = "NKI_PRECISE_FP"


def target_hardware(target: str | None = None) -> Hardware:
    """The chip to simulate: `target`, else NEURON_PLATFORM_TARGET_OVERRIDE, else trn2."""
    return hardware(target or os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET)


def check_logical_core(chip: Hardware, size: int) -> None:
    """Refuse a number of physical cores that the chip cannot join to one rank."""
    if size not in chip.logical_core_sizes:
        raise InvalidArgument(
            "NKW-LNC",
            f"a logical core of {size} physical cores; {chip.name} has "
            + " or ".join(map(str, chip.logical_core_sizes)),
        )
