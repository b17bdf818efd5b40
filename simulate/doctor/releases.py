"""Releases of the Neuron SDK: compatible versions of driver, runtime, compiler and NKI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from simulate.doctor.machine import Machine, format_version
from simulate.vendor_packages import Version, parse_version

_DOCUMENTATION = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"


def make_page_address(path: str) -> str:
    """Return the address of a page of the vendor's documentation, given by its path without ".html"."""
    return f"{_DOCUMENTATION}{path}.html"


ARTIFACTS = make_page_address("release-notes/prev/content")
"""Page with package and Python versions of every release but the newest, which has the page releasecontent."""


class Release(NamedTuple):
    """A release of the Neuron SDK, with the first two numbers of each component's version, which patches keep.

    `nki` is None for releases before the package nki existed.
    `pythons` are the oldest and the newest Python that its packages for Trn1 and Trn2 support.
    """

    sdk: Version
    driver: Version
    runtime: Version
    compiler: Version
    nki: Version | None
    pythons: tuple[Version, Version]


def _make_release(
    sdk: int, driver: int, runtime: int, compiler: int, nki: int | None, oldest: int, newest: int
) -> Release:
    """Return a release from the second numbers of its versions; the first are 2, for nki 0, for Python 3."""
    nki_version = None if nki is None else (0, nki)
    return Release(
        (2, sdk), (2, driver), (2, runtime), (2, compiler), nki_version, ((3, oldest), (3, newest))
    )


RELEASES = (
    _make_release(33, 31, 35, 28, 7, 11, 14),
    _make_release(32, 30, 34, 27, 6, 11, 13),
    _make_release(31, 29, 33, 26, 5, 11, 13),
    _make_release(30, 28, 32, 25, 4, 11, 13),
    _make_release(29, 27, 31, 24, 3, 10, 12),
    _make_release(28, 26, 30, 23, 2, 10, 12),
    _make_release(27, 25, 29, 22, 1, 10, 12),
    _make_release(26, 24, 28, 21, None, 9, 11),
    _make_release(25, 23, 27, 20, None, 9, 11),
    _make_release(24, 22, 26, 19, None, 9, 11),
    _make_release(23, 21, 25, 18, None, 9, 11),
    _make_release(22, 20, 24, 17, None, 9, 11),
    _make_release(21, 19, 23, 16, None, 8, 11),
    _make_release(20, 18, 22, 15, None, 8, 11),
)
"""Source: ARTIFACTS, and for the newest release the component table of its release notes."""


def find_installed(machine: Machine) -> Mapping[str, Version]:
    """Return the versions of the installed components, by their field of `Release`: driver, runtime, compiler, nki."""
    versions = {
        "driver": machine.driver and parse_version(machine.driver),
        "runtime": machine.runtime and parse_version(machine.runtime),
        "compiler": machine.version("neuronx-cc"),
        "nki": machine.version("nki"),
    }
    return {component: version for component, version in versions.items() if version}


def find_release(component: str, version: Version) -> Release | None:
    """Return the release that contains a version of a component; None if the table `RELEASES` lacks it.

    Args:
        component: A field of `Release`: driver, runtime, compiler or nki.
        version: The first two numbers of its version.
    """
    return next((release for release in RELEASES if getattr(release, component) == version), None)


def describe_releases(machine: Machine) -> str | None:
    """Return the SDK release of the installed components as text, or one for each component if they differ.

    A release that is not in the table is "unknown". None if no component is installed.
    """
    releases = {
        component: find_release(component, version) for component, version in find_installed(machine).items()
    }
    names = {
        component: format_version(release.sdk) if release else "unknown"
        for component, release in releases.items()
    }
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} ({component})" for component, name in names.items()) or None
