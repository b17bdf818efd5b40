"""Published configs that come with the package, by the name of their model.

`model/published` has one file for each model, with the fields of its config.json that decide sizes, and `models.json`
with the Hugging Face ids that have these sizes. A plan takes such a name in place of a path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from model.config.fields import read_json
from model.errors import ModelError
from nkw.suggestions import closest

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
"""Folder of the published configs."""

_TABLE = Path(__file__).with_name("published.json")
_VARIANTS = ("-hf", "-chat", "-instruct", "-it", "-pt")
"""Endings of the names of models that have the sizes of the model without the ending."""


@dataclass(frozen=True)
class PublishedModel:
    """A model whose config comes with the package.

    ids     Hugging Face ids of models that have this config
    date    day on which the fields were read
    source  public repository of the fields
    """

    name: str
    ids: tuple[str, ...]
    date: str
    source: str

    @property
    def path(self) -> Path:
        """Path of the model's JSON file in the folder `PUBLISHED`."""
        return PUBLISHED / f"{self.name}.json"


@cache
def list_published() -> dict[str, PublishedModel]:
    """Return the published models by name, in alphabetical order."""
    table: dict[str, dict[str, Any]] = read_json(_TABLE)
    return {
        name: PublishedModel(name, tuple(row["ids"]), row["date"], row["source"])
        for name, row in sorted(table.items())
    }


def find_published(name: str) -> PublishedModel | None:
    """Return the published model whose name or Hugging Face id is `name`, ignoring case; None if there is none.

    The owner of an id may be left out, and so may endings such as -Instruct that change no size.
    """
    wanted = name.lower()
    for model in list_published().values():
        ids = [known.lower() for known in model.ids]
        if wanted in (model.name, *ids):
            return model
        if "/" not in wanted and _strip_variants(wanted) in map(_strip_variants, (model.name, *ids)):
            return model
    return None


def _strip_variants(name: str) -> str:
    """Return the name of a model without an owner, as in "owner/name", and without endings that change no size."""
    name = name.rpartition("/")[2]
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    return name


def describe_config(path: Path) -> str:
    """Return how reports call a config: the name of a published model, or the path of any other config."""
    return path.stem if path.parent == PUBLISHED else str(path)


def check_config_path(path: Path) -> None:
    """Raise ModelError if a path does not exist; the message has the closest published name, and those like it."""
    if os.path.exists(path):
        return
    published = list_published()
    ids = {known: model.name for model in published.values() for known in (model.name, *model.ids)}
    meant = closest(str(path), ids)
    word = _find_first_word(ids.get(meant, str(path)))
    names = [name for name in published if _find_first_word(name) == word]
    words = sorted({_find_first_word(name) for name in published})
    raise ModelError(
        f"{path} is neither a config.json, nor a folder of one, nor a published model"
        f"{f'; did you mean {meant}?' if meant else ';'} "
        + (f"{word} names are {', '.join(names)}" if names else f"names begin with {', '.join(words)}")
        + "; docs/model/planning.md lists all",
        "NKW-MODEL-CONFIG",
    )


def _find_first_word(name: str) -> str:
    """Return the first word of a model's name in lower case, without owner and version, as "qwen" of Qwen/Qwen3-8B."""
    return name.rpartition("/")[2].lower().partition("-")[0].rstrip("0123456789.")
