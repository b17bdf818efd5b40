"""HTML page of a search: its report, and the best time over the candidates, in a single file without scripts."""

from __future__ import annotations

from html import escape
from math import inf

from nkw.terminal import rendered
from simulate.profile.numbers import format_us
from simulate.tune.report import Report

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 320, 90, 20, 30, 40  # pixels
_STYLE = """
:root { color-scheme: light dark; --ink: #2e2c28; --soft: #9a978f; --best: #5b8db8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e2dc } }
body { margin: 1rem } pre { overflow-x: auto } svg { max-width: 100%; font: 12px system-ui, sans-serif }
text { fill: var(--ink) } .axis { stroke: var(--soft) } circle { fill: var(--soft) }
.floor { stroke: var(--soft); stroke-dasharray: 6 3 } .best { stroke: var(--best); stroke-width: 2; fill: none }
"""


def make_page(report: Report) -> str:
    """Return the HTML page of a report: its text, then the curve."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(report.title)}</title>\n'
        f"<style>{_STYLE}</style>\n<pre>{escape(rendered(report.make_parts()))}</pre>\n{_draw_curve(report)}\n</html>\n"
    )


def _draw_curve(report: Report) -> str:
    """Return an SVG element: candidates as dots, the best time so far as a line, and the floor as a dashed line.

    The floor is the time at peak rates. Candidates slower than twice the default are drawn on the upper edge.
    """
    trials = report.search_state.trials
    times = [
        (trial.number, trial.outcome.length_ns) for trial in trials if trial.outcome.length_ns is not None
    ]
    shortest_ns = min(report.floor_ns, *(time for _, time in times))
    longest_ns = 2 * max(
        time for number, time in times if not number
    )  # slower candidates are drawn on the upper edge
    last = max(1, trials[-1].number)

    def to_pixels(number: int, time: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * number / last
        share = (min(time, longest_ns) - shortest_ns) / (longest_ns - shortest_ns or 1.0)
        return round(x, 1), round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share, 1)

    best = inf
    dots: list[str] = []
    steps: list[str] = []
    for number, time in times:
        x, y = to_pixels(number, time)
        dots.append(f'<circle cx="{x}" cy="{y}" r="2"><title>{number}: {format_us(time)} us</title></circle>')
        best = min(best, time)
        steps.append(f"{'H' if steps else 'M'}{x}{' V' if steps else ' '}{to_pixels(number, best)[1]}")
    right = _WIDTH - _RIGHT
    labels = [
        f'<text x="{_LEFT - 8}" y="{to_pixels(0, time)[1] + 4}" text-anchor="end">{format_us(time)}</text>'
        for time in dict.fromkeys((longest_ns, best, report.floor_ns))
    ]
    floor = to_pixels(0, report.floor_ns)[1]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">',
            f'<text x="{_LEFT}" y="16">us of the candidates, the best so far, and the floor</text>',
            f'<path class="axis" fill="none" d="M{_LEFT} {_TOP} V{_HEIGHT - _BOTTOM} H{right}"/>',
            *labels,
            *dots,
            f'<path class="floor" d="M{_LEFT} {floor} H{right}"/>',
            f'<path class="best" d="{" ".join(steps)} H{right}"/>',
            f'<text x="{right}" y="{_HEIGHT - 16}" text-anchor="end">candidate {last:,}</text>',
            "</svg>",
        ]
    )
