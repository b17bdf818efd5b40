"""Chips, instances and the limits of kernels, by their names."""

from __future__ import annotations

import importlib

from model.device.binding import bind_simulator, checked
from simulate.hardware import INSTANCES as INSTANCES
from simulate.hardware import Hardware as Hardware
from simulate.hardware import Instance as Instance
from simulate.hardware import Number as Number
from simulate.hardware import hardware, instance


def chip(target: str) -> Hardware:
    """The record of one chip, with a core's limits, clocks and bandwidths."""
    return checked(lambda: hardware(target))


def instance_named(name: str) -> Instance:
    """An instance type by its name, or several of them over EFA; ModelError for a name that is neither."""
    return checked(lambda: instance(name))


def kernel_limit(kernel: str, name: str) -> int:
    """A limit that a kernel's file states, such as `MAX_TOKENS` of `attention_prefill`."""
    bind_simulator()
    limit: int = getattr(importlib.import_module(f"nki_kernels.{kernel}"), name)
    return limit
