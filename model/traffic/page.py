"""Predicted traffic as a page: its report, distributions, the run over time and latencies over rates, in one file.

The page needs nothing from outside and has no scripts. Words of a config or a trace stand on it escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from model.device import page_style
from model.traffic.chart import Line, Point, Scale, chart
from model.traffic.report import MOMENTS, Slice, Summary
from model.traffic.search import RatePoint
from model.traffic.text import basis, comparison, milliseconds, report
from model.traffic.traffic import Traffic
from model.traffic.workload import SECOND_NS
from nkw.parts import Hanging, as_html

_STYLE = """
svg { display: block; } .nkw-report p { white-space: normal; } .big { overflow-wrap: anywhere; }
.nkw-report td p { min-width: 0; }
@media (min-width: 1000px) { section.half { grid-column: auto; } }
"""


def page(traffic: Traffic, name: str) -> str:
    """The page of a prediction. Equal predictions, equal bytes."""
    title = escape(f"{name} on {traffic.deployment.instance.name}: traffic")
    sections = [
        _section(_facts(traffic) + as_html(report(traffic))),
        *(_section(each, "half") for each in _charts(traffic)),
    ]
    if traffic.variants:
        sections.append(_section("<h2>The same requests in other ways</h2>" + as_html(comparison(traffic))))
    resting = as_html([Hanging(each, indent=0) for each in basis(traffic)])
    sections.append(_section(f"<h2>What the times rest on</h2>{resting}"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{page_style()}{_STYLE}</style>\n</head>\n<body>\n<header><h1>{title}</h1></header>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(inside: str, kind: str = "") -> str:
    return f'<section class="{kind}">{inside}</section>' if kind else f"<section>{inside}</section>"


def _facts(traffic: Traffic) -> str:
    run, price = traffic.summary, traffic.request.price
    facts = [
        (f"{milliseconds(run.ttft[99])} ms", "TTFT, p99"),
        (f"{milliseconds(run.itl[99])} ms", "between tokens, p99"),
        (f"{run.tokens_per_s:,.0f}", "new tokens/s"),
        (f"{run.goodput_per_s:,.2f}", "requests/s that keep to the service level"),
    ]
    if traffic.breaks is not None:
        facts.append((f"{traffic.breaks:,.2f}", "requests/s at which it breaks"))
    if price is not None:
        facts.append((f"${run.dollars_per_million(price):,.3f}", "per million new tokens"))
    cells = (
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
        for value, words in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _charts(traffic: Traffic) -> Iterable[str]:
    run = traffic.summary
    yield _distributions(run)
    yield _over_time(
        run, "requests completed", "requests/s", {"all": _completed_per_s, "service level kept": _met_per_s}
    )
    yield _over_time(
        run,
        "requests on their way",
        "requests",
        {
            "running": lambda own: own.running,
            "waiting": lambda own: own.waiting,
            f"preempted in 1/{MOMENTS} of the run": lambda own: own.preemptions,
        },
    )
    yield _over_time(
        run,
        "pages in use",
        "% of all",
        {"mean": lambda own: 100 * own.pages, "most of a replica": lambda own: 100 * own.most_pages},
    )
    if traffic.curve and traffic.breaks is not None:
        yield _latencies(traffic.curve, traffic.breaks)
        yield _goodput(traffic.curve, traffic.breaks)


def _distributions(run: Summary) -> str:
    """How many percent of the requests, or of the pairs of tokens, take at most so long."""
    times = {"TTFT": run.ttft, "between tokens": run.itl, "end to end": run.e2e, "in the queue": run.queue}
    if run.handover is not None:
        times["until the pages have moved"] = run.handover
    x = Scale.around("ms", (value / 1e6 for each in times.values() for value in each.values()), True)
    lines = [
        Line(name, [(value / 1e6, float(percent)) for percent, value in percentiles.items()])
        for name, percentiles in times.items()
    ]
    return chart("how many take at most so long", x, Scale("%", 0, 100), lines)


def _over_time(run: Summary, title: str, unit: str, values: dict[str, Callable[[Slice], float]]) -> str:
    x = Scale("s", 0.0, run.elapsed_ns / SECOND_NS)
    lines = [
        Line(name, [point for each in run.moments for point in _level(each, value(each))])
        for name, value in values.items()
    ]
    y = Scale.around(unit, (point[1] for line in lines for point in line.points))
    return chart(f"{title}, over time", x, y, lines)


def _level(part: Slice, value: float) -> tuple[Point, Point]:
    return (part.begin_ns / SECOND_NS, value), (part.end_ns / SECOND_NS, value)


def _completed_per_s(part: Slice) -> float:
    return part.completed * SECOND_NS / (part.end_ns - part.begin_ns)


def _met_per_s(part: Slice) -> float:
    return part.met * SECOND_NS / (part.end_ns - part.begin_ns)


def _latencies(curve: Iterable[RatePoint], breaks: float) -> str:
    points = list(curve)
    times: dict[str, Callable[[Summary], float]] = {
        "TTFT p50": lambda run: run.ttft[50],
        "TTFT p99": lambda run: run.ttft[99],
        "between tokens p50": lambda run: run.itl[50],
        "between tokens p99": lambda run: run.itl[99],
    }
    lines = [
        Line(name, [(each.rate, time(each.run) / 1e6) for each in points], True)
        for name, time in times.items()
    ]
    y = Scale.around("ms", (point[1] for line in lines for point in line.points), True)
    return chart("latency over rate", _rates(points), y, lines, ("breaks", breaks))


def _goodput(curve: Iterable[RatePoint], breaks: float) -> str:
    points = list(curve)
    kept = [(each.rate, 100 * each.run.met / each.run.requests) for each in points]
    x, lines = _rates(points), [Line("service level kept", kept, True)]
    return chart("requests that keep to the service level", x, Scale("%", 0, 100), lines, ("breaks", breaks))


def _rates(points: Iterable[RatePoint]) -> Scale:
    return Scale.around("requests/s", (each.rate for each in points))
