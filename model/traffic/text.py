"""Predicted traffic as tables and sentences: `nkw traffic` prints them, and the HTML page has them too.

Output that is not a terminal has 80 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from model.device import chip
from model.plan.cells import format_ratios
from model.plan.service_level import SHARE, ServiceLevel
from model.plan.stacks import Padding
from model.plan.text import describe_choice
from model.traffic.deployment import Deployment
from model.traffic.report import PERCENTILES, Percentiles, Summary
from model.traffic.search import SAMPLE
from model.traffic.traffic import Traffic
from model.traffic.variants import HALF_THE_BUCKETS
from model.traffic.workload import SECOND_NS
from nkw.report import Hanging, Part, table

_SLOWER = 1.5
"""Ratio of times between tokens above which a variant is explained."""


def build_text(traffic: Traffic) -> list[Part]:
    """Return all parts of the printed report.

    They are the deployment, times, rates, the run over time, variants, and the basis of the times.
    """
    blocks = [build_report(traffic), _build_slices(traffic.summary)]
    if traffic.variants:
        blocks.append(build_comparison(traffic))
    return join_blocks([*blocks, build_sentences(describe_basis(traffic))])


def build_report(traffic: Traffic) -> list[Part]:
    """Return the first parts of the report: sentences about the deployment, a table of times, sentences about rates."""
    return join_blocks(
        [
            build_sentences(_describe_deployment(traffic)),
            _build_times(traffic.summary),
            build_sentences(_describe_rates(traffic)),
        ]
    )


def build_sentences(sentences: Iterable[str]) -> list[Part]:
    """Return each sentence as one part of a report, wrapped without an indent."""
    return [Hanging(sentence, indent=0) for sentence in sentences]


def join_blocks(blocks: list[list[Part]]) -> list[Part]:
    """Return the parts of all blocks, with an empty line between two blocks."""
    return [*blocks[0], *(line for block in blocks[1:] for line in ("", *block))]


def _describe_deployment(traffic: Traffic) -> Iterator[str]:
    """Yield sentences about the deployment and the requests."""
    deployment, setup, workload = traffic.deployment, traffic.deployment.setup, traffic.workload
    limits = setup.options
    groups = "each" if setup.ep == 1 else "for each of their groups"
    yield (
        f"{traffic.model.config.type_label} on {deployment.instance.name}: {deployment.ranks}, "
        f"{format_count(deployment.replicas, 'replica')}, {setup.dtype}; "
        f"{_describe_pages(deployment)} of {setup.block_size} positions {groups}"
    )
    yield (
        f"a step takes up to {format_count(limits.max_num_seqs, 'sequence')} and "
        f"{limits.max_num_batched_tokens:,} tokens"
    )
    if setup.sizes is not None:
        yield f"steps round up to {setup.sizes}"
    if workload.users:
        think_s = workload.think_ns / SECOND_NS
        arrivals = f"{format_count(workload.users, 'user')}, {think_s:g} s between answer and next"
    elif workload.rate is None:
        arrivals = "all at one moment"
    else:
        arrivals = f"{workload.rate:,.2f} per second"
    left_out = f"; {workload.left_out:,} left out, without tokens or too long" if workload.left_out else ""
    yield f"{format_count(len(workload.queries), 'request')}, {arrivals}{left_out}"
    yield from describe_choice(traffic.judged)
    if deployment.link is not None:
        link, prefill_replicas = deployment.link, setup.prefill_replicas
        yield (
            f"{format_count(prefill_replicas, 'replica')} for prompts, {deployment.replicas - prefill_replicas} for "
            f"decoding; pages move over {link.words}: {link.gb_per_s * deployment.tp * setup.ep:,.1f} GB/s of a replica"
        )
    if setup.speculation is not None:
        model = setup.speculation.model
        proposer = "looked up in the prompt" if model is None else f"of a {model.config.model_type} model"
        yield f"a step verifies up to {format_count(limits.speculative_tokens, 'draft')} {proposer}"


def _describe_pages(deployment: Deployment) -> str:
    """Return the numbers of pages and slots of a replica's group as text, by page kind."""
    counts = (
        f"{page_kind.pages:,} slots of {'windows' if deployment.clock.takes_speech else 'states'}"
        if page_kind.recurrent
        else f"{page_kind.pages:,} pages"
        + ("" if page_kind.window is None else f" for windows of {page_kind.window:,}")
        for page_kind in deployment.page_kinds
    )
    return " and ".join(counts)


def _build_times(run: Summary) -> list[Part]:
    """Return the table of a run's times, as a list of one part."""
    rows = [
        ("time to first token (TTFT)", run.ttft),
        ("between tokens (ITL)", run.itl),
        ("end to end", run.e2e),
        ("in the queue", run.queue),
        *([("until the pages have moved", run.handover)] if run.handover else []),
    ]
    return [build_percentile_table(rows)]


def build_percentile_table(rows: Iterable[tuple[str, Percentiles]]) -> Part:
    """Return a table of named times in milliseconds at percentiles."""
    heads = "|".join(["milliseconds", *(f"p{percent}" for percent in PERCENTILES)])
    return table(
        heads, [(name, *(format_ms(times[percent]) for percent in PERCENTILES)) for name, times in rows]
    )


def _describe_rates(traffic: Traffic) -> Iterator[str]:
    """Yield sentences about throughput, goodput, speech, drafts, cached tokens, the breaking rate and the price.

    A sentence is left out if the prediction lacks its subject.
    """
    run, request = traffic.summary, traffic.request
    padded = run.computed_tokens + run.padding
    yield (
        f"{run.requests_per_s:,.2f} requests/s, {run.tokens_per_s:,.1f} new tokens/s; steps take "
        f"{run.utilisation:.1%} of the time; {run.padding / padded:.1%} of the computed tokens are padding"
    )
    yield (
        f"goodput: {run.goodput_per_s:,.2f} requests/s with {_format_level(request.level)} "
        f"({run.met / run.requests:.1%} of the requests)"
    )
    if traffic.window_s is not None:
        transcribed = run.requests_per_s * traffic.window_s
        yield f"{transcribed:,.0f} s of speech in a second; each request has {traffic.window_s:g} s"
    if run.utilisations is not None:
        prefill, decoding = run.utilisations
        yield f"steps take {prefill:.1%} of the time where prompts are computed, {decoding:.1%} elsewhere"
    if run.acceptance:
        rates = ", ".join(f"{rate:.0%}" for rate in run.acceptance)
        yield f"drafts that were right, place by place: {rates}"
    if run.cached_tokens:
        yield f"{run.cached_tokens / run.prompt_tokens:.1%} of the prompts' tokens were cached"
    if traffic.breaking_rate is not None:
        yield (
            f"the service level breaks at {traffic.breaking_rate:,.2f} requests/s: above, less than {SHARE:.0%} of the "
            "requests keep to it, or they come faster than they are served"
        )
    elif traffic.searched:
        yield "the service level breaks at every rate: requests alone do not keep to it"
    if traffic.price is not None:
        price = traffic.price.dollars_per_hour
        yield (
            f"${run.dollars_per_million_input(price):,.3f} per million tokens of prompts and "
            f"${run.dollars_per_million_output(price):,.3f} per million new tokens, by shares of the steps' time; "
            f"${run.dollars_per_million(price):,.3f} per million new tokens, prompts included"
        )
        yield f"{traffic.deployment.instance.name} at {traffic.price}"


def _build_slices(run: Summary) -> list[Part]:
    """Return the table of the run's 8 slices over time, as a list of one part."""
    rows = [
        (
            f"{_format_seconds(slice.begin_ns)}..{_format_seconds(slice.end_ns)}",
            f"{slice.running:,.1f}",
            f"{slice.waiting:,.1f}",
            f"{slice.pages:.1%}",
            f"{slice.most_pages:.1%}",
            f"{slice.preemptions:,}",
        )
        for slice in run.slices
    ]
    return [table("seconds|running|waiting|pages in use|most|preemptions", rows)]


def build_comparison(traffic: Traffic) -> list[Part]:
    """Return the table of the run and its variants, then sentences: why half the buckets is slow, and refusals."""
    runs = [("as above", traffic.summary)]
    refusals = []
    for variant in traffic.variants:
        if variant.summary is None:
            refusals.append(f"{variant.name}: {variant.refusal}")
        else:
            runs.append((variant.name, variant.summary))
    rows = [
        (
            name,
            *map(format_ms, (run.ttft[50], run.ttft[99], run.itl[50], run.itl[99])),
            f"{run.tokens_per_s:,.0f}",
            f"{run.goodput_per_s:,.2f}",
        )
        for name, run in runs
    ]
    heads = "the same requests|TTFT p50|p99|ITL p50|p99|tokens/s|goodput/s"
    return [table(heads, rows, gap=1), *build_sentences([*explain_half_the_buckets(runs), *refusals])]


def explain_half_the_buckets(runs: Sequence[tuple[str, Summary]]) -> Iterator[str]:
    """Yield a sentence if the variant with half the buckets has a median ITL above 1.5 times that of the first run.

    Args:
        runs: The names of runs and their summaries; the run without a change is the first.
    """
    (_, base), *changed = runs
    for name, run in changed:
        if name == HALF_THE_BUCKETS and run.itl[50] > _SLOWER * base.itl[50]:
            yield (
                f"{name}: sequences and positions round up to sizes four times apart, so that attention reads "
                "up to 16 times the positions in use, in place of 4. Slower steps let more requests run at once, which "
                f"round up further: steps take {run.utilisation:.0%} of the time (as above: {base.utilisation:.0%})"
            )


def describe_stack(traffic: Traffic) -> Iterator[str]:
    """Yield sentences about the serving stack: its host times, its padding, and published runs against predictions."""
    stack = traffic.stack
    for words, host in (("a step", stack.step_engine), ("prompts", stack.prompt_engine)):
        yield (
            f"engine, {words}: {host.base_ms:g} ms + {host.slot_ms:g} ms a sequence "
            f"({host.origin.confidence.value}: {host.origin.source})."
        )
    if stack.cache_padding.value is not Padding.pages:
        yield f"padding of prompts: {stack.prompt_padding.text}; of caches: {stack.cache_padding.text}."
    ratios = {metric: ratios for metric, ratios in traffic.ratios.items() if ratios is not None}
    if any(ratio.near for ratio in ratios.values()):
        words = ", ".join(f"{metric} {format_ratios(ratio)}" for metric, ratio in ratios.items())
        yield f"Published over predicted, of runs of this stack: {words}."
    else:
        yield f"No published run of {stack.title} is near.{f' {stack.note}' if stack.note else ''}"


def describe_basis(traffic: Traffic) -> Iterator[str]:
    """Yield sentences about what the times rest on: dry runs, the serving stack, sample sizes, links and rooflines."""
    deployment, stand_in = traffic.deployment, traffic.model.config.stand_in
    if stand_in is not None:
        yield from stand_in.describe()
    yield (
        "Times of steps are dry runs of this project's kernels "
        f"({format_count(len(deployment.clock.shapes), 'shape')}), program reading, served by {traffic.stack.title} "
        f"(record of {traffic.stack.date}). Requests go to the "
        "replicas in turn."
    )
    yield from describe_stack(traffic)
    if traffic.breaking_rate is not None:
        requests, replicas = SAMPLE * deployment.decoding_per_unit, deployment.replicas // deployment.units
        yield (
            f"The breaking rate is that of up to {requests:,} requests on {format_count(replicas, 'replica')}, times "
            f"{deployment.units}."
        )
    if deployment.link is not None:
        source = deployment.link.source
        yield f"A transfer takes its bytes over the documented bandwidth ({source}), and its links alone."
    for refusal in deployment.refusals:
        yield f"Roofline, at least, for a part: {refusal}."
    record = chip(deployment.instance.target)
    if record.replaced:
        yield f"Times are those of {record.label}."


def _format_level(level: ServiceLevel) -> str:
    """Return the bounds of a service level as text, such as "TTFT up to 500.00 ms, mean ITL up to 50.00 ms"."""
    bounds = (("TTFT", level.ttft), ("mean ITL", level.itl), ("end to end", level.e2e))
    return ", ".join(f"{name} up to {format_ms(bound)} ms" for name, bound in bounds if bound is not None)


def format_ms(time_ns: float) -> str:
    """Return a time in ns as milliseconds without a unit, with two decimals below a second and none above."""
    time_ms = time_ns / 1e6
    return f"{time_ms:,.2f}" if time_ms < 1_000 else f"{time_ms:,.0f}"


def _format_seconds(time_ns: int) -> str:
    """Return a time in ns as seconds without a unit: three significant digits below 100 s, else no decimals."""
    time_s = time_ns / SECOND_NS
    return f"{time_s:.3g}" if time_s < 100 else f"{time_s:,.0f}"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, which gets an s unless the count is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
