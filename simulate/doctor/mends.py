"""Commands that mend a finding on the system at hand."""

from __future__ import annotations

import re

from simulate.doctor.machine import Machine, dotted
from simulate.vendor_packages import Version

OS_RELEASE = "/etc/os-release"


def _has_dnf(machine: Machine) -> bool:
    """Whether the system's packages are those of rpm, as on Amazon Linux."""
    named = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', machine.files.get(OS_RELEASE, ""), re.MULTILINE)
    return bool({"amzn", "fedora", "rhel", "rocky"} & set(" ".join(named).split()))


def installs(machine: Machine, *packages: str, version: Version | None = None) -> str:
    """The command that installs system packages, in the newest version or in one with these first two numbers."""
    dnf = _has_dnf(machine)
    ending = "" if version is None else f"{'-' if dnf else '='}{dotted(version)}.*"
    return f"sudo {'dnf' if dnf else 'apt-get'} install -y {' '.join(each + ending for each in packages)}"


def rebuilds_driver(machine: Machine, package: str) -> str:
    """The commands that build the driver for the running kernel, as the page on troubleshooting orders them."""
    if _has_dnf(machine):
        headers = 'sudo dnf install -y "kernel-devel-uname-r = $(uname -r)"'
        return f"{headers} && sudo dnf reinstall -y {package} && sudo modprobe neuron"
    headers = "sudo apt-get install -y linux-headers-$(uname -r)"
    return f"{headers} && sudo apt-get install --reinstall -y {package} && sudo modprobe neuron"
