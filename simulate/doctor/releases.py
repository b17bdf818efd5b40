"""The releases of the Neuron SDK: which driver, runtime, compiler and NKI belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from simulate.doctor.machine import Machine, dotted
from simulate.vendor_packages import Version, numbers

_DOCUMENTATION = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"


def page(path: str) -> str:
    """The address of a page of the vendor's documentation."""
    return f"{_DOCUMENTATION}{path}.html"


ARTIFACTS = page("release-notes/prev/content")
"""Package versions of every release, with the versions of Python that they support; the newest: releasecontent."""


class Release(NamedTuple):
    """A release of the SDK, with the first two numbers of each component's version; patches keep those.

    `pythons` are the oldest and the newest Python that its packages for Trn1 and Trn2 support.
    """

    sdk: Version
    driver: Version
    runtime: Version
    compiler: Version
    nki: Version | None
    pythons: tuple[Version, Version]


def _release(
    sdk: int, driver: int, runtime: int, compiler: int, nki: int | None, oldest: int, newest: int
) -> Release:
    named = None if nki is None else (0, nki)
    return Release((2, sdk), (2, driver), (2, runtime), (2, compiler), named, ((3, oldest), (3, newest)))


RELEASES = (
    _release(33, 31, 35, 28, 7, 11, 14),
    _release(32, 30, 34, 27, 6, 11, 13),
    _release(31, 29, 33, 26, 5, 11, 13),
    _release(30, 28, 32, 25, 4, 11, 13),
    _release(29, 27, 31, 24, 3, 10, 12),
    _release(28, 26, 30, 23, 2, 10, 12),
    _release(27, 25, 29, 22, 1, 10, 12),
    _release(26, 24, 28, 21, None, 9, 11),
    _release(25, 23, 27, 20, None, 9, 11),
    _release(24, 22, 26, 19, None, 9, 11),
    _release(23, 21, 25, 18, None, 9, 11),
    _release(22, 20, 24, 17, None, 9, 11),
    _release(21, 19, 23, 16, None, 8, 11),
    _release(20, 18, 22, 15, None, 8, 11),
)
"""Source: ARTIFACTS, and for the newest release the component table of its release notes."""


def installed(machine: Machine) -> Mapping[str, Version]:
    """The versions of those components of a release that are installed, by their field of `Release`."""
    found = {
        "driver": machine.driver and numbers(machine.driver),
        "runtime": machine.runtime and numbers(machine.runtime),
        "compiler": machine.version("neuronx-cc"),
        "nki": machine.version("nki"),
    }
    return {component: version for component, version in found.items() if version}


def release_of(component: str, version: Version) -> Release | None:
    """The release that brought a version of a component; None for one that is not in the table."""
    return next((each for each in RELEASES if getattr(each, component) == version), None)


def described(machine: Machine) -> str | None:
    """The release that the installed components belong to, or that of each; None where nothing is installed."""
    of = {component: release_of(component, version) for component, version in installed(machine).items()}
    names = {component: dotted(each.sdk) if each else "unknown" for component, each in of.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} ({component})" for component, name in names.items()) or None
