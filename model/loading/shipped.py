"""Models that come with the package, by name."""

from __future__ import annotations

import os
from pathlib import Path

PRETRAINED = Path(__file__).resolve().parents[1] / "pretrained"
SHIPPED = {"stories": PRETRAINED, "stories-moe": PRETRAINED / "stories-moe"}
"""Folders by name: a dense story writer, which is the default, and a story writer with routed experts."""


def model_path(name: str | Path) -> Path:
    """Return a path unchanged, or the folder of the shipped model of that name where the path does not exist."""
    path = Path(name)
    # Path.exists raises OSError for a name that is too long.
    return path if os.path.exists(path) else SHIPPED.get(str(name), path)
