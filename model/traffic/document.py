"""Predicted traffic as the document of `--json`."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from model.layers.launch import Phase, StepShape
from model.traffic.report import PERCENTILES, Percentiles, Summary
from model.traffic.text import basis
from model.traffic.traffic import Traffic
from nkw.version import DISTRIBUTION, version


def document(traffic: Traffic, name: str) -> dict[str, Any]:
    """The document of `--json`; its schema is in docs/model/planning.md."""
    own, setup, workload = traffic.deployment, traffic.deployment.setup, traffic.workload
    price = traffic.request.price
    return {
        "config": name,
        "model_type": traffic.model.config.model_type,
        "instance": own.instance.name,
        "tp": own.tp,
        "ep": setup.ep,
        "replicas": own.replicas,
        "dtype": setup.dtype,
        "max_model_len": setup.max_model_len,
        "pages": own.pages,
        "block_size": setup.block_size,
        "kinds": [asdict(kind) for kind in own.kinds],
        "prefill_replicas": setup.prefill_replicas,
        "link": None if own.link is None else asdict(own.link),
        "draft_model": _draft_model(traffic),
        "options": asdict(setup.options),
        "requests": len(workload.queries),
        "left_out": workload.left_out,
        "rate": workload.rate,
        "users": workload.users or None,
        "window_s": traffic.window_s,
        "think_s": workload.think_ns / 1e9 if workload.users else None,
        "seed": traffic.request.seed,
        "sla_ns": asdict(traffic.request.level),
        "breaking_rate": traffic.breaks,
        "price": price,
        "run": _run(traffic.summary, price),
        "variants": [
            {
                "name": each.name,
                "refusal": each.refusal or None,
                "run": None if each.summary is None else _run(each.summary, price),
            }
            for each in traffic.variants
        ],
        "curve": [{"rate": each.rate, "run": _run(each.run, price)} for each in traffic.curve],
        "shapes": [
            {**(_shape(shape) or {}), **asdict(done.time)} for shape, done in own.clock.shapes.items()
        ],
        "basis": " ".join(basis(traffic)),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }


def _shape(step: StepShape | None) -> dict[str, Any] | None:
    """Return the sizes of a step, as `nkw traffic --json` names them."""
    if step is None:
        return None
    return {
        "sequences": step.sequences,
        "tokens": step.new_tokens,
        "context": step.cache_length,
        "decodes": step.phase is Phase.decode,
        "prefix": step.prefix,
        "beside": _shape(step.decoding),
    }


def _run(run: Summary, price: float | None) -> dict[str, Any]:
    return {
        "ttft_ns": _percentiles(run.ttft),
        "itl_ns": _percentiles(run.itl),
        "e2e_ns": _percentiles(run.e2e),
        "queue_ns": _percentiles(run.queue),
        "handover_ns": None if run.handover is None else _percentiles(run.handover),
        "requests_per_s": run.requests_per_s,
        "tokens_per_s": run.tokens_per_s,
        "goodput_per_s": run.goodput_per_s,
        "met": run.met,
        "prompt_tokens": run.prompt_tokens,
        "new_tokens": run.new_tokens,
        "cached_tokens": run.cached_tokens,
        "elapsed_ns": run.elapsed_ns,
        "utilisation": run.utilisation,
        "utilisations": run.utilisations,
        "prompts": run.prompts,
        "acceptance": run.acceptance,
        "steps": run.steps,
        "computed_tokens": run.computed_tokens,
        "padding": run.padding,
        "preemptions": run.preemptions,
        "dollars_per_million": None if price is None else run.dollars_per_million(price),
        "slices": [asdict(each) for each in run.slices],
    }


def _percentiles(times: Percentiles) -> dict[str, float]:
    return {f"p{percent}": times[percent] for percent in PERCENTILES}


def _draft_model(traffic: Traffic) -> str | None:
    path = traffic.request.draft_model
    return None if path is None else str(path)
