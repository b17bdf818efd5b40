"""Findings about driver, runtime library and tools of an instance."""

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
    format_chip_count,
)
from simulate.doctor.releases import make_page_address
from simulate.doctor.repair_commands import make_install_command, make_rebuild_command
from simulate.vendor_packages import parse_version

_TROUBLE = make_page_address("neuron-runtime/nrt-troubleshoot")
_NOTES = make_page_address("release-notes/components/runtime")
_RELOAD = "sudo rmmod neuron && sudo modprobe neuron"


def find_missing_driver(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the instance has chips and no driver is installed or loaded."""
    if machine.family and not machine.module_loaded and not machine.device_files and not machine.driver:
        yield Finding(
            "driver-missing",
            f"this is an instance of the family {machine.family}, and no driver of its chips is installed",
            make_install_command(machine, DRIVER),
            _TROUBLE,
        )


def find_unloaded_driver(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the driver is installed but not loaded, for example after an update of the kernel."""
    if machine.family and machine.driver and not machine.module_loaded:
        yield Finding(
            "driver-not-loaded",
            f"the driver {machine.driver} is installed, and the kernel module neuron is not loaded",
            make_rebuild_command(machine, DRIVER),
            _TROUBLE,
        )


def find_missing_devices(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if an instance with chips has the driver loaded but no device file /dev/neuron*.

    A container sees the host's kernel module, but only the device files passed to it.
    """
    if machine.family and machine.module_loaded and not machine.device_files:
        yield Finding(
            "devices-missing",
            "the kernel module neuron is loaded, and there is no /dev/neuron0: a container sees only the chips that "
            "are passed to it",
            "docker run --device=/dev/neuron0 IMAGE",
            make_page_address("deploy/tutorials/build-run-container"),
        )


def find_outdated_driver(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the version of the loaded driver differs from that of the installed driver.

    A process that uses the chips during an update keeps the old kernel module loaded. modinfo prints the new
    version.
    """
    running_version, installed_version = (
        machine.files.get(DRIVER_VERSION, "").strip(),
        machine.outputs.get(MODINFO, "").strip(),
    )
    if (
        running_version
        and installed_version
        and parse_version(running_version) != parse_version(installed_version)
    ):
        yield Finding(
            "driver-not-reloaded",
            f"the driver {running_version} is loaded, and {installed_version} is installed: end the processes that use "
            "the chips, and reload it",
            _RELOAD,
            _TROUBLE,
        )


def find_missing_runtime(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if there are device files but no runtime library."""
    if machine.device_files and not machine.runtime and RUNTIME_LIBRARY not in machine.files:
        yield Finding(
            "runtime-missing",
            f"there is {format_chip_count(machine.device_files)}, and the runtime library is not installed",
            make_install_command(machine, RUNTIME, COLLECTIVES),
            make_page_address("neuron-runtime/nrtpy/nrtpy-troubleshooting"),
        )


def find_driver_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the runtime's release notes say that the installed runtime and driver do not work together.

    Runtime 2.32 needs a driver after 2.26; a driver from 2.29 on needs runtime 2.33 or later.
    """
    if machine.driver is None or machine.runtime is None:
        return
    driver, runtime = parse_version(machine.driver), parse_version(machine.runtime)
    if runtime == (2, 32) and driver <= (2, 26):
        yield Finding(
            "driver-too-old",
            f"the runtime {machine.runtime} does not start with a driver of 2.26 or earlier, and the driver is "
            f"{machine.driver}",
            f"{make_install_command(machine, DRIVER)} && {_RELOAD}",
            _NOTES,
        )
    if driver >= (2, 29) and runtime < (2, 33):
        yield Finding(
            "runtime-too-old",
            f"the driver {machine.driver} needs a runtime of 2.33 or later, and the runtime is {machine.runtime}",
            make_install_command(machine, RUNTIME, COLLECTIVES),
            _NOTES,
        )


def find_collectives_mismatch(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if the runtime and the collectives library differ in the first two numbers of their versions.

    These numbers are equal in every release of the SDK from 2.20 on.
    """
    collectives = machine.system_packages.get(COLLECTIVES)
    if machine.runtime and collectives and parse_version(machine.runtime) != parse_version(collectives):
        newer = max(parse_version(machine.runtime), parse_version(collectives))
        yield Finding(
            "collectives-and-runtime",
            f"the runtime {machine.runtime} and aws-neuronx-collectives {collectives} belong to different releases",
            make_install_command(machine, RUNTIME, COLLECTIVES, version=newer),
            make_page_address("release-notes/prev/content"),
        )


def find_tools_outside_path(machine: Machine) -> Iterator[Finding]:
    """Yield a finding if neuron-ls is installed in the folder of Neuron's tools, and PATH lacks that folder."""
    path = machine.variables.get("PATH", "").split(":")
    if f"{TOOLS}/neuron-ls" in machine.files and TOOLS not in path:
        yield Finding(
            "tools-path",
            f"neuron-ls and the profiler are in {TOOLS}, which PATH does not name",
            f"export PATH={TOOLS}:$PATH",
            make_page_address("setup/pytorch/manual"),
        )


FINDERS: tuple[Finder, ...] = (
    find_missing_driver,
    find_unloaded_driver,
    find_missing_devices,
    find_outdated_driver,
    find_missing_runtime,
    find_driver_mismatch,
    find_collectives_mismatch,
    find_tools_outside_path,
)
