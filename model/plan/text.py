"""A plan as tables and sentences: 80 columns as text, on a terminal as wide as that is."""

from __future__ import annotations

from collections.abc import Iterator

from model.device import chip
from model.layers import unsupported
from model.plan.dry import Time
from model.plan.memory import MeshShape
from model.plan.meshes import Candidate, Estimate
from model.plan.plan import Plan
from model.plan.predict import BUBBLE, PassTime
from model.plan.sizes import DTYPE_BYTES
from model.plan.speech import transcription
from nkw.parts import Hanging, Part, table
from nkw.targets import TARGETS

_RUNNERS_UP, _NEAREST = 4, 2
"""How many meshes are shown beside the best: meshes that fit, and meshes that do not."""


def parts(plan: Plan) -> list[Part]:
    """The parts of a plan's text, for a terminal."""
    blocks = [_parameters(plan), _footprints(plan), _instances(plan)]
    if len(plan.meshes) > 1:
        blocks.append(_meshes(plan))
    blocks.append(_phases(plan))
    if plan.first_token.predicted is not None:
        blocks += _kernels(plan)
    blocks += [_rates(plan), [_sentence(each) for each in basis(plan)]]
    return [*blocks[0], *(part for block in blocks[1:] for part in ("", *block))]


def _sentence(words: str) -> Part:
    return Hanging(words, indent=0)


def _parameters(plan: Plan) -> list[Part]:
    model, size, encoder = plan.model, DTYPE_BYTES[plan.dtype], plan.model.config.encoder
    rows = [
        (
            encoder.description if part == "aside" and encoder else part,
            f"{count:,}",
            f"{count / model.total:.1%}",
            _gb(count * size),
        )
        for part, count in model.parameters.items()
        if count
    ]
    rows.append(("all", f"{model.total:,}", "", _gb(model.total * size)))
    sequence = model.cache_bytes(plan.context, plan.dtype)
    return [
        f"{model.config.model_type}, {model.num_layers} layers, {plan.dtype}",
        table("part|parameters|share|GB", rows),
        *(
            [f"for one token {model.active + model.head_parameters:,} are active, head included"]
            if model.parameters["experts"]
            else []
        ),
        f"cache: {plan.cache_bytes_per_token:,} bytes per token; "
        f"{sequence / 1e6:,.1f} MB for a sequence of {plan.context:,} tokens",
    ]


def _footprints(plan: Plan) -> list[Part]:
    chips = [chip(name) for name in TARGETS]
    rows = []
    for each in plan.footprints:
        row = [str(each.tp), _gb(each.weight_bytes), f"{each.cache_bytes_per_sequence / 1e6:.3f}"]
        for record in chips:
            held = each.sequences(record.hbm_bytes_per_core)
            row += [_count(held), str(-(-each.tp // record.physical_cores_per_chip))] if held else ["-", ""]
        rows.append(row)
    per_chip = [f"{name}|chips" for name in TARGETS]
    return [
        _sentence(
            f"what each of tp cores holds; how many sequences of {plan.context:,} tokens fit beside the "
            "weights; and the chips that tp cores take"
        ),
        table("|".join(["tp", "weights GB", "cache MB", *per_chip]), rows, left=(), gap=1),
    ]


def _instances(plan: Plan) -> list[Part]:
    rows = []
    for fit in plan.fits:
        row = [fit.instance.name, f"{fit.instance.physical_cores}", f"{fit.instance.hbm_bytes / 1e9:,.1f}"]
        needed, core = (each / 1e9 for each in (fit.held.bytes_with_one, fit.core_bytes))
        short = f"does not fit: {needed:,.2f} > {core:.2f} GB"
        more = _mesh_name(fit.shape).removeprefix(f"tp {fit.shape.tp}").lstrip()
        held = f"{fit.sequences:,} with {more}" if more else f"{fit.sequences:,}"
        rows.append([*row, str(fit.held.tp), str(fit.copies), held if fit.tp else short])
    return [
        "on the fewest cores that hold the weights and one sequence, else what each of the most would hold",
        table("instance|cores|HBM GB|tp|copies|sequences", rows),
    ]


def _meshes(plan: Plan) -> list[Part]:
    """The mesh that decodes most, the runners-up, and the meshes that nearly fit with the memory that they lack."""
    best, *others = plan.meshes
    fitting = [each for each in others if each.step is not None][: _RUNNERS_UP if best.step else 0]
    short = [each for each in others if each.step is None][:_NEAREST]
    assert plan.peaks.memory_bytes is not None
    rows = [
        (
            _mesh_name(each.shape),
            f"{each.copies}",
            f"{each.needed_bytes / 1e9:,.2f}",
            "" if each.step is None else _milliseconds(each.step.step_ns),
            f"{each.tokens_per_s:,.0f}" if each.step else "",
            *(_shares(each.step) if each.step else ("", "", "")),
            _limit(each, best),
        )
        for each in (best, *fitting, *short)
    ]
    return [
        _sentence(
            f"meshes by what all copies decode at batch {plan.batch:,}, estimated, and what keeps others behind the "
            f"first; a core has {plan.peaks.memory_bytes / 1e9:,.2f} GB; shares of a step: weights, cache and products "
            "(core), collectives and sends, stages that wait (bubble)"
        ),
        table("mesh|copies|GB a core|step ms|tokens/s|core|links|bubble|limit", rows, left=(0, 8), gap=1),
    ]


def _mesh_name(shape: MeshShape) -> str:
    parts = [
        f"tp {shape.tp}",
        *(f"{name} {own}" for name, own in (("pp", shape.pp), ("ep", shape.ep)) if own > 1),
    ]
    return " ".join(parts)


def _shares(step: Estimate) -> tuple[str, str, str]:
    return f"{step.core:.0%}", f"{step.collectives:.0%}", f"{step.bubble:.0%}"


def _limit(mesh: Candidate, best: Candidate) -> str:
    """What keeps a mesh behind the best: memory, copies, or the part of the step that grows most."""
    if mesh.step is None:
        return "memory"
    if best.step is None or mesh is best:
        return ""
    if mesh.copies < best.copies:
        return "copies"
    own, least = (
        (each.step_ns * each.core, each.step_ns * each.collectives, each.step_ns * each.bubble)
        for each in (mesh.step, best.step)
    )
    more = [one - other for one, other in zip(own, least)]
    return ("core", "links", "bubble")[more.index(max(more))]


def _phases(plan: Plan) -> list[Part]:
    ranks = _plural(plan.tp, "device")
    if plan.devices is not None:
        cut = " with sp" if plan.sp else ""
        assert plan.mesh is not None
        ranks = f"{_mesh_name(plan.mesh.shape)}{cut} of {plan.devices} cores, {_copies(plan)}"
    out = [
        _sentence(
            f"{plan.place}: {ranks}; a prompt of {plan.prompt:,}, then {_plural(plan.generate, 'token')}; "
            f"batch {plan.batch:,}"
        )
    ]
    if plan.uneven:
        out.append(_sentence(f"on {plan.tp} cores {'; '.join(plan.uneven)}"))
    if not plan.holds_weights:
        assert plan.peaks.memory_bytes is not None
        out.append(
            _sentence(
                f"the weights do not fit here: {plan.weight_bytes / 1e9:,.1f} GB for each of {plan.ranks:,}, which "
                f"{'have' if plan.ranks > 1 else 'has'} {plan.peaks.memory_bytes / 1e9:,.1f}"
            )
        )
    elif not plan.holds:
        out.append(f"batch {plan.batch:,} does not fit beside the weights here")
    phases = [("first token", plan.first_token), ("one step", plan.step)]
    if plan.batch > 1:
        phases.insert(1, (f"{plan.batch:,} prompts, packed", plan.first_tokens))
    rows = [
        (
            name,
            f"{phase.work.operations / 1e12:.3f}",
            _gb(phase.work.bytes),
            f"{phase.work.intensity:.1f}",
            phase.work.bound(plan.peaks).value,
            f"{phase.roofline_ns / 1e6:.3f}",
        )
        for name, phase in phases
    ]
    return [
        *out,
        f"ridge {plan.peaks.ridge:.1f} op/byte: {plan.peaks.operations_per_s / 1e12:.1f} TFLOPS over "
        f"{plan.peaks.bytes_per_s / 1e12:.3f} TB/s each",
        table("|TFLOP|GB|op/byte|bound|roofline ms", rows, left=(0, 4)),
    ]


def _kernels(plan: Plan) -> list[list[Part]]:
    first, step = plan.first_token.predicted, plan.step.predicted
    assert first is not None and step is not None
    times = [
        ("time to first token", _bracketed(first.time)),
        (f"a step of batch {plan.batch:,}", _bracketed(step.time)),
    ]
    if plan.batch > 1:
        times.insert(1, (f"{plan.batch:,} prompts, packed", _bracketed(plan.first_tokens.time)))
    blocks: list[list[Part]] = [["predicted, in ms (dataflow..serial)", table("", times)]]
    for title, done in (("first token", first), ("one step", step)):
        blocks.append([table(f"{title}, by kernel|launches|ms|share|of peak", _launches(done))])
    return blocks


def _launches(done: PassTime) -> Iterator[tuple[str, ...]]:
    """Rows of kernels with their share of the pass, and how near they come to the peaks of a core."""
    whole = done.time.program_ns
    for part in done.parts:
        taken = part.time.program_ns
        if part.name == BUBBLE:
            yield part.name, "", f"{taken / 1e6:.3f}", f"{taken / whole:.1%}", ""
            continue
        reached = "roofline" if part.refusal else f"{part.floor_ns / taken:.0%}"
        yield part.name, f"{part.launches:,}", f"{taken / 1e6:.3f}", f"{taken / whole:.1%}", reached
    ends = done.overhead.program_ns
    yield "start and end", "1", f"{ends / 1e6:.3f}", f"{ends / whole:.1%}", ""
    yield "all", "", f"{whole / 1e6:.3f}", "", f"{done.floor_ns / whole:.0%}"


def _rates(plan: Plan) -> list[Part]:
    predicted = plan.first_token.predicted is not None
    price = "" if plan.price is None else f"; $ per million of these at ${plan.price:,.2f}/h"
    heads = ["batch", "ms (dataflow..serial)" if predicted else "ms, roofline", "decoding", "with prompts"]
    rows = []
    for rate in plan.rates:
        time = _bracketed(rate.step.time) if predicted else _milliseconds(rate.step.time.program_ns)
        row = [f"{rate.batch:,}", time, f"{rate.tokens_per_s:,.1f}", f"{rate.request_tokens_per_s:,.1f}"]
        if rate.dollars_per_million is not None:
            row.append(f"{rate.dollars_per_million.program_ns:,.3f}")
        rows.append([*row, "" if rate.fits else "!"])
    out: list[Part] = [
        *_transcription(plan),
        _sentence(f"by batch: a step; tokens/s of one copy decoding; of {_copies(plan)} with prompts{price}"),
        table("|".join([*heads, *(["$/million"] if plan.price is not None else []), ""]), rows, left=()),
    ]
    if not plan.holds_weights:
        out.append("! the weights do not fit")
    elif not all(rate.fits for rate in plan.rates):
        out.append("! the cache of this batch does not fit beside the weights")
    asked = next(rate for rate in plan.rates if rate.batch == plan.batch)
    if predicted and asked.dollars_per_million is not None:
        low, high = asked.dollars_per_million.dataflow_ns, asked.dollars_per_million.serial_ns
        out.append(f"batch {plan.batch:,}: {low:,.3f}..{high:,.3f} $/million (dataflow..serial)")
    return out


def _transcription(plan: Plan) -> Iterator[Part]:
    """Sentences on windows of speech."""
    found = transcription(plan)
    if found is None:
        return
    encoder = "" if found.encoder is None else f"its encoder takes {_bracketed(found.encoder)} ms, "
    yield _sentence(
        f"a window of {found.window_s:g} s: {encoder}all of it with {_plural(plan.generate, 'token')} "
        f"{_bracketed(found.whole)} ms: real-time factor {found.real_time_factor:.2g}; {_copies(plan)} with batch "
        f"{plan.batch:,} each transcribe {found.speech_per_s:,.0f} s of speech in a second"
    )
    yield ""


def basis(plan: Plan) -> Iterator[str]:
    """Sentences: how weights are planned and what the times rest on."""
    if plan.model.config.quant_method:
        yield f"Weights quantised by {plan.model.config.quant_method} are planned as {plan.dtype}."
    first, step = plan.first_token.predicted, plan.step.predicted
    if plan.target is None:
        yield f"Times are rooflines of the peaks given ({plan.peaks.source})."
    elif first is None or step is None:
        *most, last = unsupported(plan.model.config)
        missing = f"{', '.join(most)} or {last}" if most else last
        yield f"Times are rooflines, because no kernel of this project computes {missing}."
    else:
        yield (
            "Times are dry runs of this project's kernels, one after another; program reading, "
            "with the bounds beside it. Ranks are physical cores."
        )
        packed = plan.first_tokens.predicted
        more = packed.refusals if packed else ()
        for refusal in dict.fromkeys((*first.refusals, *more, *step.refusals)):
            yield f"Roofline for a part: {refusal}."
    if plan.target is not None and chip(plan.target).replaced:
        yield f"Times are those of {chip(plan.target).label}."


def _copies(plan: Plan) -> str:
    return f"{plan.copies} cop{'ies' if plan.copies > 1 else 'y'}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count > 1 else ''}"


def _bracketed(time: Time) -> str:
    low, middle, high = map(_milliseconds, (time.dataflow_ns, time.program_ns, time.serial_ns))
    return f"{middle} ({low}..{high})"


def _milliseconds(time_ns: float) -> str:
    """Two decimals where a column has room for them."""
    milliseconds = time_ns / 1e6
    return f"{milliseconds:,.2f}" if milliseconds < 10_000 else f"{milliseconds:,.0f}"


def _gb(number: float) -> str:
    return f"{number / 1e9:,.3f}"


def _count(number: int) -> str:
    """A count in at most six characters, rounded down where they do not show all of it."""
    if number < 100_000:
        return f"{number:,d}"
    return f"{number // 10**3:,d}k" if number < 10**7 else f"{number // 10**6:,d}M"
