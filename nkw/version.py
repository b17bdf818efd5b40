"""Version of the installed distribution; this module imports no other module of the project."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "nki-workbench"


def version() -> str:
    """Return the version of the installed distribution; "(not installed)" for a checkout that is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"
