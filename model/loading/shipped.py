"""Models that come with the package, by name."""

from __future__ import annotations

import os
from pathlib import Path

PRETRAINED = Path(__file__).resolve().parents[1] / "pretrained"
SHIPPED = {"stories": PRETRAINED, "stories-moe": PRETRAINED / "stories-moe"}
"""Folders by name: a dense story writer, which is the default, and a story writer with routed experts."""


def model_name(folder: str | Path) -> str:
    """Return the name of a shipped model's folder, or the last part of another folder's path."""
    path = Path(folder).resolve()
    return next((name for name, shipped in SHIPPED.items() if path == shipped), path.name)


def model_path(name: str | Path) -> Path:
    """Return a path unchanged, or the folder of the shipped model of that name where the path does not exist."""
    path = Path(name)
    # Path.exists raises OSError for a name that is too long.
    return path if os.path.exists(path) else SHIPPED.get(str(name), path)


def config_path(name: str | Path) -> Path:
    """Return a path unchanged, or the config of the shipped or published model of that name where it does not exist."""
    path = model_path(name)
    if os.path.exists(path):
        return path
    # The help of a command does without numpy, which this module imports.
    from model.config.published import find_published

    published = find_published(str(name))
    return path if published is None else published.path
