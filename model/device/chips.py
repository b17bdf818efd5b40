"""Hardware records of chips and instances, physical cores of a rank (LNC), and the time of a collective.

Other files of the model ask here instead of importing the simulator.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib import import_module

from model.device.binding import list_parameters, run_checked
from model.errors import ModelError
from nkw.files import Named
from nkw.targets import LNC_VARIABLE
from simulate.hardware import Hardware, Instance, hardware, instance
from simulate.hardware import use_overlay as hardware_overlay
from simulate.isa.dma_costs import collective

_COLUMNS_PER_GB_PER_S = 113 / 358.0
"""Columns of an expert for each GB/s of HBM bandwidth: from dry launches on trn2, which agree with those on trn3."""

_WITHOUT_LOOPS = 2
"""The last generation without loops over registers."""


def chip(target: str, lnc: int = 1) -> Hardware:
    """Return the hardware record of a chip: limits, clocks and bandwidths of its physical cores.

    Args:
        target: The name of a chip or of an instance; the record of an instance contains the links between its chips.
        lnc: Physical cores of a rank, which decide how many ranks of a collective are on one chip.

    Raises:
        ModelError: No chip or instance has the name `target`.
    """
    return run_checked(lambda: hardware(target, lnc))


def read_lnc() -> int | None:
    """Return the physical cores of a rank (1 or 2) from NEURON_LOGICAL_NC_CONFIG; None if the variable is not set.

    Raises:
        ModelError: The variable is neither 1 nor 2.
    """
    text = os.environ.get(LNC_VARIABLE, "")
    if text not in ("", "1", "2"):
        raise ModelError(
            f"{LNC_VARIABLE} is {text!r:.40}; a rank has 1 or 2 physical cores: set it to one of these, or unset it"
        )
    return int(text) if text else None


def choose_lnc(target: str, lnc: int | None, largest: bool = False) -> int:
    """Return the number of physical cores of a rank on a chip.

    Args:
        target: The name of the chip.
        lnc: The requested number. None takes the number in NEURON_LOGICAL_NC_CONFIG, else the default.
        largest: Whether the default is the largest number that the chip has, as AWS runs it, and not 1.

    Raises:
        ModelError: The chip does not have the number, or the variable is neither 1 nor 2.
    """
    sizes = chip(target).logical_core_sizes
    chosen, source = (lnc, "--lnc") if lnc is not None else (read_lnc(), LNC_VARIABLE)
    if chosen is None:
        return max(sizes) if largest else 1
    if chosen not in sizes:
        numbers = " or ".join(map(str, sizes))
        raise ModelError(f"{source} is {chosen}, physical cores of a rank; on {target} set it to {numbers}")
    return chosen


def limit_lnc(target: str, lnc: int | None, largest: bool = False) -> int:
    """Return the number of physical cores of a rank on a chip that is compared with other chips.

    Returns the result of `choose_lnc`, but 1 on a chip that has only this number, such as trn1.
    """
    return choose_lnc(target, lnc, largest) if len(chip(target).logical_core_sizes) > 1 else 1


def find_sorted_expert_width(target: str) -> float:
    """Return the largest width of a rank's part of an expert for which sorting few rows by expert saves time on a chip.

    The width is in columns. At this width, loading the weights of an expert takes as long as `experts_decode` takes to
    add the expert's products to all rows. It is 0 on chips without loops over registers, where `experts_prefill` has
    blocks for the worst distribution of rows.

    Raises:
        ModelError: No chip has the name `target`.
    """
    record = chip(target)
    return _COLUMNS_PER_GB_PER_S * record.hbm_gb_per_s_per_core if record.generation > _WITHOUT_LOOPS else 0.0


def can_divide_among(kernel: str, lnc: int) -> bool:
    """Return whether a kernel of `nki_kernels` can divide its work among `lnc` physical cores of a rank."""
    return lnc in import_module(f"nki_kernels.{kernel}").cores


def use_overlay(path: Named) -> None:
    """Replace numbers in the hardware records by those of an overlay file, for the rest of this process.

    Raises:
        ModelError: The file is no overlay.
    """
    run_checked(lambda: hardware_overlay(path))


def find_instance(name: str) -> Instance:
    """Return the record of an instance type such as "trn2.48xlarge", or of several ones such as "2 x trn1.32xlarge".

    Raises:
        ModelError: The name is neither.
    """
    return run_checked(lambda: instance(name))


def list_kernel_parameters(kernel: str) -> Collection[str]:
    """Return the names of the parameters of a kernel of `nki_kernels`."""
    return list_parameters(kernel).keys()


def compute_collective_ns(chip: Hardware, ranks: int, payload_bytes: int, all_reduces: bool = False) -> float:
    """Return the time of one collective in ns.

    Args:
        chip: The chip of the ranks; the record of an instance contains the links between its chips.
        ranks: Number of ranks.
        payload_bytes: Bytes that every rank contributes.
        all_reduces: Whether the collective moves the bytes twice, as an all-reduce does, and not once.
    """
    return collective(chip, ranks, payload_bytes, 1.0 if all_reduces else 0.5).rendezvous_ns
