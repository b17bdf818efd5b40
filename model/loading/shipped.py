"""The models that come with the package, by their names."""

from __future__ import annotations

import os
from pathlib import Path

PRETRAINED = Path(__file__).resolve().parents[1] / "pretrained"
SHIPPED = {"stories": PRETRAINED, "stories-moe": PRETRAINED / "stories-moe"}
"""A dense story writer, which is the default, and one whose MLPs are routed experts."""


def model_path(name: str | Path) -> Path:
    """The path as it stands, or the folder of a shipped model where nothing is at that path."""
    path = Path(name)
    # Path.exists raises OSError for a name that is too long.
    return path if os.path.exists(path) else SHIPPED.get(str(name), path)
