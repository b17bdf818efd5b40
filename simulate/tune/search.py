"""The search: optuna proposes candidates in batches, and learns their times."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from random import Random
from typing import Any

from nkw.errors import InvalidArgument
from simulate.tune.measuring import Outcome
from simulate.tune.parameters import Candidate, Parameter, Tunable
from simulate.tune.workers import Workers

BATCH = 16
"""Candidates that are proposed at a time, however few processes there are: a seed decides them all."""
_LEAST_TIMES = 4
"""Different times from which on it is worth asking which parameters matter."""
_PROPOSALS = 8  # of optuna for one place in a batch, before a candidate is drawn at random


@dataclass(frozen=True)
class Tried:
    """A candidate with its outcome; number 0 is the default."""

    number: int
    candidate: Candidate
    outcome: Outcome


@dataclass
class Found:
    """What a search has found so far.

    `importance` is the part of the differences between times that each parameter explains; empty where nothing is
    known. `stopped` is the interrupt that ended the search.
    """

    tried: list[Tried] = field(default_factory=list)
    importance: dict[str, float] = field(default_factory=dict)
    stopped: KeyboardInterrupt | None = None

    @property
    def default(self) -> Tried:
        """The default of every parameter."""
        return self.tried[0]

    @property
    def ranked(self) -> list[Tried]:
        """The candidates that were measured, the fastest first; of equal ones that with fewest changes."""
        measured = (each for each in self.tried if each.outcome.length_ns is not None)
        return sorted(
            measured, key=lambda each: (each.outcome.length_ns, len(self.changes(each)), each.number)
        )

    def changes(self, tried: Tried) -> Candidate:
        """The values of a candidate that are not those of the default."""
        default = self.default.candidate
        return {name: each for name, each in tried.candidate.items() if each != default[name]}

    @property
    def best(self) -> Tried:
        """The fastest candidate."""
        return self.ranked[0]

    @property
    def pruned(self) -> list[Tried]:
        """The candidates that were refused."""
        return [each for each in self.tried if each.outcome.length_ns is None]


def search(
    kernel: Tunable,
    default: Outcome,
    workers: Workers,
    also: Sequence[Candidate] = (),
    batch: int = BATCH,
    trials: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    said: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Try candidates until `trials` of them, or `seconds`, or all candidates are through, or the user interrupts.

    `default` is the outcome of the default, which counts as tried; `also` are the candidates that are tried first.
    `said` is called with what was found so far. The same seed tries the same candidates on any number of processes,
    unless `seconds` end the search. Raises InvalidArgument without optuna.
    """
    found = Found()
    until = inf if seconds is None else time.monotonic() + seconds
    most = min(kernel.candidates, inf if trials is None else max(trials, 1 + len(also)))
    proposals = Proposals(kernel.parameters, seed)

    def keep(trial: Any, number: int, candidate: Candidate, outcome: Outcome) -> None:
        proposals.learn(trial, outcome)
        found.tried.append(Tried(number, candidate, outcome))
        said(found)

    try:
        keep(proposals.given(kernel.default), 0, kernel.default, default)
        asked = [proposals.given(each) for each in also if proposals.is_new(each)]
        while True:
            asked += [proposals.next() for _ in range(int(min(batch, most - len(found.tried))) - len(asked))]
            candidates = [proposals.candidate(each) for each in asked]
            begun = len(found.tried)
            for place, outcome in workers.measured(candidates, until):
                keep(asked[place], begun + place, candidates[place], outcome)
            if len(found.tried) < begun + len(asked) or len(found.tried) >= most or time.monotonic() >= until:
                break
            asked = []
    except KeyboardInterrupt as stopped:
        found.stopped = stopped
    found.tried.sort(key=lambda each: each.number)
    found.importance = proposals.importance()
    return found


class Proposals:
    """Candidates that optuna's TPE sampler proposes, each once.

    optuna sees places in domains: neighbouring numbers are alike to it, other values are not.
    """

    def __init__(self, parameters: Sequence[Parameter], seed: int) -> None:
        try:
            import optuna
        except ImportError as absent:
            raise InvalidArgument(
                "NKW-TUNE-EXTRA", "tune needs optuna; pip install 'nki-workbench[tune]'"
            ) from absent
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._parameters = parameters
        self._random = Random(seed)
        self._seen: set[tuple[int, ...]] = set()
        self._space = {each.name: self._distribution(each) for each in parameters}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)

    def candidate(self, trial: Any) -> Candidate:
        """What a trial of optuna stands for."""
        return {each.name: each.domain[trial.params[each.name]] for each in self._parameters}

    def is_new(self, candidate: Candidate) -> bool:
        """Whether a candidate has not been asked for."""
        return self._places(candidate) not in self._seen

    def given(self, candidate: Candidate) -> Any:
        """The trial of a candidate."""
        places = self._places(candidate)
        self._seen.add(places)
        self._study.enqueue_trial({each.name: place for each, place in zip(self._parameters, places)})
        return self._study.ask(self._space)

    def next(self) -> Any:
        """The trial of a new candidate; there must be one."""
        for _ in range(_PROPOSALS):
            trial = self._study.ask(self._space)
            places = tuple(trial.params[each.name] for each in self._parameters)
            if places not in self._seen:
                self._seen.add(places)
                return trial
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # which the sampler leaves out
        return self.given(self._drawn())

    def learn(self, trial: Any, outcome: Outcome) -> None:
        """Tell optuna what a trial took."""
        if outcome.length_ns is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, outcome.length_ns)

    def importance(self) -> dict[str, float]:
        """The part of the differences between times that each parameter explains; empty where optuna finds none."""
        times = {each.value for each in self._study.get_trials(False) if each.value is not None}
        if len(times) < _LEAST_TIMES:
            return {}
        found = self._optuna.importance.get_param_importances(self._study)
        return {name: float(part) for name, part in found.items() if part == part}

    def _places(self, candidate: Candidate) -> tuple[int, ...]:
        return tuple(each.domain.index(candidate[each.name]) for each in self._parameters)

    def _drawn(self) -> Candidate:
        """A new candidate at random: the first one after a random place, in the order of all candidates."""
        sizes = [len(each.domain) for each in self._parameters]
        number = self._random.randrange(prod(sizes))
        while True:
            places, rest = [], number
            for size in sizes:
                places.append(rest % size)
                rest //= size
            if tuple(places) not in self._seen:
                return {each.name: each.domain[place] for each, place in zip(self._parameters, places)}
            number = (number + 1) % prod(sizes)

    def _distribution(self, parameter: Parameter) -> Any:
        last = len(parameter.domain) - 1
        if parameter.ordered:
            return self._optuna.distributions.IntDistribution(0, last)
        return self._optuna.distributions.CategoricalDistribution(range(last + 1))
