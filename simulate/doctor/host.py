"""Findings about the driver, the runtime library and the tools of an instance."""

from __future__ import annotations

from collections.abc import Iterator

from simulate.doctor.finding import Finder, Finding
from simulate.doctor.machine import (
    COLLECTIVES,
    DRIVER,
    DRIVER_VERSION,
    MODINFO,
    RUNTIME,
    RUNTIME_LIBRARY,
    TOOLS,
    Machine,
    counted,
)
from simulate.doctor.mends import installs, rebuilds_driver
from simulate.doctor.releases import page
from simulate.vendor_packages import numbers

_TROUBLE = page("neuron-runtime/nrt-troubleshoot")
_NOTES = page("release-notes/components/runtime")
_RELOAD = "sudo rmmod neuron && sudo modprobe neuron"


def driver_is_missing(machine: Machine) -> Iterator[Finding]:
    """An instance with chips, on which nothing drives them."""
    if machine.family and not machine.module_loaded and not machine.device_files and not machine.driver:
        yield Finding(
            "driver-missing",
            f"this is an instance of the family {machine.family}, and its chips have no driver",
            installs(machine, DRIVER),
            _TROUBLE,
        )


def driver_is_not_loaded(machine: Machine) -> Iterator[Finding]:
    """The package is there and the kernel module is not, for example after an update of the kernel."""
    if machine.family and machine.driver and not machine.module_loaded:
        yield Finding(
            "driver-not-loaded",
            f"the driver {machine.driver} is installed, and the kernel module neuron is not loaded",
            rebuilds_driver(machine, DRIVER),
            _TROUBLE,
        )


def devices_are_not_passed(machine: Machine) -> Iterator[Finding]:
    """A container sees the host's module, and only those device files that it is given."""
    if machine.family and machine.module_loaded and not machine.device_files:
        yield Finding(
            "devices-missing",
            "the kernel module neuron is loaded, and there is no /dev/neuron0: a container is given no chip",
            "docker run --device=/dev/neuron0 IMAGE",
            page("deploy/tutorials/build-run-container"),
        )


def driver_was_not_reloaded(machine: Machine) -> Iterator[Finding]:
    """After an update a process that holds the chips keeps the old module running; modinfo tells the new version."""
    running, on_disk = (
        machine.files.get(DRIVER_VERSION, "").strip(),
        machine.outputs.get(MODINFO, "").strip(),
    )
    if running and on_disk and numbers(running) != numbers(on_disk):
        yield Finding(
            "driver-not-reloaded",
            f"the driver {running} runs, and {on_disk} is installed: end what uses the chips, and reload it",
            _RELOAD,
            _TROUBLE,
        )


def runtime_is_missing(machine: Machine) -> Iterator[Finding]:
    """Device files without the library that uses them."""
    if machine.device_files and not machine.runtime and RUNTIME_LIBRARY not in machine.files:
        yield Finding(
            "runtime-missing",
            f"there is {counted(machine.device_files)}, and the runtime library is not installed",
            installs(machine, RUNTIME, COLLECTIVES),
            page("neuron-runtime/nrtpy/nrtpy-troubleshooting"),
        )


def driver_beside_runtime(machine: Machine) -> Iterator[Finding]:
    """The pairs that the release notes of the runtime exclude."""
    if machine.driver is None or machine.runtime is None:
        return
    driver, runtime = numbers(machine.driver), numbers(machine.runtime)
    if runtime == (2, 32) and driver <= (2, 26):
        yield Finding(
            "driver-too-old",
            f"the runtime {machine.runtime} does not start with a driver of 2.26 or earlier, and the driver is "
            f"{machine.driver}",
            f"{installs(machine, DRIVER)} && {_RELOAD}",
            _NOTES,
        )
    if driver >= (2, 29) and runtime < (2, 33):
        yield Finding(
            "runtime-too-old",
            f"the driver {machine.driver} needs a runtime of 2.33 or later, and the runtime is {machine.runtime}",
            installs(machine, RUNTIME, COLLECTIVES),
            _NOTES,
        )


def collectives_beside_runtime(machine: Machine) -> Iterator[Finding]:
    """Runtime and collectives have had the same first two numbers in every release from 2.20 on."""
    collectives = machine.system_packages.get(COLLECTIVES)
    if machine.runtime and collectives and numbers(machine.runtime) != numbers(collectives):
        newer = max(numbers(machine.runtime), numbers(collectives))
        yield Finding(
            "collectives-and-runtime",
            f"the runtime {machine.runtime} and aws-neuronx-collectives {collectives} belong to different releases",
            installs(machine, RUNTIME, COLLECTIVES, version=newer),
            page("release-notes/prev/content"),
        )


def tools_are_not_found(machine: Machine) -> Iterator[Finding]:
    """The tools are installed in a folder that PATH does not name."""
    path = machine.variables.get("PATH", "").split(":")
    if f"{TOOLS}/neuron-ls" in machine.files and TOOLS not in path:
        yield Finding(
            "tools-path",
            f"neuron-ls and the profiler are in {TOOLS}, which PATH does not name",
            f"export PATH={TOOLS}:$PATH",
            page("setup/pytorch/manual"),
        )


FINDERS: tuple[Finder, ...] = (
    driver_is_missing,
    driver_is_not_loaded,
    devices_are_not_passed,
    driver_was_not_reloaded,
    runtime_is_missing,
    driver_beside_runtime,
    collectives_beside_runtime,
    tools_are_not_found,
)
