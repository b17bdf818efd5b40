"""The choice of a mesh: one policy for plans, their tables of meshes, and traffic.

Meshes are ranked by the time of the instance that a request takes, estimated by rooflines and collectives; those that
keep the service level by these estimates come first. Steps of the best three are predicted by dry runs. Among those
that keep the service level by predicted times, the mesh whose requests take the least time of the instance is chosen:
it costs least. If none keeps it, the mesh whose times exceed the bounds least is chosen. Pipeline stages are taken only
if no mesh with fewer stages holds the batch.

Prompts of compared meshes stay estimates. The first token is predicted only for a mesh that would be chosen.

A mesh with more tensor-parallel ranks than heads has ranks that compute padding. It is offered only if it is requested
or chosen: the best such mesh by estimates is predicted beside the best three others, if it ranks among them.
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
    """What a mesh is chosen for.

    | field | meaning |
    |---|---|
    | `prompt`, `generate` | tokens of a prompt, and tokens to generate |
    | `longest` | positions of the longest request, which a copy holds for each sequence; None: of the mean one |
    | `batch` | sequences that a copy decodes together |
    | `fewer` | whether a copy that does not hold the batch may decode fewer sequences, a power of two |
    | `tp`, `pp`, `ep` | requested sizes of the mesh; None leaves a size open |
    | `sp` | whether ranks cut the rows of prompts |
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
        """Positions in use at the last token of the longest request."""
        return self.longest or self.prompt + self.generate


@dataclass(frozen=True)
class Judged:
    """A mesh with the times of a request in ns, the step predicted where `predicted` says so, else estimated.

    `prompt_ns` is the estimate of a prompt, by which all meshes are compared.
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
        """Time of a request that is alone with its batch."""
        return self.ttft_ns + (self.generate - 1) * self.mean_itl_ns

    @property
    def excesses(self) -> dict[str, float]:
        """Bounds of the service level that the request exceeds, with the ratio of its time to the bound."""
        return self.level.list_excesses(self)

    @property
    def cost_ns(self) -> float:
        """Time of the whole instance that a request takes, of the batches of all copies."""
        batch = self.mesh.batch
        prompts = -(-batch // self.mesh.shape.ep)  # groups compute prompts of their own at the same time
        return (prompts * self.prompt_ns + (self.generate - 1) * self.mean_itl_ns) / (
            batch * self.mesh.copies
        )


class Choice:
    """The meshes for a question, judged by the policy."""

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
        """All meshes of the requested sizes: the chosen one and the others by cost, then those that do not fit."""
        compared = [judged.mesh for judged in self.judged]
        small = (mesh for mesh in self._ranked if mesh.step is None and not self._has_idle_ranks(mesh))
        return (*compared, *small)

    @cached_property
    def judged(self) -> tuple[Judged, ...]:
        """The meshes that hold the batch: the chosen one, the runner-up and others predicted, then others by cost."""
        estimated = sorted(map(self._estimate, (mesh for mesh in self._ranked if mesh.step)), key=_rank)
        busy = [judged for judged in estimated if not self._has_idle_ranks(judged.mesh)]
        last = _rank(busy[PREDICTED - 1]) if len(busy) >= PREDICTED else None
        idle = [
            judged for judged in estimated if judged not in busy and (last is None or _rank(judged) < last)
        ]
        best = sorted(map(self._predict_step, [*busy[:PREDICTED], *idle[:1]]), key=_rank)
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
        """Return whether a mesh that was not requested has more tensor-parallel ranks than the model has heads."""
        return self._question.tp is None and mesh.shape.tp > self._question.model.config.most_busy_ranks

    @cached_property
    def _ranked(self) -> list[Candidate]:
        question = self._question
        return self.estimator.rank(question.tp, question.pp, question.ep)

    def _create_predictor(self, shape: MeshShape) -> Predictor | None:
        """Return the predictor of a mesh; None if no kernel computes the model."""
        question = self._question
        if find_unsupported(question.model.config):
            return None
        # The name of the instance, so that collectives go over its links.
        return Predictor(
            *(question.model.config, question.instance.name, shape.tp, question.dtype, question.context),
            *(question.sp and shape.tp > 1, shape.pp, shape.ep, question.lnc),
        )

    def _estimate(self, mesh: Candidate) -> Judged:
        """Return a mesh with estimated times."""
        assert mesh.step is not None, "only meshes that hold the batch are judged"
        prompt_ns = self.estimator.estimate_prompt(mesh.shape, self._question.prompt)
        times = prompt_ns, prompt_ns, mesh.step.step_ns
        return Judged(mesh, self._question.level, self._question.generate, *times)

    def _predict_step(self, judged: Judged) -> Judged:
        """Return a mesh with the predicted time of its step."""
        predictor = self.find_predictor(judged.mesh.shape)
        if predictor is None:
            return judged
        step = predictor.predict_step(judged.mesh.batch)
        return replace(judged, mean_itl_ns=step.time.program_ns, predicted=True)

    def _predict_prompt(self, judged: Judged) -> Judged:
        """Return a mesh with the predicted time to its first token."""
        predictor = self.find_predictor(judged.mesh.shape)
        if predictor is None:
            return judged
        return replace(judged, ttft_ns=predictor.predict_prompts(self._question.prompt).time.program_ns)


def _rank(judged: Judged) -> tuple[int, bool, float]:
    """Return the sort key of a mesh: fewest stages, then those that keep the service level, then by cost.

    Stages add memory to a copy and no speed to its steps, so that a mesh with fewer stages does not need them.
    """
    return judged.mesh.shape.pp, bool(judged.excesses), judged.cost_ns
