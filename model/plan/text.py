"""A plan as tables and sentences, the text that `nkw plan` prints.

It is 80 columns wide, or as wide as the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from model.device import chip, limit_lnc
from model.layers import find_unsupported
from model.layers.cache_formats import AUTO
from model.plan.cells import format_mesh, format_ms, format_plural, format_ratios
from model.plan.dry import Time
from model.plan.memory import list_powers_of_two
from model.plan.meshes import Candidate, Estimate, describe_cores
from model.plan.plan import Plan
from model.plan.policy import Judged
from model.plan.predict import BUBBLE, PassTime
from model.plan.roofline import LEAST, USUAL
from model.plan.service import describe_service, describe_terms
from model.plan.speech import compute_transcription
from model.plan.stacks import Served
from nkw.report import Hanging, Part, table
from nkw.targets import TARGETS

_MAX_FITTING, _MAX_SHORT = 4, 2
"""Meshes in the table besides the best: meshes that fit, and meshes that do not."""

_SAME_TIME = 0.005
"""Relative difference of times that is no change: dry runs of other sizes differ in single instructions."""

_sentence = partial(Hanging, indent=0)
"""A sentence whose lines are not indented."""


def format_plan(plan: Plan) -> list[Part]:
    """Return the parts (lines, sentences and tables) of a plan's text, in order."""
    blocks = [_format_parameters(plan), _format_footprints(plan), _format_instances(plan)]
    if len(plan.placement.meshes) > 1:
        blocks.append(_format_meshes(plan))
    blocks += [
        _format_phases(plan),
        *_format_kernels(plan),
        *_format_service(plan),
        _format_rates(plan),
        [_sentence(sentence) for sentence in describe_basis(plan)],
    ]
    return [*blocks[0], *(line for block in blocks[1:] for line in ("", *block))]


def _format_parameters(plan: Plan) -> list[Part]:
    """Return the table of parameters and stored bytes by component, and lines on active parameters and cache bytes."""
    model, encoder = plan.model, plan.model.config.encoder
    component_bytes = model.count_component_bytes(plan.dtype)
    rows = [
        (
            encoder.description if component == "aside" and encoder else component,
            f"{count:,}",
            f"{count / model.total:.1%}",
            _format_gb(component_bytes[component]),
        )
        for component, count in model.parameters.items()
        if count
    ]
    rows.append(("all", f"{model.total:,}", "", _format_gb(sum(component_bytes.values()))))
    sequence = model.count_cache_bytes(plan.context, plan.dtype)
    return [
        f"{model.config.type_label}, {model.num_layers} layers, {plan.dtype}",
        table("part|parameters|share|GB", rows),
        *(
            [f"for one token {model.active + model.head_parameters:,} are active, head included"]
            if model.parameters["experts"]
            else []
        ),
        f"cache{_describe_cache(model.cache_dtype)}: {plan.cache_bytes_per_token:,} bytes per token; "
        f"{sequence / 1e6:,.1f} MB for a sequence of {plan.context:,} tokens",
    ]


def _describe_cache(cache_dtype: str) -> str:
    """Return what the line on the cache adds for a format, such as " in fp8"; empty for the dtype of activations."""
    return "" if cache_dtype == AUTO else f" in {cache_dtype}"


def _format_footprints(plan: Plan) -> list[Part]:
    """Return the table of bytes on a rank by number of tensor-parallel ranks.

    Each row also has, for every kind of chip, the sequences that fit on these ranks and the number of chips.
    """
    chips = [(chip(name), limit_lnc(name, plan.request.lnc, largest=True)) for name in TARGETS]
    logical = [record.name for record, lnc in chips if lnc > 1]
    core_type = f" (logical cores of two physical ones on {' and '.join(logical)})" if logical else ""
    rows = []
    for footprint in plan.footprints:
        row = [
            str(footprint.tp),
            _format_gb(footprint.weight_bytes),
            f"{footprint.cache_bytes_per_sequence / 1e6:.3f}",
        ]
        for record, lnc in chips:
            sequences = footprint.sequences(lnc * record.hbm_bytes_per_core)
            count = str(-(-footprint.tp * lnc // record.physical_cores_per_chip))
            row += [_format_count(sequences), count] if sequences else ["-", ""]
        rows.append(row)
    per_chip = [f"{name}|chips" for name in TARGETS]
    return [
        _sentence(
            f"what each of tp cores{core_type} holds; how many sequences of {plan.context:,} tokens fit beside the "
            "weights; and the chips that tp cores take"
        ),
        table("|".join(["tp", "weights GB", "cache MB", *per_chip]), rows, left=(), gap=1),
    ]


def _format_instances(plan: Plan) -> list[Part]:
    """Return the table of instance types: the fewest ranks that hold the model, its copies and sequences."""
    rows = []
    for fit in plan.fits:
        needed, core = (size / 1e9 for size in (fit.footprint.bytes_with_one, fit.core_bytes))
        sequences = f"does not fit: {needed:,.2f} > {core:.2f} GB"
        if fit.tp:
            axes = format_mesh(fit.shape).removeprefix(f"tp {fit.shape.tp}").lstrip()
            sequences = f"{fit.sequences:,} with {axes}" if axes else f"{fit.sequences:,}"
        instance = fit.instance
        row = [instance.name, f"{fit.cores}", f"{fit.lnc}", f"{instance.hbm_bytes / 1e9:,.0f}"]
        rows.append([*row, str(fit.footprint.tp), str(fit.copies), sequences])
    return [
        "on the fewest cores that hold the weights and one sequence, else what each of the most would hold",
        table("instance|cores|LNC|HBM GB|tp|copies|sequences", rows, firm=(0,), gap=1),
    ]


def _format_meshes(plan: Plan) -> list[Part]:
    """Return the table of the best meshes and of some that do not fit, each with what makes it slower."""
    best, judged = plan.placement.meshes[0], plan.placement.judged
    short = [mesh for mesh in plan.placement.meshes if mesh.step is None][:_MAX_SHORT]
    predicted = {candidate.mesh: candidate for candidate in judged if candidate.predicted}
    assert plan.placement.peaks.memory_bytes is not None
    rows = [
        (
            format_mesh(mesh.shape),
            f"{mesh.copies}",
            f"{mesh.needed_bytes / 1e9:,.2f}",
            "" if mesh.step is None else format_ms(mesh.step.step_ns),
            format_ms(predicted[mesh].mean_itl_ns) if mesh in predicted else "",
            *(_format_shares(mesh.step) if mesh.step else ("", "", "")),
            _find_limit(mesh, best),
        )
        for mesh in (*(candidate.mesh for candidate in judged[: 1 + _MAX_FITTING]), *short)
    ]
    return [
        _sentence(
            f"meshes by the time of the instance that a request takes at batch {plan.request.batch:,}, and what keeps "
            f"others behind the first; a {_name_core(plan)} has {plan.placement.peaks.memory_bytes / 1e9:,.2f} GB; a "
            "step estimated, and of the best predicted; shares of the estimate: weights, cache and products (core), "
            "collectives and sends, stages that wait (bubble)"
        ),
        table("mesh|copies|GB a core|step ms|predicted|core|links|bubble|limit", rows, left=(0, 8), gap=1),
        *map(_sentence, describe_choice(judged)),
    ]


def describe_choice(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield sentences on the chosen mesh and its service level, and on the runner-up; none without meshes.

    Args:
        judged: meshes that hold the batch, the chosen one first, then the runner-up.
    """
    if not judged:
        return
    chosen, *runners_up = judged
    level = chosen.level
    if level.is_bounded:
        least = "" if chosen.predicted else "at least, as rooflines: "
        times = f"{least}TTFT {format_ms(chosen.ttft_ns)} ms, ITL {format_ms(chosen.mean_itl_ns)} ms"
        if chosen.excesses:
            yield f"no mesh keeps {level}; {format_mesh(chosen.mesh.shape)} is nearest: {times}"
        else:
            yield f"{format_mesh(chosen.mesh.shape)} keeps {level}: {times}"
    if runners_up:
        runner_up = runners_up[0]
        exceeds = f", over {', '.join(runner_up.excesses)}" if runner_up.excesses else ""
        yield (
            f"runner-up: {format_mesh(runner_up.mesh.shape)}, {runner_up.cost_ns / chosen.cost_ns:.2f} times the cost"
            f"{exceeds}"
        )


def _format_shares(step: Estimate) -> tuple[str, str, str]:
    """Return the cells with the shares of a step's time in percent: core, collectives, bubble."""
    return f"{step.core:.0%}", f"{step.collectives:.0%}", f"{step.bubble:.0%}"


def _find_limit(mesh: Candidate, best: Candidate) -> str:
    """Return why a mesh is slower than the best one: "memory", "copies", "core", "links" or "bubble".

    The last three name the part of the step that takes most additional time. Returns "" for the best mesh itself.
    """
    if mesh.step is None:
        return "memory"
    if best.step is None or mesh == best:
        return ""
    if mesh.copies < best.copies:
        return "copies"
    times, best_times = (
        (step.step_ns * step.core, step.step_ns * step.collectives, step.step_ns * step.bubble)
        for step in (mesh.step, best.step)
    )
    growth = [time_ns - best_ns for time_ns, best_ns in zip(times, best_times)]
    return ("core", "links", "bubble")[growth.index(max(growth))]


def _format_phases(plan: Plan) -> list[Part]:
    """Return the sentence on the placement, warnings about memory, and the table of rooflines."""
    placement, batch = plan.placement, plan.request.batch
    shape, peaks, weight_bytes = placement.shape, placement.peaks, placement.mesh.weight_bytes
    ranks = format_plural(shape.tp, "device")
    if placement.instance is not None:
        suffix = " with sp" if plan.request.sp else ""
        cores = describe_cores(placement.instance.physical_cores // placement.lnc, placement.lnc)
        ranks = f"{format_mesh(shape)}{suffix} of {cores}, {_format_copies(plan)}"
    out: list[Part] = [
        _sentence(
            f"{placement.name}: {ranks}; a prompt of {plan.prompt:,}, then {format_plural(plan.generate, 'token')}; "
            f"batch {batch:,}"
        )
    ]
    if plan.uneven:
        out.append(_sentence(f"on {shape.tp} {_name_core(plan)}s {'; '.join(plan.uneven)}"))
    if peaks.memory_bytes is not None and not placement.holds_weights:
        out.append(
            _sentence(
                f"the weights do not fit here: {weight_bytes / 1e9:,.1f} GB for each of {shape.ranks:,}, which "
                f"{'have' if shape.ranks > 1 else 'has'} {peaks.memory_bytes / 1e9:,.1f}"
            )
        )
    elif not plan.rate.fits:
        out.append(f"batch {batch:,} does not fit beside the weights here")
    phases = [("first token", plan.first_token), ("one step", plan.rate.step)]
    if batch > 1:
        phases.insert(1, (f"{batch:,} prompts, packed", plan.first_tokens))
    rows = [
        (
            name,
            f"{phase.work.operations / 1e12:.3f}",
            _format_gb(phase.work.bytes),
            f"{phase.work.intensity:.1f}",
            phase.work.find_bound(peaks).value,
            f"{phase.roofline_ns / 1e6:.3f}",
        )
        for name, phase in phases
    ]
    logical = f" {_name_core(plan)}" if placement.lnc > 1 else ""
    return [
        *out,
        f"ridge {peaks.ridge:.1f} op/byte: {peaks.operations_per_s / 1e12:.1f} TFLOPS over "
        f"{peaks.bytes_per_s / 1e12:.3f} TB/s each{logical}",
        table("|TFLOP|GB|op/byte|bound|roofline ms", rows, left=(0, 4)),
    ]


def _format_kernels(plan: Plan) -> list[list[Part]]:
    """Return one table of predicted times, and one for the kernels of a prompt and of a step each.

    Returns an empty list without times by dry runs.
    """
    first, step, batch = plan.first_token.predicted, plan.rate.step.predicted, plan.request.batch
    if first is None or step is None:
        return []
    times = [
        ("time to first token", _format_time(first.time)),
        (f"a step of batch {batch:,}", _format_time(step.time)),
    ]
    if batch > 1:
        times.insert(1, (f"{batch:,} prompts, packed", _format_time(plan.first_tokens.time)))
    blocks: list[list[Part]] = [["predicted, in ms (dataflow..serial)", table("", times)]]
    for title, predicted in (("first token", first), ("one step", step)):
        blocks.append([table(f"{title}, by kernel|launches|ms|share|of peak", _format_launches(predicted))])
    return blocks


def _format_service(plan: Plan) -> list[list[Part]]:
    """Return the table of latency and throughput for a user of the serving stack, then the terms of its record.

    Returns an empty list for an accelerator, or if the batch does not fit.
    """
    service, stack, batch = describe_service(plan), plan.stack, plan.request.batch
    if service is None:
        return []
    first = "first token" if batch == 1 else f"{batch:,} first tokens"
    rows = [
        (first, *_format_served(service.first_token), format_ratios(service.ratios["ttft"])),
        ("one step", *_format_served(service.step), format_ratios(service.ratios["tpot"])),
        (
            "tokens/s",
            "",
            "",
            f"{service.tokens_per_s:,.1f}",
            format_ratios(service.ratios["throughput"]),
        ),
    ]
    out: list[Part] = [
        _sentence(
            f"served by {stack.title} (record of {stack.date}), in ms, and tokens/s of a copy; published over "
            "predicted, of published runs of this stack on this generation of cores"
        ),
        table("|device|engine|user sees|published over", rows, firm=(0,), gap=1),
    ]
    if not any(service.ratios.values()):
        out.append(_sentence(stack.note or f"No published run of {stack.title} is near: none was fitted to."))
    origins = list(dict.fromkeys(origin for _, _, origin in describe_terms(stack)))
    terms = [
        _sentence(f"{name}: {value} [{origins.index(origin) + 1}]")
        for name, value, origin in describe_terms(stack)
    ]
    sources = [
        _sentence(f"[{number}] {origin.confidence.value}: {origin.source}")
        for number, origin in enumerate(origins, 1)
    ]
    return [out, [*terms, *sources]]


def _format_served(served: Served) -> tuple[str, str, str]:
    """Return three cells in ms: device time, engine time, and their sum with its bounds in brackets."""
    device, engine_ns = format_ms(served.device.program_ns), format_ms(served.engine_ns)
    return device, engine_ns, _format_time(served.time)


def _format_launches(predicted: PassTime) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows of a pass: kernel, launches, ms, share of the pass, and share of the peaks of a rank."""
    pass_ns = predicted.time.program_ns
    for kernel in predicted.kernels:
        kernel_ns = kernel.time.program_ns
        time = f"{kernel_ns / 1e6:.3f}", f"{kernel_ns / pass_ns:.1%}"
        if kernel.name == BUBBLE:
            yield kernel.name, "", *time, ""
            continue
        peak_share = "roofline" if kernel.refusal else f"{kernel.floor_ns / kernel_ns:.0%}"
        yield kernel.name, f"{kernel.launches:,}", *time, peak_share
    overhead_ns = predicted.overhead.program_ns
    yield "start and end", "1", f"{overhead_ns / 1e6:.3f}", f"{overhead_ns / pass_ns:.1%}", ""
    yield "all", "", f"{pass_ns / 1e6:.3f}", "", f"{predicted.floor_ns / pass_ns:.0%}"


def _format_rates(plan: Plan) -> list[Part]:
    """Return the table of batch sizes with step time, throughput and price, and sentences below it.

    Returns a single sentence if not even one sequence fits.
    """
    if not plan.placement.can_hold(1):
        return [_sentence("no batch fits, so there are no rates and no prices")]
    price = plan.price
    heads = ["batch", f"ms ({_name_bounds(plan)})", "decoding", "with prompts"]
    heads += ["$ input", "$ output"] if price is not None else []
    rows = []
    for rate in plan.rates:
        if rate.tokens_per_s is None or rate.request_tokens_per_s is None:
            rows.append([f"{rate.batch:,}", *("-" for _ in heads[1:]), "!"])
            continue
        row = [f"{rate.batch:,}", _format_time(rate.step.served.time)]
        row += [f"{rate.tokens_per_s:,.1f}", f"{rate.request_tokens_per_s:,.1f}"]
        if rate.dollars is not None:
            row += [f"{dollars.program_ns:,.3f}" for dollars in (rate.dollars.input, rate.dollars.output)]
        rows.append([*row, ""])
    per_million = "" if price is None else "; $ per million tokens of prompts (input) and of steps (output)"
    out: list[Part] = [
        *_format_transcription(plan),
        _sentence(
            f"by batch: a step; tokens/s of one copy decoding; of {_format_copies(plan)} with prompts{per_million}"
        ),
        table("|".join([*heads, ""]), rows, left=(), gap=1),
    ]
    if not all(rate.fits for rate in plan.rates):
        out.append("! the cache of this batch does not fit beside the weights")
    return [*out, *map(_sentence, describe_kernel_changes(plan)), *_format_price(plan)]


def describe_kernel_changes(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each batch size from which on a step launches other kernels than with the size before.

    A kernel that takes less time for more sequences counts as another one, because it must work in another way.
    """
    predicted = [(rate.batch, rate.step.predicted) for rate in plan.rates if rate.fits]
    for (smaller, before), (batch, after) in pairwise(predicted):
        if before is None or after is None:
            continue
        times, later_times = before.times_by_kernel, after.times_by_kernel
        gone = [name for name in times if name not in later_times]
        new = [name for name in later_times if name not in times]
        if gone or new:
            names = (", ".join(kernels) or "no kernel" for kernels in (new, gone))
            yield f"from batch {batch:,} on: {' in place of '.join(names)}"
        for name, time_ns in times.items():
            if later_times.get(name, time_ns) < time_ns * (1 - _SAME_TIME):
                yield (
                    f"from batch {batch:,} on {name} works in another way: {format_ms(later_times[name])} ms, "
                    f"{format_ms(time_ns)} at batch {smaller:,}"
                )


def _format_price(plan: Plan) -> list[Part]:
    """Return sentences on the price of the instance and of generated tokens; an empty list without a price."""
    if plan.price is None:
        return []
    dollars, sentences = plan.rate.dollars, [f"{plan.placement.name} at {plan.price}"]
    if dollars is not None:
        low, middle, high = (
            f"{dollars:,.3f}"
            for dollars in (
                dollars.request.dataflow_ns,
                dollars.request.program_ns,
                dollars.request.serial_ns,
            )
        )
        bounds = f" ({low}..{high}, {_name_bounds(plan)})" if low != high else ""
        sentences.append(
            f"batch {plan.request.batch:,}: {middle}{bounds} $/million generated tokens, prompts included"
        )
    return [_sentence(sentence) for sentence in sentences]


def _format_transcription(plan: Plan) -> list[Part]:
    """Return a sentence on the speed of transcription and an empty line.

    Returns an empty list for a model without a speech encoder, or if the batch does not fit.
    """
    speed = compute_transcription(plan)
    if speed is None:
        return []
    encoder = "" if speed.encoder is None else f"its encoder takes {_format_time(speed.encoder)} ms, "
    return [
        _sentence(
            f"a window of {speed.window_s:g} s: {encoder}all of it with {format_plural(plan.generate, 'token')} "
            f"{_format_time(speed.time)} ms: real-time factor {speed.real_time_factor:.2g}; {_format_copies(plan)} "
            f"with batch {plan.request.batch:,} each transcribe {speed.speech_per_s:,.0f} s of speech in a second"
        ),
        "",
    ]


def describe_basis(plan: Plan) -> Iterator[str]:
    """Yield sentences on what the plan's times are based on: dry runs or rooflines, dtype, and assumptions."""
    if plan.model.config.stand_in is not None:
        yield from plan.model.config.stand_in.describe()
    if plan.model.config.quant_method:
        method, dtype = plan.model.config.quant_method, plan.dtype
        *kernels, last = plan.model.list_quantised_readers() or [""]
        if not last:
            yield f"Weights quantised by {method} are planned as {dtype}."
        else:
            names = f"{', '.join(kernels)} and {last} read their own" if kernels else f"{last} reads its own"
            yield f"Of the weights quantised by {method}, {names} as stored; others are {dtype}."
            counts = list_powers_of_two(plan.model.config.most_busy_ranks)
            yield from plan.model.describe_cuts(plan.placement.shape.tp, counts)
    instance, first, step = plan.placement.instance, plan.first_token.predicted, plan.rate.step.predicted
    if instance is None:
        yield f"Times are rooflines, at least, of the peaks given ({plan.placement.peaks.source})."
        yield from describe_rooflines()
    elif not plan.rate.fits:
        yield f"No times of batch {plan.request.batch:,} are predicted, because it does not fit."
    elif first is None or step is None:
        *missing, last = find_unsupported(plan.model.config)
        features = f"{', '.join(missing)} or {last}" if missing else last
        yield f"Times are rooflines, at least, because no kernel of this project computes {features}."
        yield from describe_rooflines()
    else:
        yield (
            "Times are dry runs of this project's kernels, one after another; program reading, "
            f"with the bounds beside it. Ranks are {_describe_ranks(plan)}."
        )
        yield from _describe_undivided(plan)
        predicted = (first, plan.first_tokens.predicted, step)
        refusals = dict.fromkeys(refusal for phase in predicted if phase for refusal in phase.refusals)
        for refusal in refusals:
            yield f"Roofline, at least, for a part: {refusal}."
        if refusals:
            yield from describe_rooflines()
    if instance is not None and chip(instance.target).replaced:
        yield f"Times are those of {chip(instance.target).label}."


def describe_rooflines() -> Iterator[str]:
    """Yield sentences on the three values of a time that only the roofline is known of, with their sources."""
    yield "Of a roofline, the first value in brackets is at the peaks, which nothing can be faster than."
    for words, reach in (("middle", USUAL), ("last", LEAST)):
        yield (
            f"The {words} value is at {reach.operations:.2f} of the peak of operations and {reach.bytes:.2f} of "
            f"the bandwidth ({reach.origin.confidence.value}: {reach.origin.source})."
        )


def _name_bounds(plan: Plan) -> str:
    """Return the names of the lower and upper bounds of the plan's times."""
    return "roofline..least share" if plan.first_token.predicted is None else "dataflow..serial"


def _describe_ranks(plan: Plan) -> str:
    """Return words for what a rank of the plan is, such as "physical cores (LNC 1)"."""
    lnc = plan.placement.lnc
    return "physical cores (LNC 1)" if lnc == 1 else f"logical cores of {lnc} physical ones (LNC {lnc})"


def _describe_undivided(plan: Plan) -> Iterator[str]:
    """Yield a sentence that names the kernels that use only one of a rank's physical cores.

    Yields nothing if there are no such kernels.
    """
    phases = (plan.first_token, plan.first_tokens, plan.rate.step)
    names = dict.fromkeys(
        kernel.name
        for phase in phases
        for kernel in (phase.predicted.kernels if phase.predicted else ())
        if kernel.cores < plan.placement.lnc and kernel.name != BUBBLE
    )
    if names:
        yield f"On one of the {plan.placement.lnc} physical cores of a rank: {'; '.join(names)}."


def _name_core(plan: Plan) -> str:
    """Return the noun for a rank: "core", or "logical core" for several physical ones."""
    return "core" if plan.placement.lnc == 1 else "logical core"


def _format_copies(plan: Plan) -> str:
    """Return the number of copies of the model with its noun."""
    copies = plan.placement.mesh.copies
    return f"{copies} cop{'ies' if copies > 1 else 'y'}"


def _format_time(time: Time) -> str:
    """Return the program reading of a time in ms, then the dataflow and serial readings in brackets."""
    low, middle, high = map(format_ms, (time.dataflow_ns, time.program_ns, time.serial_ns))
    return f"{middle} ({low}..{high})"


def _format_gb(size: float) -> str:
    """Return bytes as a number of GB with three decimals."""
    return f"{size / 1e9:,.3f}"


def _format_count(count: int) -> str:
    """Return a count in at most six characters; from 100,000 on, rounded down to thousands or millions."""
    if count < 100_000:
        return f"{count:,d}"
    return f"{count // 10**3:,d}k" if count < 10**7 else f"{count // 10**6:,d}M"
