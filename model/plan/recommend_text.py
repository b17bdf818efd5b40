"""A recommendation as tables and sentences, the text that `nkw plan --recommend` prints.

It is 80 columns wide, or as wide as the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from model.layers import find_unsupported
from model.plan.cells import format_mesh, format_ms, format_plural, format_ratios
from model.plan.recommend import MOST_INSTANCES, Offer, Recommendation
from nkw.report import Hanging, Part, table

_MAX_FRONTIER = 8
"""Rows of the table of cost against latency."""

_sentence = partial(Hanging, indent=0)
"""A sentence whose lines are not indented."""


def format_recommendation(recommendation: Recommendation) -> list[Part]:
    """Return the parts (lines, sentences and tables) of a recommendation's text, in order."""
    model, load = recommendation.model, recommendation.load
    blocks: list[list[Part]] = [
        [
            f"{model.config.model_type}, {model.num_layers} layers, {recommendation.dtype}",
            _sentence(
                f"{load.rate:g} requests/s, each with a prompt of {load.prompt:,} and "
                f"{format_plural(load.generate, 'generated token')}, within {load.level}, served by "
                f"{recommendation.stack.title}"
            ),
        ],
        _format_instances(recommendation),
        _format_frontier(recommendation),
        [_sentence(sentence) for sentence in describe_result(recommendation)],
        [_sentence(sentence) for sentence in _describe_basis(recommendation)],
    ]
    return [*blocks[0], *(line for block in blocks[1:] if block for line in ("", *block))]


def describe_result(recommendation: Recommendation) -> Iterator[str]:
    """Yield sentences on the cheapest offer and the offer with the fewest chips, and on the stack's published runs.

    If no offer keeps the service level, yields one sentence on the nearest one.
    """
    cheapest, smallest, load = recommendation.cheapest, recommendation.smallest, recommendation.load
    if smallest is None:
        yield f"no instance keeps {load.level} at {load.rate:g} requests/s; {_describe_nearest(recommendation)}"
        return
    if cheapest is not None:
        yield f"cheapest: {_describe_offer(cheapest)}"
    if smallest is not cheapest:
        yield f"fewest chips: {_describe_offer(smallest)}"
    yield from _describe_published(recommendation)


def _describe_nearest(recommendation: Recommendation) -> str:
    """Return words for the offer that exceeds the service level least.

    If no instance has an offer, returns the name of the last one and the reason why it has none.
    """
    offer = recommendation.nearest
    if offer is None:
        row = recommendation.rows[-1]
        return f"none holds the model: {row.instance.name}: {row.refusal}"
    return f"nearest is {offer.instance.name} with {format_mesh(offer.shape)}, batch {offer.batch}: {_explain(offer)}"


def _explain(offer: Offer) -> str:
    """Return why an offer does not keep the service level: the times above their limits, or too many instances."""
    times = {"ttft": offer.ttft_ns, "itl": offer.mean_itl_ns, "e2e": offer.e2e_ns}
    excesses = [
        f"{name} {format_ms(times[name])} ms, {ratio:.2f} times its bound"
        for name, ratio in offer.excesses.items()
    ]
    return " and ".join(excesses) or f"{offer.instances:,} instances, more than {MOST_INSTANCES:,}"


def _describe_offer(offer: Offer) -> str:
    """Return one line with the instances, chips, copies, mesh, batch, utilisation and price of an offer."""
    instances = (
        f"{offer.instances:,} of {offer.instance.name}" if offer.instances > 1 else offer.instance.name
    )
    dollars = offer.dollars_per_hour
    copies = offer.instances * offer.copies
    needed = "" if copies == offer.needed_copies else f", of which the load needs {offer.needed_copies:,}"
    return (
        f"{instances}, {format_plural(offer.chips, 'chip')}, {_count_copies(copies)} of {format_mesh(offer.shape)} "
        f"with up to {format_plural(offer.batch, 'sequence')} each{needed}; {offer.utilisation:.0%} utilised"
        + ("" if dollars is None or offer.price is None else f"; ${dollars:,.2f}/h, each {offer.price}")
    )


def _count_copies(copies: int) -> str:
    """Return a number of copies with its noun, such as "2 copies"."""
    return f"{copies:,} {'copies' if copies > 1 else 'copy'}"


def _describe_published(recommendation: Recommendation) -> Iterator[str]:
    """Yield a sentence with the published over predicted values of the stack on the chosen offer's chip.

    Without such runs, yields the note of the stack's record or a sentence that says so.
    """
    offer, stack = recommendation.chosen, recommendation.stack
    assert offer is not None, "an offer keeps the service level"
    sizes = offer.instance.target, recommendation.model.total / 1e9, offer.batch, offer.load.prompt
    ratios = {name: stack.find_ratios(metric, *sizes) for name, metric in (("TTFT", "ttft"), ("ITL", "tpot"))}
    if any(ratios.values()):
        listed = "; ".join(f"{name} {format_ratios(ratio)}" for name, ratio in ratios.items())
        yield f"Published over predicted values of this stack on {offer.instance.target}: {listed}."
    else:
        yield stack.note or f"No published run of {stack.title} is near: none was fitted to."


def _format_instances(recommendation: Recommendation) -> list[Part]:
    """Return the table with the best offer of each instance, and sentences on the instances without a good offer."""
    offers = recommendation.best
    out: list[Part] = []
    if offers:
        out = [
            _sentence(
                "by instance the best mesh: the most sequences that a copy decodes together (batch), the instances "
                "that the load needs (n), times in ms, the most generated tokens/s of all, and dollars per million "
                "tokens of prompts (in) and of steps (out) at this load"
            ),
            table(
                "instance|mesh|batch|n|TTFT|ITL|tokens/s|$/h|$ in|$ out|",
                [_format_offer(offer) for offer in offers],
                left=(0, 1, 10),
                firm=(1, 10),
                gap=1,
            ),
        ]
    if any(offer.price is None for offer in offers):
        out.append(_sentence("without $: no public price is known; --prices FILE gives one"))
    out += [_sentence(f"! {offer.instance.name}: {_explain(offer)}") for offer in offers if not offer.is_kept]
    refusals: dict[str, list[str]] = {}
    for row in recommendation.rows:
        if row.refusal:
            refusals.setdefault(row.refusal, []).append(row.instance.name)
    return [*out, *(_sentence(f"{', '.join(names)}: {refusal}") for refusal, names in refusals.items())]


def _format_offer(offer: Offer) -> Sequence[Part]:
    """Return the cells of an offer's row; the last is "!" if the offer does not keep the service level."""
    return (
        *(_wrap(offer.instance.name), format_mesh(offer.shape), f"{offer.batch}", f"{offer.instances:,}"),
        *(format_ms(offer.ttft_ns), format_ms(offer.mean_itl_ns), _shorten(offer.tokens_per_s, 0)),
        *(*_format_dollars(offer), "" if offer.is_kept else "!"),
    )


def _format_dollars(offer: Offer) -> tuple[str, str, str]:
    """Return three cells: dollars an hour, per million prompt tokens, per million tokens of steps; "-" if unknown."""
    dollars, per_million = offer.dollars_per_hour, offer.dollars_per_million
    if dollars is None or per_million is None:
        return "-", "-", "-"
    return _shorten(dollars, 2), _shorten(per_million[0], 3), _shorten(per_million[1], 3)


def _shorten(number: float, decimals: int) -> str:
    """Return a number with `decimals` decimals, or in scientific notation if it is too long for a column."""
    return f"{number:,.{decimals}f}" if number < 10 ** (7 - decimals) else f"{number:.2e}"


def _wrap(name: str) -> Part:
    """Return a text that continues on further lines in a narrow column instead of being cut."""
    from rich.text import Text

    return Text(name, overflow="fold")


def _format_frontier(recommendation: Recommendation) -> list[Part]:
    """Return the table of cost against latency; an empty list if no offer keeps the service level."""
    frontier = recommendation.frontier
    if not frontier:
        return []
    is_priced = recommendation.cheapest is not None
    rows = [
        (
            *(_wrap(offer.instance.name), format_mesh(offer.shape), f"{offer.batch}", f"{offer.instances:,}"),
            *(f"{offer.utilisation:.0%}", format_ms(offer.ttft_ns), format_ms(offer.mean_itl_ns)),
            f"{offer.e2e_ns / 1e9:,.2f}",
            _format_dollars(offer)[0] if is_priced else f"{offer.chips:,}",
        )
        for offer in frontier[:_MAX_FRONTIER]
    ]
    cost = "price" if is_priced else "number of chips"
    return [
        _sentence(
            f"cost against latency: offers that no other one beats in both {cost} and time of a request, of those "
            "predicted; utilisation (util) at this load"
        ),
        table(
            f"instance|mesh|batch|n|util|TTFT|ITL|request s|{'$/h' if is_priced else 'chips'}",
            rows,
            left=(0, 1),
            firm=(1,),
            gap=1,
        ),
    ]


def _describe_basis(recommendation: Recommendation) -> Iterator[str]:
    """Yield sentences on how the times were computed and what they leave out."""
    yield (
        "TTFT is the mean wait until a copy has room for a sequence, at random arrivals, and the prompt. ITL is that "
        "of a copy with a whole batch, with the prompts of the other sequences between the steps. nkw traffic has "
        "percentiles."
    )
    missing = find_unsupported(recommendation.model.config)
    if missing:
        yield f"Times are rooflines, because no kernel of this project computes {', '.join(missing)}."
    else:
        yield "Times are dry runs of this project's kernels and the engine time of the stack; program reading."
