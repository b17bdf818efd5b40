"""The page: a frame, its style and scripts, and the profiles as data, in one file without outside requests."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from nkw.files import complete
from simulate.profile.page.data import part_data
from simulate.profile.profile import Profile

_SCRIPTS = ("tools.js", "timeline.js", "tables.js", "charts.js", "main.js")


@dataclass(frozen=True)
class PageLaunch:
    """One launch of a page: its profile, and an SVG of its on-chip memory, if there is one."""

    profile: Profile
    memory: str = ""


@dataclass(frozen=True)
class PageStep:
    """One launch in the order of a run: names from the outermost group inwards, and the number of its part.

    A launch that is repeated has one part and many steps.
    """

    names: tuple[str, ...]
    part: int


def page(title: str, parts: Sequence[PageLaunch], steps: Sequence[PageStep] | None = None) -> str:
    """The page of a run whose launches follow one another; by default, each part once. Equal input, equal bytes."""
    if steps is None:
        steps = [PageStep((part.profile.title,), number) for number, part in enumerate(parts)]
    data: dict[str, Any] = {
        "title": title,
        "parts": [part_data(part.profile) for part in parts],
        "steps": [[list(step.names), step.part] for step in steps],
    }
    memory = "".join(f'<div class="memory" hidden>{part.memory}</div>' for part in parts)
    replacements = {
        "title": escape(title),
        "style": style(),
        "memory": memory,
        "data": _json(data),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
    }
    out = []
    for number, piece in enumerate(_asset("page.html").split("%%")):
        out.append(replacements[piece] if number % 2 else piece)
    return "".join(out)


def write_page(
    path: str | os.PathLike[str],
    title: str,
    parts: Sequence[PageLaunch],
    steps: Sequence[PageStep] | None = None,
) -> None:
    """Write the page; it appears complete or not at all. Raises InvalidArgument where it cannot be written."""
    with complete(path, "page", "NKW-PAGE-PATH") as file:
        file.write(page(title, parts, steps))


def style() -> str:
    """The style sheet of the page."""
    return _asset("page.css")


def _asset(name: str) -> str:
    return files("simulate.profile.page").joinpath(name).read_text(encoding="utf-8")


def _json(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element: no text in it can end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
