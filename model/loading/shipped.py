"""Models that come with the package, by name."""

from __future__ import annotations

import os
from pathlib import Path

PRETRAINED = Path(__file__).resolve().parents[1] / "pretrained"
SHAPES = PRETRAINED / "shapes"
SHIPPED = {
    "stories": PRETRAINED,
    "stories-moe": PRETRAINED / "stories-moe",
    "stories-mask": PRETRAINED / "stories-mask",
    "shapes": SHAPES,
}
"""Folders by name: a dense story writer, which is the default, one with routed experts, one that replaces masks, and a
model of images."""


def find_model_name(folder: str | Path) -> str:
    """Return the name of the shipped model, such as "stories", in a folder; for other folders the folder's own name."""
    path = Path(folder).resolve()
    return next((name for name, shipped in SHIPPED.items() if path == shipped), path.name)


def find_model_path(name: str | Path) -> Path:
    """Return the folder of a model that a user names by a path or by the name of a shipped model.

    That is an existing path as it is; otherwise the folder of the shipped model called `name`, or else the path itself.
    """
    path = Path(name)
    # Path.exists raises OSError for a name that is too long.
    return path if os.path.exists(path) else SHIPPED.get(str(name), path)


def find_config_path(name: str | Path) -> Path:
    """Return where the config of a model is that a user names by a path, a shipped model or a published one.

    The first that exists: the path `name` itself, the folder of a shipped model, the config.json of a published model.
    Otherwise the path itself is returned.
    """
    path = find_model_path(name)
    if os.path.exists(path):
        return path
    # The help of a command does without numpy, which this module imports.
    from model.config.published import find_published

    published = find_published(str(name))
    return path if published is None else published.path
