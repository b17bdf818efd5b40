"""Chips, instances and the limits of kernels, by their names."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from model.device.binding import bind_simulator, checked, parameters_of
from nkw.files import Named
from simulate.hardware import Hardware, Instance, hardware, instance
from simulate.hardware import use_overlay as hardware_overlay
from simulate.isa.dma_costs import collective


def chip(target: str) -> Hardware:
    """The record of one chip, with a core's limits, clocks and bandwidths."""
    return checked(lambda: hardware(target))


def use_overlay(path: Named) -> None:
    """Let numbers of a file replace those of the chips; ModelError for a file that is no overlay."""
    checked(lambda: hardware_overlay(path))


def instance_named(name: str) -> Instance:
    """An instance type by its name, or several of them over EFA; ModelError for a name that is neither."""
    return checked(lambda: instance(name))


def kernel_limit(kernel: str, name: str) -> int:
    """A limit that a kernel's file states, such as `MAX_TOKENS` of `attention_prefill`."""
    bind_simulator()
    limit: int = getattr(importlib.import_module(f"nki_kernels.{kernel}"), name)
    return limit


def kernel_parameters(kernel: str) -> Collection[str]:
    """Return the names of a kernel's parameters."""
    return parameters_of(kernel).keys()


def collective_ns(chip: Hardware, ranks: int, payload_bytes: int, all_reduces: bool = False) -> float:
    """The time of a collective that moves so many bytes of each rank; an all-reduce moves them twice.

    An instance's own record has the links between its chips.
    """
    return collective(chip, ranks, payload_bytes, 1.0 if all_reduces else 0.5).rendezvous_ns
