"""Writes the pictures of README.md as SVG: the timeline of a kernel and the layers of the project.

The timeline is predicted by the simulator as it is now, so the picture changes with the simulator.

    python -m tools.pictures [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

import simulate
from simulate.timing import Reading
from simulate.timing.timeline import Timeline

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"

_WIDTH, _MARGIN, _LABELS = 760, 16, 104
_LANE_HEIGHT, _LANE_GAP = 22, 6
_COLOURS = ("#5b8db8", "#d59a4c", "#6aa574", "#b0739b", "#8a8ec7", "#c77f6d", "#4fa3a0", "#a8a24e")
_STYLE = """
svg { --page: #fdfcfa; --field: #f3f1ec; --ink: #2e2c28; --soft: #7a766c;
  font-family: ui-sans-serif, system-ui, sans-serif; font-size: 12px; }
@media (prefers-color-scheme: dark) {
  svg { --page: #1b1c1e; --field: #242629; --ink: #e4e2dc; --soft: #9a978f; } }
.page { fill: var(--page); } .field { fill: var(--field); }
text { fill: var(--ink); } .soft { fill: var(--soft); } .name { font-weight: 600; }
"""

_LAYERS = (
    (
        "model",
        "commands, serve, llm, traffic, plan",
        "the command line, an OpenAI server, LLM, load, purchases",
    ),
    ("model", "engine, runners", "scheduling, paged caches, generation, transcription"),
    ("model", "layers, families, loading", "launch lists of a decoder step; checkpoints of Hugging Face"),
    ("nki_kernels", "matmul, attention, mlp, …", "NKI kernels, each with a NumPy reference"),
    ("simulate", "nki, isa", "the API of NKI; rules, values and cost of each instruction"),
    ("simulate", "run, memory, timing", "execution on cores and ranks, placement, time"),
    ("simulate", "hardware", "numbers of trn1, inf2, trn2 and trn3 with their sources"),
)
"""Package, subpackages and purpose, from the user down to the chip."""


def draw_timeline() -> str:
    """Return an SVG picture of the predicted timeline of a feed-forward block on one core of trn2."""
    import ml_dtypes
    import numpy as np

    from nki_kernels.mlp import mlp

    tokens, hidden, intermediate = 256, 1024, 2048
    shapes = ((tokens, hidden), (hidden, intermediate), (intermediate, hidden), (hidden, intermediate))
    arrays = [np.zeros(shape, ml_dtypes.bfloat16) for shape in shapes]
    profile = simulate.profile(mlp, *arrays, target="trn2")
    title = (
        f"mlp on one core of trn2, {tokens} tokens, {hidden} x {intermediate}, bfloat16: "
        f"{profile.length_ns / 1e3:.1f} us predicted, bound by {profile.roofline.bound}"
    )
    return _draw_lanes(profile.timelines[Reading.program], title)


def draw_layers() -> str:
    """Return an SVG picture of the layers of the project, from commands down to hardware records."""
    height, row = 2 * _MARGIN + 42 * len(_LAYERS), 42
    elements = []
    packages = list(dict.fromkeys(package for package, _, _ in _LAYERS))
    for index, (package, names, purpose) in enumerate(_LAYERS):
        top = _MARGIN + row * index
        elements.append(_rectangle(_MARGIN, top, _WIDTH - 2 * _MARGIN, row - 6, css_class="field"))
        elements.append(_rectangle(_MARGIN, top, 6, row - 6, _COLOURS[packages.index(package)]))
        elements.append(_text(_MARGIN + 18, top + 23, package, "name"))
        elements.append(_text(_MARGIN + 118, top + 23, names))
        elements.append(_text(_MARGIN + 350, top + 23, purpose, "soft"))
    return _wrap(elements, height)


def _draw_lanes(timeline: Timeline, title: str) -> str:
    """Return an SVG document with one lane for each busy track of a timeline.

    A bar is a slice of an instruction or a DMA.
    """
    tracks = [track for track in timeline.tracks if timeline.busy_ns[track] > 0]
    width, top = _WIDTH - _LABELS - 2 * _MARGIN, _MARGIN + 26
    bottom = top + len(tracks) * (_LANE_HEIGHT + _LANE_GAP)
    elements = [_text(_MARGIN, _MARGIN + 8, title, "name")]
    for lane, track in enumerate(tracks):
        y = top + lane * (_LANE_HEIGHT + _LANE_GAP)
        elements.append(_text(_MARGIN, y + 15, track))
        elements.append(_rectangle(_MARGIN + _LABELS, y, width, _LANE_HEIGHT, css_class="field"))
        number = timeline.tracks.index(track)
        spans = zip(
            timeline.start_ns[timeline.track == number].tolist(),
            timeline.end_ns[timeline.track == number].tolist(),
        )
        for start_ns, end_ns in _merge(sorted(spans), timeline.length_ns / width):
            left = _MARGIN + _LABELS + width * start_ns / timeline.length_ns
            bar = max(width * (end_ns - start_ns) / timeline.length_ns, 0.4)
            elements.append(_rectangle(left, y + 2, bar, _LANE_HEIGHT - 4, _COLOURS[lane % len(_COLOURS)]))
    for tick in range(5):
        x = _MARGIN + _LABELS + width * tick / 4
        label = f"{timeline.length_ns * tick / 4e3:.1f} us"
        elements.append(_text(x - 44 * tick / 4, bottom + 12, label, "soft"))
    return _wrap(elements, bottom + _MARGIN + 8)


def _merge(spans: Sequence[tuple[float, float]], gap_ns: float) -> list[tuple[float, float]]:
    """Return (start, end) spans in ns in ascending order; spans with a gap of less than `gap_ns` become one."""
    merged: list[tuple[float, float]] = []
    for start_ns, end_ns in spans:
        if merged and start_ns - merged[-1][1] < gap_ns:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_ns)
        else:
            merged.append((start_ns, end_ns))
    return merged


def _rectangle(x: float, y: float, width: float, height: float, colour: str = "", css_class: str = "") -> str:
    """Return an SVG rectangle, filled with `colour` or by a class of the style sheet."""
    fill = f'fill="{colour}"' if colour else f'class="{css_class}"'
    return f'<rect {fill} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def _text(x: float, y: float, content: str, css_class: str = "") -> str:
    """Return an SVG text element at (x, y); `css_class` is a class of the style sheet."""
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}">{escape(content, quote=False)}</text>'


def _wrap(elements: Sequence[str], height: int) -> str:
    """Return an SVG document of the given elements, with the style sheet and a height in pixels."""
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    page = f'<rect class="page" width="{_WIDTH}" height="{height}"/>'
    body = "\n".join([f"<style>{_STYLE}</style>", page, *elements])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


def draw_all() -> dict[str, str]:
    """Return the content of each picture by file name."""
    return {"timeline.svg": draw_timeline(), "layers.svg": draw_layers()}


def write(folder: Path) -> None:
    """Write the pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in draw_all().items():
        (folder / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
