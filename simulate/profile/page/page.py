"""The HTML page of profiles: template, style sheet, scripts and profiles in a single file without external requests.

`data` makes the JSON that the page's scripts draw.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from nkw.files import complete
from simulate.profile.page.data import make_page_launch
from simulate.profile.profile import Profile

_SCRIPTS = ("tools.js", "timeline.js", "tables.js", "charts.js", "main.js")


@dataclass(frozen=True)
class PageLaunch:
    """A launch on the page: its profile, and an SVG picture of its on-chip memory, or an empty string."""

    profile: Profile
    memory: str = ""


@dataclass(frozen=True)
class PageStep:
    """A launch in the order of a run: names from the outermost group inwards, and the index of its `PageLaunch`.

    A launch that is repeated has one `PageLaunch` and many steps.
    """

    names: tuple[str, ...]
    launch: int


def make_page(title: str, launches: Sequence[PageLaunch], steps: Sequence[PageStep] | None = None) -> str:
    """Return the HTML page of a run. Equal arguments give equal bytes.

    Args:
        title: Title of the page.
        launches: The distinct launches.
        steps: All launches in the order of the run; by default, each distinct launch once.
    """
    if steps is None:
        steps = [PageStep((launch.profile.title,), number) for number, launch in enumerate(launches)]
    data: dict[str, Any] = {
        "title": title,
        "parts": [make_page_launch(launch.profile) for launch in launches],
        "steps": [[list(step.names), step.launch] for step in steps],
    }
    memory = "".join(f'<div class="memory" hidden>{launch.memory}</div>' for launch in launches)
    replacements = {
        "title": escape(title),
        "style": read_style(),
        "memory": memory,
        "data": _encode_json(data),
        "script": "\n".join(_read_asset(name) for name in _SCRIPTS),
    }
    out = []
    for number, text in enumerate(_read_asset("page.html").split("%%")):
        out.append(replacements[text] if number % 2 else text)
    return "".join(out)


def write_page(
    path: str | os.PathLike[str],
    title: str,
    launches: Sequence[PageLaunch],
    steps: Sequence[PageStep] | None = None,
) -> None:
    """Write the HTML page of a run to `path`; the file appears complete or not at all.

    Args:
        title: Title of the page.
        launches: The distinct launches.
        steps: All launches in the order of the run; by default, each distinct launch once.

    Raises:
        InvalidArgument: If the file cannot be written.
    """
    with complete(path, "page", "NKW-PAGE-PATH") as file:
        file.write(make_page(title, launches, steps))


def read_style() -> str:
    """Return the CSS of the page, without its element."""
    return _read_asset("page.css")


def _read_asset(name: str) -> str:
    """Return the text of the file with this name in this package."""
    return files("simulate.profile.page").joinpath(name).read_text(encoding="utf-8")


def _encode_json(data: dict[str, Any]) -> str:
    """Encode data as JSON for a script element, with "<" escaped so that no text can end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
