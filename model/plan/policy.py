"""The choice of a mesh: one policy for plans, their tables of meshes, and simulated traffic.

The instance computes several copies of the model, and each copy a batch of requests. The cost of a request is the time
of the whole instance divided by all requests that it computes at once. Meshes are ranked by this cost, estimated by
rooflines and collectives; meshes that keep the service level by these estimates come first.

Steps of the best three are predicted by dry runs. Among those that keep the service level by predicted times, the mesh
with the least cost is chosen. If none keeps it, the mesh whose times exceed the limits least is chosen. Pipeline stages
are taken only if no mesh with fewer stages holds the batch.

Prompts of compared meshes stay estimates. The first token is predicted only for a mesh that would be chosen.

A mesh with more tensor-parallel ranks than heads has ranks that compute padding. It is offered only if it is requested
or chosen: the best such mesh by estimates is predicted besides the best three others, if it ranks among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from model.device import Instance
from model.layers import find_unsupported
from model.plan.memory import MeshShape
from model.plan.meshes import Candidate, Meshes
from model.plan.predict import Predictor
from model.plan.service_level import ServiceLevel
from model.plan.sizes import ModelSizes

PREDICTED = 3
"""Meshes whose steps are predicted."""


@dataclass(frozen=True)
class Question:
    """Model, instance and load for which a mesh is chosen.

    | field | meaning |
    |---|---|
    | `prompt`, `generate` | tokens of a prompt, and tokens to generate |
    | `longest` | tokens of the longest request, for which a copy reserves cache; None: `prompt` + `generate` |
    | `batch` | sequences that a copy decodes together |
    | `level` | the service level that requests should keep |
    | `fewer` | whether a copy that does not hold the batch may decode fewer sequences, a power of two |
    | `tp`, `pp`, `ep` | requested sizes of the mesh; None leaves a size open |
    | `sp` | sequence parallelism: the ranks of a group divide the rows of prompts |
    | `lnc` | physical cores of a rank |
    """

    model: ModelSizes
    instance: Instance
    dtype: str
    prompt: int
    generate: int
    batch: int
    level: ServiceLevel
    longest: int | None = None
    fewer: bool = False
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    sp: bool = False
    lnc: int = 1

    @property
    def context(self) -> int:
        """Tokens of the longest request: positions in its cache at its last token."""
        return self.longest or self.prompt + self.generate


@dataclass(frozen=True)
class Judged:
    """Candidate mesh with the times of a request in ns, by which the policy ranks it.

    `mean_itl_ns` is the time of a decode step: by dry runs if `predicted`, else estimated. `prompt_ns` is the estimate
    of a prompt, by which all meshes are compared. `ttft_ns` equals it until a dry run replaces it.
    """

    mesh: Candidate
    level: ServiceLevel
    generate: int
    prompt_ns: float
    ttft_ns: float
    mean_itl_ns: float
    predicted: bool = False

    @property
    def e2e_ns(self) -> float:
        """Time in ns to compute a request, from its prompt to its last token, without waiting for other requests."""
        return self.ttft_ns + (self.generate - 1) * self.mean_itl_ns

    @property
    def excesses(self) -> dict[str, float]:
        """Ratio of time to limit, by name (ttft, itl, e2e), for each limit that a request exceeds."""
        return self.level.list_excesses(self)

    @property
    def cost_ns(self) -> float:
        """Cost of a request: ns of the whole instance for one batch of every copy, per request of these batches."""
        batch = self.mesh.batch
        prompts = -(-batch // self.mesh.shape.ep)  # groups compute prompts of their own at the same time
        return (prompts * self.prompt_ns + (self.generate - 1) * self.mean_itl_ns) / (
            batch * self.mesh.copies
        )


class Choice:
    """Meshes for a question, estimated, predicted and ordered by the policy on first use.

    `estimator` makes the candidates. `find_predictor(shape)` returns the predictor by dry runs of a mesh; None if no
    kernel computes the model.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self.estimator = Meshes(
            *(question.model, question.dtype, question.instance, question.context, question.batch),
            lnc=question.lnc,
            fewer=question.fewer,
        )
        self.find_predictor = lru_cache(maxsize=None)(self._create_predictor)

    @cached_property
    def meshes(self) -> tuple[Candidate, ...]:
        """All meshes of the requested sizes: those of `judged`, then those that do not hold the batch."""
        compared = [judged.mesh for judged in self.judged]
        small = (mesh for mesh in self._ranked if mesh.step is None and not self._has_idle_ranks(mesh))
        return (*compared, *small)

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        """Meshes that hold the batch: the chosen one, then the others predicted by dry runs, then those estimated.

        Each of the last two groups is in the order of the policy. Empty if no mesh holds the batch. The first use takes
        seconds, because it runs the dry runs.
        """
        estimated = sorted(
            map(self._estimate, (mesh for mesh in self._ranked if mesh.step)), key=_make_sort_key
        )
        busy = [judged for judged in estimated if not self._has_idle_ranks(judged.mesh)]
        last = _make_sort_key(busy[PREDICTED - 1]) if len(busy) >= PREDICTED else None
        idle = [
            judged
            for judged in estimated
            if judged not in busy and (last is None or _make_sort_key(judged) < last)
        ]
        best = sorted(map(self._predict_step, [*busy[:PREDICTED], *idle[:1]]), key=_make_sort_key)
        if not best:
            return ()
        for index, judged in enumerate(best):
            best[index] = judged = self._predict_prompt(judged)
            if not judged.excesses:
                break
        else:
            index = min(range(len(best)), key=lambda number: max(best[number].excesses.values()))
        predicted = (
            judged for judged in best if not self._has_idle_ranks(judged.mesh) and judged is not best[index]
        )
        return (best[index], *predicted, *busy[PREDICTED:])

    def _has_idle_ranks(self, mesh: Candidate) -> bool:
        """Return whether a mesh has more ranks than the model has heads, although no number of ranks was requested."""
        return self._question.tp is None and mesh.shape.tp > self._question.model.config.most_busy_ranks

    @cached_property
    def _ranked(self) -> list[Candidate]:
        question = self._question
        return self.estimator.rank(question.tp, question.pp, question.ep)

    def _create_predictor(self, shape: MeshShape) -> Predictor | None:
        """Return the predictor by dry runs for a mesh; None if no kernel computes the model."""
        question = self._question
        if find_unsupported(question.model.config):
            return None
        # The name of the instance, so that collectives go over its links.
        return Predictor(
            *(question.model.config, question.instance.name, shape.tp, question.dtype, question.context),
            *(question.sp and shape.tp > 1, shape.pp, shape.ep, question.lnc),
            cache_dtype=question.model.cache_dtype,
        )

    def _estimate(self, mesh: Candidate) -> Judged:
        """Return a mesh that holds the batch with estimated times of a prompt and a decode step."""
        assert mesh.step is not None, "only meshes that hold the batch are judged"
        prompt_ns = self.estimator.estimate_prompt(mesh.shape, self._question.prompt)
        times = prompt_ns, prompt_ns, mesh.step.step_ns
        return Judged(mesh, self._question.level, self._question.generate, *times)

    def _predict_step(self, judged: Judged) -> Judged:
        """Return a copy with the step's time by dry runs; the same object if no kernel computes the model."""
        predictor = self.find_predictor(judged.mesh.shape)
        if predictor is None:
            return judged
        step = predictor.predict_step(judged.mesh.batch)
        return replace(judged, mean_itl_ns=step.time.program_ns, predicted=True)

    def _predict_prompt(self, judged: Judged) -> Judged:
        """Return a copy with the time to first token by dry runs; the same object if no kernel computes the model."""
        predictor = self.find_predictor(judged.mesh.shape)
        if predictor is None:
            return judged
        return replace(judged, ttft_ns=predictor.predict_prompts(self._question.prompt).time.program_ns)


def _make_sort_key(judged: Judged) -> tuple[int, bool, float]:
    """Return a sort key: fewest pipeline stages first, then meshes that keep the service level, then the lowest cost.

    Stages add memory to a copy and no speed to its steps, so that a mesh with fewer stages does not need them.
    """
    return judged.mesh.shape.pp, bool(judged.excesses), judged.cost_ns
