"""Predicted traffic as the JSON document of `nkw traffic --json`."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from model.config.published import describe_config
from model.layers.launch import Phase, StepShape
from model.plan.document import describe_judged, describe_term
from model.traffic.report import PERCENTILES, Percentiles, Summary
from model.traffic.text import describe_basis
from model.traffic.traffic import Traffic
from nkw.version import DISTRIBUTION, version


def build_document(traffic: Traffic, name: str) -> dict[str, Any]:
    """Return the JSON document of a prediction as dicts and lists; docs/model/planning.md has its schema.

    Args:
        traffic: The prediction.
        name: Name of the config, for the field `config`.
    """
    request, deployment, workload = traffic.request, traffic.deployment, traffic.workload
    setup = deployment.setup
    price = None if traffic.price is None else traffic.price.dollars_per_hour
    return {
        "config": name,
        "model_type": traffic.model.config.model_type,
        "stand_in": None if traffic.model.config.stand_in is None else asdict(traffic.model.config.stand_in),
        "instance": deployment.instance.name,
        "lnc": setup.lnc,
        "tp": deployment.tp,
        "ep": setup.ep,
        "replicas": deployment.replicas,
        "dtype": setup.dtype,
        "max_model_len": setup.max_model_len,
        "stack": _build_stack(traffic),
        "pages": deployment.pages,
        "block_size": setup.block_size,
        "kinds": [asdict(page_kind) for page_kind in deployment.page_kinds],
        "prefill_replicas": setup.prefill_replicas,
        "link": None if deployment.link is None else asdict(deployment.link),
        "draft_model": None if request.draft_model is None else describe_config(request.draft_model),
        "options": asdict(setup.options),
        "requests": len(workload.queries),
        "left_out": workload.left_out,
        "rate": workload.rate,
        "users": workload.users or None,
        "window_s": traffic.window_s,
        "think_s": workload.think_ns / 1e9 if workload.users else None,
        "seed": request.seed,
        "sla_ns": asdict(request.level),
        "compared": [describe_judged(judged) for judged in traffic.judged],
        "breaking_rate": traffic.breaking_rate,
        "price": price,
        "price_basis": None if traffic.price is None else asdict(traffic.price),
        "run": _build_run(traffic.summary, price),
        "variants": [
            {
                "name": variant.name,
                "refusal": variant.refusal or None,
                "run": None if variant.summary is None else _build_run(variant.summary, price),
            }
            for variant in traffic.variants
        ],
        "curve": [{"rate": point.rate, "run": _build_run(point.run, price)} for point in traffic.curve],
        "shapes": [
            {**(_build_shape(step) or {}), **asdict(done.time)}
            for step, done in deployment.clock.shapes.items()
        ],
        "basis": " ".join(describe_basis(traffic)),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }


def _build_stack(traffic: Traffic) -> dict[str, Any]:
    """Return the field `stack`: the serving stack's name, date, terms and note, and published over predicted values."""
    stack = traffic.stack
    return {
        "name": stack.name,
        "date": stack.date,
        "terms": {name: describe_term(term) for name, term in stack.list_terms()},
        "published_over_predicted": {
            metric: None if ratios is None else asdict(ratios) for metric, ratios in traffic.ratios.items()
        },
        "note": stack.note,
    }


def _build_shape(step: StepShape | None) -> dict[str, Any] | None:
    """Return the sizes of a step's shape as a JSON object, or None if `step` is None.

    The field `beside` has the shape of the sequences that decode in the same pass.
    """
    if step is None:
        return None
    return {
        "sequences": step.sequences,
        "tokens": step.new_tokens,
        "context": step.cache_length,
        "decodes": step.phase is Phase.decode,
        "prefix": step.prefix,
        "beside": _build_shape(step.decoding),
    }


def _build_run(run: Summary, price: float | None) -> dict[str, Any]:
    """Return a run as a JSON object.

    Args:
        run: Summary of the run.
        price: Price of the instance in dollars an hour; with None the dollar fields are None.
    """
    return {
        "ttft_ns": build_percentiles(run.ttft),
        "itl_ns": build_percentiles(run.itl),
        "e2e_ns": build_percentiles(run.e2e),
        "queue_ns": build_percentiles(run.queue),
        "handover_ns": None if run.handover is None else build_percentiles(run.handover),
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
        "dollars_per_million_input": None if price is None else run.dollars_per_million_input(price),
        "dollars_per_million_output": None if price is None else run.dollars_per_million_output(price),
        "slices": [asdict(slice) for slice in run.slices],
    }


def build_percentiles(times: Percentiles) -> dict[str, float]:
    """Return the times at 50, 90 and 99 percent under the keys p50, p90 and p99."""
    return {f"p{percent}": times[percent] for percent in PERCENTILES}
