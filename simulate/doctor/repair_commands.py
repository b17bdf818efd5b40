"""Shell commands that install system packages, for the package manager of the machine; `doctor` only prints them."""

from __future__ import annotations

import re

from simulate.doctor.machine import Machine, format_version
from simulate.vendor_packages import Version

OS_RELEASE = "/etc/os-release"


def _has_dnf(machine: Machine) -> bool:
    """Return whether the machine installs packages with dnf, as Amazon Linux does; otherwise it uses apt-get."""
    distributions = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', machine.files.get(OS_RELEASE, ""), re.MULTILINE)
    return bool({"amzn", "fedora", "rhel", "rocky"} & set(" ".join(distributions).split()))


def make_install_command(machine: Machine, *packages: str, version: Version | None = None) -> str:
    """Return the shell command that installs system packages.

    Args:
        machine: The machine, whose distribution decides between dnf and apt-get.
        packages: The names of the packages.
        version: The first two numbers of their version; None for the newest.
    """
    dnf = _has_dnf(machine)
    ending = "" if version is None else f"{'-' if dnf else '='}{format_version(version)}.*"
    return (
        f"sudo {'dnf' if dnf else 'apt-get'} install -y {' '.join(package + ending for package in packages)}"
    )


def make_rebuild_command(machine: Machine, package: str) -> str:
    """Return the shell commands that build and load the driver for the running Linux kernel, joined by &&.

    They install the kernel's headers, reinstall `package`, and load the module, as the page on troubleshooting says.
    """
    if _has_dnf(machine):
        headers = 'sudo dnf install -y "kernel-devel-uname-r = $(uname -r)"'
        return f"{headers} && sudo dnf reinstall -y {package} && sudo modprobe neuron"
    headers = "sudo apt-get install -y linux-headers-$(uname -r)"
    return f"{headers} && sudo apt-get install --reinstall -y {package} && sudo modprobe neuron"
