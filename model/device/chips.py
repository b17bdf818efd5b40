"""Chips, instances and parameters of kernels, found by name."""

from __future__ import annotations

from collections.abc import Collection

from model.device.binding import list_parameters, run_checked
from nkw.files import Named
from simulate.hardware import Hardware, Instance, hardware, instance
from simulate.hardware import use_overlay as hardware_overlay
from simulate.isa.dma_costs import collective


def chip(target: str) -> Hardware:
    """Return the record of a chip with the limits, clocks and bandwidths of its cores.

    Raises:
        ModelError: No chip has the name `target`.
    """
    return run_checked(lambda: hardware(target))


def use_overlay(path: Named) -> None:
    """Replace numbers of the chips by the numbers of a file.

    Raises:
        ModelError: The file is no overlay.
    """
    run_checked(lambda: hardware_overlay(path))


def find_instance(name: str) -> Instance:
    """Return an instance type, or several instances that EFA connects.

    Raises:
        ModelError: The name is neither.
    """
    return run_checked(lambda: instance(name))


def kernel_parameters(kernel: str) -> Collection[str]:
    """Return the names of a kernel's parameters."""
    return list_parameters(kernel).keys()


def collective_ns(chip: Hardware, ranks: int, payload_bytes: int, all_reduces: bool = False) -> float:
    """Return the time of a collective in ns.

    Args:
        chip: The chip of the ranks; the record of an instance contains the links between its chips.
        ranks: Number of ranks.
        payload_bytes: Bytes that every rank contributes.
        all_reduces: Whether the collective moves the bytes twice, as an all-reduce does, and not once.
    """
    return collective(chip, ranks, payload_bytes, 1.0 if all_reduces else 0.5).rendezvous_ns
