"""The same requests on other deployments: one thing is changed in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from model.errors import ModelError
from model.plan.sizes import ModelSizes
from model.traffic.deployment import Deployment, Setup
from model.traffic.report import ServiceLevel, Summary, summary
from model.traffic.workload import Workload


@dataclass(frozen=True)
class Variant:
    """The same workload on another deployment; `refusal` says why that cannot be."""

    name: str
    summary: Summary | None = None
    refusal: str = ""


def variants(
    model: ModelSizes,
    base: Deployment,
    workload: Workload,
    level: ServiceLevel,
    prompts: float,
    told: Callable[[str], None],
) -> Iterator[Variant]:
    """A workload with each of the changes. `prompts` is the share of the steps' time that prompts take in `base`."""
    for name, setup in _changes(base, prompts).items():
        told(name)
        try:
            changed = Deployment(model, setup, base)
            records = changed.serve(workload)
        except ModelError as error:
            yield Variant(name, refusal=error.message)
            continue
        yield Variant(name, summary(records, level, changed.pages, setup.prefill_replicas))


def _changes(base: Deployment, prompts: float) -> dict[str, Setup]:
    own, replicas = base.setup, base.replicas
    changes = {"static batching": replace(own, options=replace(own.options, continuous=False))}
    if not base.takes_speech:  # windows are whole, and nobody shares them
        changes["whole prompts"] = own.whole_prompts()
        changes["no prefix cache"] = replace(own, options=replace(own.options, prefix_caching=False))
    changes["half the buckets"] = replace(own, few_buckets=True)
    if own.speculation is not None:
        changes["no drafts"] = own.without_drafts()
    if own.prefill_replicas:
        changes["prompts anywhere"] = replace(own, prefill_replicas=0)
    elif replicas > 1:
        some = min(replicas - 1, max(1, round(prompts * replicas)))
        changes[f"{some} of {replicas} prefill"] = replace(own, prefill_replicas=some)
    for tp in (base.tp // 2, base.tp * 2):
        copies = replicas * base.tp // max(1, tp)  # on the same cores
        if tp and copies:
            some = own.prefill_replicas * copies // replicas
            changes[f"tp {tp}, replicas {copies}"] = replace(
                own, tp=tp, replicas=copies, prefill_replicas=some
            )
    return changes
