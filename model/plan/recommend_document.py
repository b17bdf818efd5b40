"""A recommendation as the JSON object that `nkw plan --recommend --json` prints.

docs/model/planning.md describes its keys.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

from model.plan.document import SCHEMA
from model.plan.recommend import InstanceOffers, Offer, Recommendation
from nkw.version import DISTRIBUTION, version


def build_recommendation(recommendation: Recommendation, name: str) -> dict[str, Any]:
    """Return the JSON object of a recommendation; docs/model/planning.md describes its keys.

    Args:
        recommendation: the recommendation.
        name: path or name of the config, as the user wrote it.
    """
    load, model = recommendation.load, recommendation.model
    return {
        "schema": SCHEMA,
        "config": name,
        "model_type": model.config.model_type,
        "dtype": recommendation.dtype,
        "rate": load.rate,
        "prompt": load.prompt,
        "generate": load.generate,
        "sla_ns": asdict(load.level),
        "stack": recommendation.stack.name,
        "cheapest": _describe(recommendation.cheapest),
        "fewest_chips": _describe(recommendation.smallest),
        "nearest": _describe(recommendation.nearest) if recommendation.smallest is None else None,
        "instances": [_describe_row(row) for row in recommendation.rows],
        "pareto": [_describe(offer) for offer in recommendation.frontier],
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }


def _describe_row(row: InstanceOffers) -> dict[str, Any]:
    """Return the JSON object of an instance: its best offer, or null with the reason why it has none."""
    return {
        "instance": row.instance.name,
        "offer": _describe(row.offers[0] if row.offers else None),
        "refusal": row.refusal or None,
    }


def _describe(offer: Offer | None) -> dict[str, Any] | None:
    """Return the JSON object of an offer, with times in ns; None for None."""
    if offer is None:
        return None
    per_million = offer.dollars_per_million
    return {
        "instance": offer.instance.name,
        "lnc": offer.lnc,
        **asdict(offer.shape),
        "batch": offer.batch,
        "copies": offer.copies,
        "copies_needed": offer.needed_copies,
        "instances": offer.instances,
        "chips": offer.chips,
        "utilisation": offer.utilisation,
        "copy_requests_per_s": offer.copy_requests_per_s,
        "tokens_per_s": offer.tokens_per_s,
        "wait_ns": offer.wait_ns,
        "ttft_ns": offer.ttft_ns,
        "itl_ns": offer.mean_itl_ns,
        "e2e_ns": offer.e2e_ns,
        "prompt_ns": offer.prompt_ns,
        "step_ns": offer.step_ns,
        "predicted": offer.predicted,
        "exceeds": offer.excesses,
        "keeps_sla": offer.is_kept,
        "price": None if offer.price is None else asdict(offer.price),
        "dollars_per_hour": offer.dollars_per_hour,
        "dollars_per_million_input": None if per_million is None else per_million[0],
        "dollars_per_million_output": None if per_million is None else per_million[1],
    }
