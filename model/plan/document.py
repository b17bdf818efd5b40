"""A plan as the document of `--json`."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from model.plan.meshes import Candidate
from model.plan.plan import Fit, Phase, Plan, Rate
from model.plan.sizes import DTYPE_BYTES
from model.plan.speech import Transcription, transcription
from model.plan.text import basis
from nkw.version import DISTRIBUTION, version

SCHEMA = 1


def document(plan: Plan, name: str) -> dict[str, Any]:
    """The document of `--json`; its schema is in docs/model/planning.md."""
    model = plan.model
    return {
        "schema": SCHEMA,
        "config": name,
        "model_type": model.config.model_type,
        "dtype": plan.dtype,
        "layers": model.num_layers,
        "parameters": {
            **model.parameters,
            "all": model.total,
            "active": model.active + model.head_parameters,
        },
        "weight_bytes": DTYPE_BYTES[plan.dtype] * model.total,
        "cache_bytes_per_token": plan.cache_bytes_per_token,
        "cache_bytes_per_sequence": model.cache_bytes(plan.context, plan.dtype),
        "place": plan.place,
        "target": plan.target,
        "tp": plan.tp,
        "pp": 1 if plan.mesh is None else plan.mesh.shape.pp,
        "ep": 1 if plan.mesh is None else plan.mesh.shape.ep,
        "sp": plan.sp,
        "meshes": [_mesh(each) for each in plan.meshes],
        "uneven": list(plan.uneven),
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
        "first_tokens": _phase(plan, plan.first_tokens),
        "step": _phase(plan, plan.step),
        "batches": [_rate(each) for each in plan.rates],
        "speech": _transcription(transcription(plan)),
        "basis": " ".join(basis(plan)),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }


def _transcription(found: Transcription | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "real_time_factor": found.real_time_factor}


def _mesh(mesh: Candidate) -> dict[str, Any]:
    return {
        **asdict(mesh.shape),
        "copies": mesh.copies,
        "weight_bytes": mesh.weight_bytes,
        "needed_bytes": mesh.needed_bytes,
        "sequences": mesh.sequences,
        "tokens_per_s": mesh.tokens_per_s,
        "step": None if mesh.step is None else asdict(mesh.step),
    }


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "instance": fit.instance.name,
        "tp": fit.tp,
        "pp": fit.shape.pp,
        "ep": fit.shape.ep,
        "copies": fit.copies,
        "sequences": fit.sequences,
        "bytes_per_core": fit.held.bytes_with_one,
        "core_bytes": fit.core_bytes,
    }


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
