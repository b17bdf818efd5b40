"""Predicted traffic as tables and sentences: 80 columns as text, on a terminal as wide as that is."""

from __future__ import annotations

from collections.abc import Iterator

from model.device import chip
from model.traffic.deployment import Deployment
from model.traffic.report import PERCENTILES, SHARE, Percentiles, ServiceLevel, Summary
from model.traffic.search import SEARCHED
from model.traffic.traffic import Traffic
from model.traffic.workload import SECOND_NS
from nkw.parts import Hanging, Part, table


def parts(traffic: Traffic) -> list[Part]:
    """The parts of the text, for a terminal."""
    blocks = [report(traffic), _slices(traffic.summary)]
    if traffic.variants:
        blocks.append(comparison(traffic))
    blocks.append([_sentence(each) for each in basis(traffic)])
    return _apart(blocks)


def report(traffic: Traffic) -> list[Part]:
    """The deployment, the requests, and what became of them."""
    return _apart([_deployment(traffic), _times(traffic.summary), _rates(traffic)])


def _apart(blocks: list[list[Part]]) -> list[Part]:
    return [*blocks[0], *(part for block in blocks[1:] for part in ("", *block))]


def _sentence(words: str) -> Part:
    return Hanging(words, indent=0)


def _deployment(traffic: Traffic) -> list[Part]:
    own, setup, workload = traffic.deployment, traffic.deployment.setup, traffic.workload
    limits = setup.options
    if workload.users:
        comes = (
            f"{_plural(workload.users, 'user')}, {workload.think_ns / SECOND_NS:g} s between answer and next"
        )
    elif workload.rate is None:
        comes = "all at one moment"
    else:
        comes = f"{workload.rate:,.2f} per second"
    left_out = f"; {workload.left_out:,} left out, without tokens or too long" if workload.left_out else ""
    each = "each" if setup.ep == 1 else "for each of their groups"
    out: list[Part] = [
        _sentence(
            f"{traffic.model.config.model_type} on {own.instance.name}: {own.ranks}, "
            f"{_plural(own.replicas, 'replica')}, {setup.dtype}; "
            f"{_pages(own)} of {setup.block_size} positions {each}"
        ),
        _sentence(
            f"a step takes up to {_plural(limits.max_num_seqs, 'sequence')} and "
            f"{limits.max_num_batched_tokens:,} tokens"
        ),
        *([] if setup.sizes is None else [_sentence(f"steps round up to {setup.sizes}")]),
        _sentence(f"{_plural(len(workload.queries), 'request')}, {comes}{left_out}"),
    ]
    if own.link is not None:
        prompts = setup.prefill_replicas
        out.append(
            _sentence(
                f"{_plural(prompts, 'replica')} for prompts, {own.replicas - prompts} for decoding; pages move over "
                f"{own.link.words}: {own.link.gb_per_s * own.tp * own.setup.ep:,.1f} GB/s of a replica"
            )
        )
    if setup.speculation is not None:
        draft = setup.speculation.model
        where = "looked up in the prompt" if draft is None else f"of a {draft.config.model_type} model"
        out.append(_sentence(f"a step verifies up to {_plural(limits.speculative_tokens, 'draft')} {where}"))
    return out


def _pages(own: Deployment) -> str:
    """The pages of each kind."""
    of_kind = (
        f"{kind.pages:,} slots of {'windows' if own.takes_speech else 'states'}"
        if kind.recurrent
        else f"{kind.pages:,} pages" + ("" if kind.window is None else f" for windows of {kind.window:,}")
        for kind in own.kinds
    )
    return " and ".join(of_kind)


def _times(run: Summary) -> list[Part]:
    rows = [
        ("time to first token (TTFT)", run.ttft),
        ("between tokens (ITL)", run.itl),
        ("end to end", run.e2e),
        ("in the queue", run.queue),
        *([("until the pages have moved", run.handover)] if run.handover else []),
    ]
    heads = "|".join(["milliseconds", *(f"p{percent}" for percent in PERCENTILES)])
    return [table(heads, [(name, *_row(times)) for name, times in rows])]


def _row(times: Percentiles) -> list[str]:
    return [milliseconds(times[percent]) for percent in PERCENTILES]


def _rates(traffic: Traffic) -> list[Part]:
    run, level = traffic.summary, traffic.request.level
    padded = run.computed_tokens + run.padding
    out = [
        _sentence(
            f"{run.requests_per_s:,.2f} requests/s, {run.tokens_per_s:,.1f} new tokens/s; steps take "
            f"{run.utilisation:.1%} of the time; {run.padding / padded:.1%} of the computed tokens are padding"
        ),
        _sentence(
            f"goodput: {run.goodput_per_s:,.2f} requests/s with {level_text(level)} "
            f"({run.met / run.requests:.1%} of the requests)"
        ),
    ]
    if traffic.window_s is not None:
        transcribed = run.requests_per_s * traffic.window_s
        out.append(
            _sentence(f"{transcribed:,.0f} s of speech in a second; each request has {traffic.window_s:g} s")
        )
    if run.utilisations is not None:
        prompts, decoding = run.utilisations
        out.append(
            _sentence(
                f"steps take {prompts:.1%} of the time where prompts are computed, {decoding:.1%} elsewhere"
            )
        )
    if run.acceptance:
        rates = ", ".join(f"{each:.0%}" for each in run.acceptance)
        out.append(_sentence(f"drafts that were right, place by place: {rates}"))
    if run.cached_tokens:
        out.append(
            _sentence(f"{run.cached_tokens / run.prompt_tokens:.1%} of the prompts' tokens were cached")
        )
    if traffic.breaks is not None:
        out.append(
            _sentence(
                f"the service level breaks at {traffic.breaks:,.2f} requests/s: above, less than {SHARE:.0%} of the "
                "requests keep to it, or they come faster than they are served"
            )
        )
    elif traffic.searched:
        out.append(_sentence("the service level breaks at every rate: requests alone do not keep to it"))
    if traffic.request.price is not None:
        price = run.dollars_per_million(traffic.request.price)
        out.append(_sentence(f"${price:,.3f} per million new tokens at ${traffic.request.price:,.2f}/h"))
    return list(out)


def _slices(run: Summary) -> list[Part]:
    rows = [
        (
            f"{_seconds(each.begin_ns)}..{_seconds(each.end_ns)}",
            f"{each.running:,.1f}",
            f"{each.waiting:,.1f}",
            f"{each.pages:.1%}",
            f"{each.most_pages:.1%}",
            f"{each.preemptions:,}",
        )
        for each in run.slices
    ]
    return [table("seconds|running|waiting|pages in use|most|preemptions", rows)]


def comparison(traffic: Traffic) -> list[Part]:
    """The run beside its variants."""
    rows = [_variant("as above", traffic.summary)]
    sentences: list[Part] = []
    for each in traffic.variants:
        if each.summary is None:
            sentences.append(_sentence(f"{each.name}: {each.refusal}"))
        else:
            rows.append(_variant(each.name, each.summary))
    heads = "the same requests|TTFT p50|p99|ITL p50|p99|tokens/s|goodput/s"
    return [table(heads, rows, gap=1), *sentences]


def _variant(name: str, run: Summary) -> tuple[str, ...]:
    times = (run.ttft[50], run.ttft[99], run.itl[50], run.itl[99])
    return (name, *map(milliseconds, times), f"{run.tokens_per_s:,.0f}", f"{run.goodput_per_s:,.2f}")


def basis(traffic: Traffic) -> Iterator[str]:
    """Sentences: what the times rest on."""
    shapes = len(traffic.deployment.clock.shapes)
    yield (
        f"Times of steps are dry runs of this project's kernels ({_plural(shapes, 'shape')}), program reading; the "
        "scheduler and the host take no time. Requests go to the replicas in turn."
    )
    if traffic.breaks is not None:
        own = traffic.deployment
        requests, replicas = SEARCHED * own.decoding_of_unit, own.replicas // own.units
        yield (
            f"The breaking rate is that of up to {requests:,} requests on {_plural(replicas, 'replica')}, times "
            f"{own.units}."
        )
    if traffic.deployment.link is not None:
        link = traffic.deployment.link
        yield f"A transfer takes its bytes over the documented bandwidth ({link.source}), and its links alone."
    for refusal in traffic.refusals:
        yield f"Roofline for a part: {refusal}."
    record = chip(traffic.deployment.instance.target)
    if record.replaced:
        yield f"Times are those of {record.label}."


def level_text(level: ServiceLevel) -> str:
    """A service level in words."""
    names = (("TTFT", level.ttft), ("mean ITL", level.itl), ("end to end", level.e2e))
    return ", ".join(f"{name} up to {milliseconds(bound)} ms" for name, bound in names if bound is not None)


def milliseconds(time_ns: float) -> str:
    """Two decimals where a column has room for them."""
    time_ms = time_ns / 1e6
    return f"{time_ms:,.2f}" if time_ms < 1_000 else f"{time_ms:,.0f}"


def _seconds(time_ns: int) -> str:
    """Three digits, or all of a whole number of seconds."""
    time_s = time_ns / SECOND_NS
    return f"{time_s:.3g}" if time_s < 100 else f"{time_s:,.0f}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
