"""The version of the installed distribution, found without importing anything else of it."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "nki-workbench"


def version() -> str:
    """The version that the package's metadata states; a checkout that was never installed has none."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"
