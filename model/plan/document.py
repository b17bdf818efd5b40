"""A plan as the JSON object that `nkw plan --json` prints; docs/model/planning.md describes its keys."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from model.plan.dry import Time
from model.plan.meshes import Candidate
from model.plan.plan import Fit, Phase, Plan, Rate
from model.plan.policy import Judged
from model.plan.roofline import LEAST, USUAL, Reach
from model.plan.service import describe_service
from model.plan.sizes import DTYPE_BYTES
from model.plan.speech import compute_transcription
from model.plan.stacks import Fact, HostTime, Scale, Served
from model.plan.text import describe_basis
from nkw.version import DISTRIBUTION, version

SCHEMA = 1


def build_document(plan: Plan, name: str) -> dict[str, Any]:
    """Return the JSON object of a plan; docs/model/planning.md describes its keys.

    Args:
        plan: the plan.
        name: path or name of the config, as the user wrote it.
    """
    model, request, placement = plan.model, plan.request, plan.placement
    return {
        "schema": SCHEMA,
        "config": name,
        "model_type": model.config.model_type,
        "stand_in": None if model.config.stand_in is None else asdict(model.config.stand_in),
        "dtype": plan.dtype,
        "kv_cache_dtype": model.cache_dtype,
        "layers": model.num_layers,
        "parameters": {
            **model.parameters,
            "all": model.total,
            "active": model.active + model.head_parameters,
        },
        "weight_bytes": DTYPE_BYTES[plan.dtype] * model.total,
        "cache_bytes_per_token": plan.cache_bytes_per_token,
        "cache_bytes_per_sequence": model.count_cache_bytes(plan.context, plan.dtype),
        "place": placement.name,
        "target": None if placement.instance is None else placement.instance.target,
        "lnc": None if placement.instance is None else placement.lnc,
        **asdict(placement.shape),
        "sp": request.sp,
        "meshes": [_describe_mesh(mesh) for mesh in placement.meshes],
        "sla_ns": asdict(request.level),
        "compared": [describe_judged(judged) for judged in placement.judged],
        "uneven": list(plan.uneven),
        "copies": placement.mesh.copies,
        "prompt": plan.prompt,
        "generate": plan.generate,
        "batch": request.batch,
        "fits": plan.rate.fits,
        "price": None if plan.price is None else plan.price.dollars_per_hour,
        "price_basis": None if plan.price is None else asdict(plan.price),
        "peaks": {**asdict(placement.peaks), "ridge": placement.peaks.ridge},
        "roofline_shares": {"usual": _describe_reach(USUAL), "least": _describe_reach(LEAST)},
        "by_tp": [asdict(footprint) for footprint in plan.footprints],
        "instances": [_describe_fit(fit) for fit in plan.fits],
        "first_token": _describe_phase(plan, plan.first_token),
        "first_tokens": _describe_phase(plan, plan.first_tokens),
        "step": _describe_phase(plan, plan.rate.step),
        "stack": _describe_stack(plan),
        "batches": [_describe_rate(rate) for rate in plan.rates],
        "speech": _describe_speech(plan),
        "basis": " ".join(describe_basis(plan)),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }


def _describe_speech(plan: Plan) -> dict[str, Any] | None:
    """Return the JSON object of the speed of transcription; None for a model without a speech encoder."""
    speed = compute_transcription(plan)
    if speed is None:
        return None
    return {
        "window_s": speed.window_s,
        "encoder": None if speed.encoder is None else asdict(speed.encoder),
        "whole": asdict(speed.time),
        "speech_per_s": speed.speech_per_s,
        "real_time_factor": speed.real_time_factor,
    }


def _describe_reach(reach: Reach) -> dict[str, Any]:
    """Return the JSON object of the shares of the peaks that kernels reach, with their source and confidence."""
    return {
        "operations": reach.operations,
        "bytes": reach.bytes,
        "source": reach.origin.source,
        "confidence": reach.origin.confidence.value,
    }


def _describe_mesh(mesh: Candidate) -> dict[str, Any]:
    """Return the JSON object of a mesh that the planner compared."""
    return {
        **asdict(mesh.shape),
        "copies": mesh.copies,
        "weight_bytes": mesh.weight_bytes,
        "needed_bytes": mesh.needed_bytes,
        "sequences": mesh.sequences,
        "tokens_per_s": mesh.tokens_per_s,
        "step": None if mesh.step is None else asdict(mesh.step),
    }


def describe_judged(judged: Judged) -> dict[str, Any]:
    """Return the JSON object of a mesh with the times and the cost by which the policy ranked it."""
    return {
        **asdict(judged.mesh.shape),
        "batch": judged.mesh.batch,
        "predicted": judged.predicted,
        "ttft_ns": judged.ttft_ns,
        "itl_ns": judged.mean_itl_ns,
        "cost_ns": judged.cost_ns,
        "exceeds": list(judged.excesses),
    }


def _describe_fit(fit: Fit) -> dict[str, Any]:
    """Return the JSON object of how an instance holds the model; `tp` is null if it does not."""
    return {
        "instance": fit.instance.name,
        "lnc": fit.lnc,
        "tp": fit.tp,
        "pp": fit.shape.pp,
        "ep": fit.shape.ep,
        "copies": fit.copies,
        "sequences": fit.sequences,
        "bytes_per_core": fit.footprint.bytes_with_one,
        "core_bytes": fit.core_bytes,
    }


def _describe_phase(plan: Plan, phase: Phase) -> dict[str, Any]:
    """Return the JSON object of a prompt or a decode step: its work, times in ns, and kernels.

    `kernels` is null if the time is only a roofline. The times are null if the plan's batch does not fit.
    """
    predicted = phase.predicted
    return {
        "operations": phase.work.operations,
        "weight_bytes": phase.work.weight_bytes,
        "cache_bytes": phase.work.cache_bytes,
        "operations_per_byte": phase.work.intensity,
        "bound": phase.work.find_bound(plan.placement.peaks).value,
        "roofline_ns": phase.roofline_ns,
        "times": "roofline, at least" if predicted is None else "dry runs",
        **_describe_time(phase, plan.rate.fits),
        "overhead_ns": 0.0 if predicted is None else predicted.overhead.program_ns,
        "kernels": None
        if predicted is None
        else [
            {
                "kernel": kernel.name,
                "launches": kernel.launches,
                **asdict(kernel.time),
                "floor_ns": kernel.floor_ns,
                "cores": kernel.cores,
                "roofline_because": kernel.refusal or None,
            }
            for kernel in predicted.kernels
        ],
    }


def _describe_stack(plan: Plan) -> dict[str, Any] | None:
    """Return the JSON object of the serving stack: its record, and the latency and throughput that its user sees.

    Returns None if the plan is for an accelerator, or if its batch does not fit.
    """
    service, stack = describe_service(plan), plan.stack
    if service is None:
        return None
    return {
        "name": stack.name,
        "date": stack.date,
        "terms": {name: describe_term(term) for name, term in stack.list_terms()},
        "first_token": _describe_served(service.first_token),
        "step": _describe_served(service.step),
        "tokens_per_s": service.tokens_per_s,
        "published_over_predicted": {
            metric: None if ratios is None else asdict(ratios) for metric, ratios in service.ratios.items()
        },
        "note": stack.note,
    }


def describe_term(term: HostTime | Scale | Fact) -> dict[str, Any]:
    """Return the JSON object of one term of a stack's record: its value or values, source and confidence."""
    value: dict[str, Any]
    if isinstance(term, HostTime):
        value = {"base_ms": term.base_ms, "slot_ms": term.slot_ms}
    else:
        value = {"value": term.text if isinstance(term, Fact) else term.value}
    return {**value, "source": term.origin.source, "confidence": term.origin.confidence.value}


def _describe_served(served: Served) -> dict[str, Any]:
    """Return the JSON object of the latency that a user sees: the sum, and the times of device and engine, in ns."""
    return {**asdict(served.time), "device": asdict(served.device), "engine_ns": served.engine_ns}


def _describe_rate(rate: Rate) -> dict[str, Any]:
    """Return the JSON object of decoding at one batch size.

    Times and throughputs are null if the batch does not fit. Dollars are also null if no price is known.
    """
    dollars = rate.dollars
    return {
        "batch": rate.batch,
        "fits": rate.fits,
        **_describe_time(rate.step, rate.fits),
        "served": _describe_served(rate.step.served) if rate.fits else None,
        "tokens_per_s": rate.tokens_per_s,
        "request_tokens_per_s": rate.request_tokens_per_s,
        "kernels": None if rate.step.predicted is None else list(rate.step.predicted.times_by_kernel),
        "dollars_per_million": None if dollars is None else _describe_dollars(dollars.request),
        "dollars_per_million_input": None if dollars is None else _describe_dollars(dollars.input),
        "dollars_per_million_output": None if dollars is None else _describe_dollars(dollars.output),
    }


def _describe_time(phase: Phase, fits: bool) -> dict[str, float | None]:
    """Return the three readings of a phase's time in ns; all are None unless `fits`."""
    return asdict(phase.time) if fits else dict.fromkeys(asdict(phase.time))


def _describe_dollars(dollars: Time) -> dict[str, float]:
    """Return the JSON object of dollars per million tokens, by the reading of the times that they were computed from.

    Args:
        dollars: three amounts of dollars, stored in the three fields of a `Time`.
    """
    return {"dataflow": dollars.dataflow_ns, "program": dollars.program_ns, "serial": dollars.serial_ns}
