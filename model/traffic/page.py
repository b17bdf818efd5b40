"""Predicted traffic as an HTML page: its report, distributions, the run over time and latencies over rates.

The page is one file, needs nothing from outside and has no scripts. Text of a config or a trace is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from model.device import page_style
from model.traffic.chart import Line, Scale, render_chart
from model.traffic.report import MOMENTS, Slice, Summary
from model.traffic.search import RatePoint
from model.traffic.text import build_comparison, build_report, build_sentences, describe_basis, format_ms
from model.traffic.traffic import Traffic
from model.traffic.workload import SECOND_NS
from nkw.report import as_html

_STYLE = """
svg { display: block; } .nkw-report p { white-space: normal; } .big { overflow-wrap: anywhere; }
.nkw-report td p { min-width: 0; }
@media (min-width: 1000px) { section.half { grid-column: auto; } }
"""


def render_page(traffic: Traffic, name: str) -> str:
    """Return the HTML page of a prediction; equal predictions give equal bytes.

    Args:
        traffic: The prediction.
        name: Name of the config, for the title.
    """
    title = escape(f"{name} on {traffic.deployment.instance.name}: traffic")
    sections = [
        f"<section>{_render_facts(traffic)}{as_html(build_report(traffic))}</section>",
        *(f'<section class="half">{chart}</section>' for chart in _render_charts(traffic)),
    ]
    if traffic.variants:
        comparison = as_html(build_comparison(traffic))
        sections.append(f"<section><h2>The same requests in other ways</h2>{comparison}</section>")
    basis = as_html(build_sentences(describe_basis(traffic)))
    sections.append(f"<section><h2>What the times rest on</h2>{basis}</section>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{page_style()}{_STYLE}</style>\n</head>\n<body>\n<header><h1>{title}</h1></header>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _render_facts(traffic: Traffic) -> str:
    """Return the large figures at the top of the page as HTML: latencies, rates and, if known, a price."""
    run, price = traffic.summary, traffic.price
    facts = [
        (f"{format_ms(run.ttft[99])} ms", "TTFT, p99"),
        (f"{format_ms(run.itl[99])} ms", "between tokens, p99"),
        (f"{run.tokens_per_s:,.0f}", "new tokens/s"),
        (f"{run.goodput_per_s:,.2f}", "requests/s that keep to the service level"),
    ]
    if traffic.breaking_rate is not None:
        facts.append((f"{traffic.breaking_rate:,.2f}", "requests/s at which it breaks"))
    if price is not None:
        dollars = run.dollars_per_million(price.dollars_per_hour)
        facts.append((f"${dollars:,.3f}", "per million new tokens, prompts included"))
    cells = (
        f'<div class="fact"><b>{escape(figure)}</b><span>{escape(label)}</span></div>'
        for figure, label in facts
    )
    return f'<div class="facts">{"".join(cells)}</div>'


def _render_charts(traffic: Traffic) -> Iterable[str]:
    """Yield the charts as HTML: distributions, three charts over time and, if they are known, two charts over rates."""
    run = traffic.summary
    yield _render_distributions(run)
    yield _render_over_time(
        run,
        "requests completed",
        "requests/s",
        {
            "all": lambda slice: _compute_rate(slice, slice.completed),
            "service level kept": lambda slice: _compute_rate(slice, slice.met),
        },
    )
    yield _render_over_time(
        run,
        "requests on their way",
        "requests",
        {
            "running": lambda slice: slice.running,
            "waiting": lambda slice: slice.waiting,
            f"preempted in 1/{MOMENTS} of the run": lambda slice: slice.preemptions,
        },
    )
    yield _render_over_time(
        run,
        "pages in use",
        "% of all",
        {"mean": lambda slice: 100 * slice.pages, "most of a replica": lambda slice: 100 * slice.most_pages},
    )
    if traffic.curve and traffic.breaking_rate is not None:
        rates = Scale.around("requests/s", (point.rate for point in traffic.curve))
        mark = "breaks", traffic.breaking_rate
        yield _render_latencies(traffic.curve, rates, mark)
        kept = [(point.rate, 100 * point.run.met / point.run.requests) for point in traffic.curve]
        title, lines = "requests that keep to the service level", [Line("service level kept", kept, True)]
        yield render_chart(title, rates, Scale("%", 0, 100), lines, mark)


def _render_distributions(run: Summary) -> str:
    """Return the chart of the percentiles of each latency as HTML.

    ITL has a sample for each pair of neighbouring tokens, the other latencies one for each request.
    """
    times = {"TTFT": run.ttft, "between tokens": run.itl, "end to end": run.e2e, "in the queue": run.queue}
    if run.handover is not None:
        times["until the pages have moved"] = run.handover
    lines = [
        Line(name, [(time_ns / 1e6, float(percent)) for percent, time_ns in percentiles.items()])
        for name, percentiles in times.items()
    ]
    x = Scale.around("ms", (point[0] for line in lines for point in line.points), True)
    return render_chart("how many take at most so long", x, Scale("%", 0, 100), lines)


def _render_over_time(
    run: Summary, title: str, unit: str, quantities: dict[str, Callable[[Slice], float]]
) -> str:
    """Return a chart of quantities over the time of a run as HTML.

    Args:
        run: The run, whose 64 slices are drawn as constant pieces.
        title: Heading of the chart.
        unit: Label of the y axis.
        quantities: Functions from a slice to a number, by the name of their line.
    """
    lines = [
        Line(
            name,
            [
                (time_ns / SECOND_NS, quantity(slice))
                for slice in run.moments
                for time_ns in (slice.begin_ns, slice.end_ns)
            ],
        )
        for name, quantity in quantities.items()
    ]
    y = Scale.around(unit, (point[1] for line in lines for point in line.points))
    return render_chart(f"{title}, over time", Scale("s", 0.0, run.elapsed_ns / SECOND_NS), y, lines)


def _compute_rate(slice: Slice, count: int) -> float:
    """Return `count` divided by the seconds of a slice."""
    return count * SECOND_NS / (slice.end_ns - slice.begin_ns)


def _render_latencies(curve: Sequence[RatePoint], rates: Scale, mark: tuple[str, float]) -> str:
    """Return the chart of TTFT and ITL at rates around the breaking rate as HTML.

    Args:
        curve: Runs, by rate.
        rates: The x axis.
        mark: Label and rate of a vertical line.
    """
    times: dict[str, Callable[[Summary], float]] = {
        "TTFT p50": lambda run: run.ttft[50],
        "TTFT p99": lambda run: run.ttft[99],
        "between tokens p50": lambda run: run.itl[50],
        "between tokens p99": lambda run: run.itl[99],
    }
    lines = [
        Line(name, [(point.rate, time_ns(point.run) / 1e6) for point in curve], True)
        for name, time_ns in times.items()
    ]
    y = Scale.around("ms", (point[1] for line in lines for point in line.points), True)
    return render_chart("latency over rate", rates, y, lines, mark)
