"""A plan as text of at most 80 columns, and as the document of `--json`."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from model.device import chip
from model.layers import unsupported
from model.plan.dry import Time
from model.plan.memory import DTYPE_BYTES
from model.plan.plan import Fit, Phase, Plan, Rate
from model.plan.predict import PassTime
from model.version import DISTRIBUTION, version
from simulate.targets import TARGETS

SCHEMA = 1


def text(plan: Plan, name: str) -> str:
    """The whole plan for a terminal."""
    blocks = [_parameters(plan, name), _footprints(plan), _instances(plan), _phases(plan)]
    if plan.first_token.predicted is not None:
        blocks.append(_kernels(plan))
    blocks.append(_rates(plan))
    blocks.append(_basis(plan))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks)


def _parameters(plan: Plan, name: str) -> list[str]:
    model, size = plan.model, DTYPE_BYTES[plan.dtype]
    lines = [
        *_wrapped(f"{name}: {model.config.model_type}, {model.num_layers} layers, {plan.dtype}"),
        f"{'part':12s}{'parameters':>18s}{'share':>9s}{'GB':>12s}",
    ]
    for part, count in model.parameters().items():
        if count:
            label = model.encoder.what if part == "aside" and model.encoder else part
            lines.append(f"{label:12s}{count:18,d}{count / model.total:9.1%}{count * size / 1e9:12.3f}")
    lines.append(f"{'all':12s}{model.total:18,d}{'':9s}{model.total * size / 1e9:12.3f}")
    if any(layers.num_experts for layers in model.layers):
        lines.append(
            f"{'active':12s}{model.active + model.head_parameters:18,d}   for one token, head included"
        )
    sequence = size * model.cache_elements(plan.context)
    lines.append(
        f"cache: {_cache_per_token(plan):,} bytes per token; "
        f"{sequence / 1e6:,.1f} MB for a sequence of {plan.context:,} tokens"
    )
    return lines


def _cache_per_token(plan: Plan) -> int:
    """Bytes that one more token adds, as long as no window is full."""
    layers = plan.model.layers
    return DTYPE_BYTES[plan.dtype] * sum(each.count * each.cache_per_token for each in layers)


def _footprints(plan: Plan) -> list[str]:
    lines = [
        *_wrapped(
            f"what each of tp cores holds; how many sequences of {plan.context:,} tokens fit beside the "
            "weights; and the chips that tp cores take"
        ),
        f"{'':6s}{'weights':>10s}{'cache of a':>14s}" + "".join(f"{name:>12s}" for name in TARGETS),
        f"{'tp':>6s}{'GB':>10s}{'sequence, MB':>14s}" + f"{'seq. chips':>12s}" * len(TARGETS),
    ]
    for each in plan.footprints:
        cells = ""
        for name in TARGETS:
            record = chip(name)
            held = each.sequences(record.hbm_bytes_per_core)
            chips = -(-each.tp // record.physical_cores_per_chip)
            cells += f"{_count(held):>7s}{chips:5d}" if held else f"{'-':>7s}{'':5s}"
        lines.append(
            f"{each.tp:6d}{each.weight_bytes / 1e9:10.3f}{each.cache_bytes_per_sequence / 1e6:14.3f}{cells}"
        )
    return lines


def _instances(plan: Plan) -> list[str]:
    lines = [
        "on the fewest cores that hold the weights and one sequence",
        f"{'instance':24s}{'cores':>7s}{'HBM GB':>10s}{'tp':>7s}{'copies':>9s}{'sequences':>13s}",
    ]
    for fit in plan.fits:
        own = f"{fit.instance.name:24s}{fit.instance.physical_cores:7d}{fit.instance.hbm_bytes / 1e9:10.1f}"
        held = f"{fit.tp:7d}{fit.copies:9d}{fit.sequences:13,d}" if fit.tp else "  does not fit"
        lines.append(own + held)
    return lines


def _phases(plan: Plan) -> list[str]:
    ranks = f"{plan.tp} device{'s' if plan.tp > 1 else ''}"
    if plan.devices is not None:
        ranks = f"tp {plan.tp} of {plan.devices} cores, {plan.copies} cop{'ies' if plan.copies > 1 else 'y'}"
    lines = _wrapped(
        f"{plan.place}: {ranks}; a prompt of {plan.prompt:,}, then {plan.generate:,} "
        f"token{'s' if plan.generate > 1 else ''}; batch {plan.batch:,}"
    )
    if not plan.holds_weights:
        assert plan.peaks.memory_bytes is not None
        lines += _wrapped(
            f"the weights do not fit here: {plan.weight_bytes / 1e9:,.1f} GB for each of {plan.tp:,}, which "
            f"{'have' if plan.tp > 1 else 'has'} {plan.peaks.memory_bytes / 1e9:,.1f}"
        )
    elif not plan.holds:
        lines.append(f"batch {plan.batch:,} does not fit beside the weights here")
    lines += [
        f"ridge {plan.peaks.ridge:.1f} op/byte: {plan.peaks.operations_per_s / 1e12:.1f} TFLOPS over "
        f"{plan.peaks.bytes_per_s / 1e12:.3f} TB/s each",
        f"{'':14s}{'TFLOP':>10s}{'GB':>10s}{'op/byte':>10s}  {'bound':10s}{'roofline ms':>13s}",
    ]
    for name, phase in (("first token", plan.first_token), ("one step", plan.step)):
        work = phase.work
        lines.append(
            f"{name:14s}{work.operations / 1e12:10.3f}{work.bytes / 1e9:10.3f}{work.intensity:10.1f}"
            f"  {work.bound(plan.peaks).value:10s}{phase.roofline_ns / 1e6:13.3f}"
        )
    return lines


def _kernels(plan: Plan) -> list[str]:
    first, step = plan.first_token.predicted, plan.step.predicted
    assert first is not None and step is not None
    lines = [
        "predicted, in ms (dataflow..serial)",
        f"{'time to first token':24s}{_bracketed(first.time):>36s}",
        f"{f'a step of batch {plan.batch:,}':24s}{_bracketed(step.time):>36s}",
    ]
    for title, done in (("first token", first), ("one step", step)):
        lines += ["", f"{title + ', by kernel':24s}{'launches':>10s}{'ms':>12s}{'share':>8s}{'of peak':>9s}"]
        lines += _parts(done)
    return lines


def _parts(done: PassTime) -> Iterable[str]:
    """Kernels with their share of the pass, and how near they come to the peaks of a core."""
    whole = done.time.program_ns
    for part in done.parts:
        taken = part.time.program_ns
        reached = " roofline" if part.refusal else f"{part.floor_ns / taken:9.0%}"
        yield f"{part.name:24s}{part.launches:10,d}{taken / 1e6:12.3f}{taken / whole:8.1%}{reached}"
    ends = done.overhead.program_ns
    yield f"{'start and end':24s}{1:10,d}{ends / 1e6:12.3f}{ends / whole:8.1%}"
    yield f"{'all':24s}{'':10s}{whole / 1e6:12.3f}{'':8s}{done.floor_ns / whole:9.0%}"


def _rates(plan: Plan) -> list[str]:
    predicted = plan.first_token.predicted is not None
    copies = f"{plan.copies} cop{'ies' if plan.copies > 1 else 'y'}"
    price = "" if plan.price is None else f"; $ per million of these at ${plan.price:,.2f}/h"
    lines = _wrapped(f"by batch: a step; tokens/s of one copy decoding; of {copies} with prompts{price}")
    bracket = "ms (dataflow..serial)" if predicted else "ms, roofline"
    dollars = f"{'$/million':>12s}" if plan.price is not None else ""
    lines.append(f"{'batch':>6s} {bracket:>30s}{'decoding':>12s}{'with prompts':>14s}{dollars}")
    for rate in plan.rates:
        time = _bracketed(rate.step.time) if predicted else _milliseconds(rate.step.time.program_ns)
        line = f"{rate.batch:6,d} {time:>30s}{rate.tokens_per_s:12,.1f}{rate.request_tokens_per_s:14,.1f}"
        if rate.dollars_per_million is not None:
            line += f"{rate.dollars_per_million.program_ns:12,.3f}"
        lines.append(line + ("" if rate.fits else " !"))
    if not plan.holds_weights:
        lines.append("! the weights do not fit")
    elif not all(rate.fits for rate in plan.rates):
        lines.append("! the cache of this batch does not fit beside the weights")
    asked = next(rate for rate in plan.rates if rate.batch == plan.batch)
    if predicted and asked.dollars_per_million is not None:
        low, high = asked.dollars_per_million.dataflow_ns, asked.dollars_per_million.serial_ns
        lines.append(f"batch {plan.batch:,}: {low:,.3f}..{high:,.3f} $/million (dataflow..serial)")
    return lines


def _basis(plan: Plan) -> list[str]:
    method = plan.model.config.quantisation
    planned = f"Weights quantised by {method} are planned as {plan.dtype}." if method else ""
    return [*_basis_of_times(plan), *(_wrapped(planned) if planned else [])]


def _basis_of_times(plan: Plan) -> list[str]:
    first, step = plan.first_token.predicted, plan.step.predicted
    if plan.target is None:
        return _wrapped(f"Times are rooflines of the peaks given ({plan.peaks.source}).")
    if first is None or step is None:
        *most, last = unsupported(plan.model.config)
        missing = f"{', '.join(most)} or {last}" if most else last
        return _wrapped(f"Times are rooflines, because no kernel of this project computes {missing}.")
    lines = _wrapped(
        "Times are dry runs of this project's kernels, one after another; program reading, "
        "with the bounds beside it. Ranks are physical cores."
    )
    for refusal in dict.fromkeys((*first.refusals, *step.refusals)):
        lines += _wrapped(f"Roofline for a part: {refusal}.")
    return lines


def _bracketed(time: Time) -> str:
    low, middle, high = map(_milliseconds, (time.dataflow_ns, time.program_ns, time.serial_ns))
    return f"{middle} ({low}..{high})"


def _milliseconds(time_ns: float) -> str:
    """Two decimals where a column has room for them."""
    milliseconds = time_ns / 1e6
    return f"{milliseconds:,.2f}" if milliseconds < 10_000 else f"{milliseconds:,.0f}"


def _count(number: int) -> str:
    """A count in at most six characters, rounded down where they do not show all of it."""
    if number < 100_000:
        return f"{number:,d}"
    return f"{number // 10**3:,d}k" if number < 10**7 else f"{number // 10**6:,d}M"


def _wrapped(sentence: str, width: int = 80) -> list[str]:
    lines = [""]
    for word in sentence.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def document(plan: Plan, name: str) -> dict[str, Any]:
    """The document of `--json`; its schema is in model/README.md."""
    model, size = plan.model, DTYPE_BYTES[plan.dtype]
    return {
        "schema": SCHEMA,
        "config": name,
        "model_type": model.config.model_type,
        "dtype": plan.dtype,
        "layers": model.num_layers,
        "parameters": {
            **model.parameters(),
            "all": model.total,
            "active": model.active + model.head_parameters,
        },
        "weight_bytes": size * model.total,
        "cache_bytes_per_token": _cache_per_token(plan),
        "cache_bytes_per_sequence": size * model.cache_elements(plan.context),
        "place": plan.place,
        "target": plan.target,
        "tp": plan.tp,
        "copies": plan.copies,
        "prompt": plan.prompt,
        "generate": plan.generate,
        "batch": plan.batch,
        "fits": plan.holds,
        "price": plan.price,
        "peaks": {**asdict(plan.peaks), "ridge": plan.peaks.ridge},
        "by_tp": [asdict(each) for each in plan.footprints],
        "instances": [_fit(each) for each in plan.fits],
        "first_token": _phase(plan, plan.first_token),
        "step": _phase(plan, plan.step),
        "batches": [_rate(each) for each in plan.rates],
        "basis": " ".join(_basis(plan)),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }


def _fit(fit: Fit) -> dict[str, Any]:
    return {"instance": fit.instance.name, "tp": fit.tp, "copies": fit.copies, "sequences": fit.sequences}


def _phase(plan: Plan, phase: Phase) -> dict[str, Any]:
    kernels = None
    if phase.predicted is not None:
        kernels = [
            {
                "kernel": each.name,
                "launches": each.launches,
                **asdict(each.time),
                "floor_ns": each.floor_ns,
                "roofline_because": each.refusal or None,
            }
            for each in phase.predicted.parts
        ]
    return {
        "operations": phase.work.operations,
        "weight_bytes": phase.work.weight_bytes,
        "cache_bytes": phase.work.cache_bytes,
        "operations_per_byte": phase.work.intensity,
        "bound": phase.work.bound(plan.peaks).value,
        "roofline_ns": phase.roofline_ns,
        **asdict(phase.time),
        "overhead_ns": 0.0 if phase.predicted is None else phase.predicted.overhead.program_ns,
        "kernels": kernels,
    }


def _rate(rate: Rate) -> dict[str, Any]:
    dollars = rate.dollars_per_million
    return {
        "batch": rate.batch,
        "fits": rate.fits,
        **asdict(rate.step.time),
        "tokens_per_s": rate.tokens_per_s,
        "request_tokens_per_s": rate.request_tokens_per_s,
        "dollars_per_million": None
        if dollars is None
        else {"dataflow": dollars.dataflow_ns, "program": dollars.program_ns, "serial": dollars.serial_ns},
    }
