"""Search of candidates: optuna proposes them in batches and learns their times.

A candidate is a dict with a value for each parameter. A trial is a candidate with its outcome; a trial of optuna is its
own object for the same, which has the indices of the values in their domains.
"""

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
"""Least number of candidates per batch, independent of the number of processes, so that a seed decides all of them."""
_LEAST_TIMES = 4
"""Least number of distinct times from which the importance of parameters is computed."""
_PROPOSALS = 8  # proposals of optuna before a candidate is chosen at random


@dataclass(frozen=True)
class Trial:
    """A candidate with its outcome; `number` counts candidates in the order of proposal, and 0 is the default."""

    number: int
    candidate: Candidate
    outcome: Outcome


@dataclass
class SearchState:
    """State of a search.

    `trials` are in order of completion during the search, and by number at its end. `importance` is the share of the
    differences between times that each parameter explains; empty until the end, or if unknown. `stopped` is the
    interrupt that ended the search, None if it ended by itself.
    """

    trials: list[Trial] = field(default_factory=list)
    importance: dict[str, float] = field(default_factory=dict)
    stopped: KeyboardInterrupt | None = None

    @property
    def default(self) -> Trial:
        """Trial of the default of every parameter."""
        return self.trials[0]

    @property
    def ranked(self) -> list[Trial]:
        """Trials with a time, fastest first; of equal times the one with fewer values off the default comes first."""
        measured = (trial for trial in self.trials if trial.outcome.length_ns is not None)
        return sorted(
            measured, key=lambda trial: (trial.outcome.length_ns, len(self.changes(trial)), trial.number)
        )

    def changes(self, trial: Trial) -> Candidate:
        """Return the values of a trial's candidate that differ from the default, by parameter."""
        default = self.default.candidate
        return {name: choice for name, choice in trial.candidate.items() if choice != default[name]}

    @property
    def best(self) -> Trial:
        """First of `ranked`: the trial of the fastest candidate."""
        return self.ranked[0]

    @property
    def pruned(self) -> list[Trial]:
        """Trials of refused candidates, which have no time."""
        return [trial for trial in self.trials if trial.outcome.length_ns is None]


def search(
    kernel: Tunable,
    default: Outcome,
    workers: Workers,
    first_candidates: Sequence[Candidate] = (),
    batch: int = BATCH,
    trials: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    notify: Callable[[SearchState], None] = lambda state: None,
) -> SearchState:
    """Try candidates until `trials` of them, `seconds`, or all candidates are done, or the user interrupts.

    A KeyboardInterrupt is stored in the state, not raised.

    Args:
        kernel: The kernel with its parameters.
        default: Outcome of the default, which counts as the first trial.
        workers: Measure the candidates; the caller closes them.
        first_candidates: Candidates to try before those that optuna proposes. They are tried even beyond `trials`.
        batch: Candidates that are proposed before the first of them is measured.
        trials: Most candidates to try, the default among them; None for no limit.
        seconds: Time after which the search ends; None for no limit.
        seed: Seed of all random choices.
        notify: Called with the state of the search after every candidate; may raise KeyboardInterrupt.

    Returns:
        The final state. The same seed and batch try the same candidates on any number of processes, unless `seconds`
        end the search.

    Raises:
        InvalidArgument: If optuna is missing.
    """
    state = SearchState()
    deadline = inf if seconds is None else time.monotonic() + seconds
    max_trials = min(kernel.candidates, inf if trials is None else max(trials, 1 + len(first_candidates)))
    proposals = Proposals(kernel.parameters, seed)

    def record(trial: Any, number: int, candidate: Candidate, outcome: Outcome) -> None:
        proposals.learn(trial, outcome)
        state.trials.append(Trial(number, candidate, outcome))
        notify(state)

    try:
        record(proposals.enqueue(kernel.default), 0, kernel.default, default)
        batch_trials = [proposals.enqueue(trial) for trial in first_candidates if proposals.is_new(trial)]
        while True:
            batch_trials += [
                proposals.propose()
                for _ in range(int(min(batch, max_trials - len(state.trials))) - len(batch_trials))
            ]
            candidates = [proposals.read_candidate(trial) for trial in batch_trials]
            num_before = len(state.trials)
            for index, outcome in workers.measure(candidates, deadline):
                record(batch_trials[index], num_before + index, candidates[index], outcome)
            if (
                len(state.trials) < num_before + len(batch_trials)
                or len(state.trials) >= max_trials
                or time.monotonic() >= deadline
            ):
                break
            batch_trials = []
    except KeyboardInterrupt as stopped:
        state.stopped = stopped
    state.trials.sort(key=lambda trial: trial.number)
    state.importance = proposals.compute_importance()
    return state


class Proposals:
    """Source of distinct candidates that optuna's TPE sampler proposes.

    optuna sees the indices of values in their domains, not the values. It takes neighbours in a domain of ascending
    numbers as similar, other values as unrelated.

    Raises:
        InvalidArgument: If optuna is not installed.
    """

    def __init__(self, parameters: Sequence[Parameter], seed: int) -> None:
        try:
            import optuna
        except ImportError as absent:
            raise InvalidArgument(
                "NKW-TUNE-EXTRA",
                "tune needs optuna, which is not installed; pip install 'nki-workbench[tune]'",
            ) from absent
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._parameters = parameters
        self._random = Random(seed)
        self._seen: set[tuple[int, ...]] = set()
        self._space = {parameter.name: self._make_distribution(parameter) for parameter in parameters}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)

    def read_candidate(self, trial: Any) -> Candidate:
        """Return the candidate that a trial of optuna proposes."""
        return {
            parameter.name: parameter.domain[trial.params[parameter.name]] for parameter in self._parameters
        }

    def is_new(self, candidate: Candidate) -> bool:
        """Return whether a candidate was not proposed before."""
        return self._find_indices(candidate) not in self._seen

    def enqueue(self, candidate: Candidate) -> Any:
        """Return a new optuna trial of a given candidate, and record the candidate as proposed."""
        indices = self._find_indices(candidate)
        self._seen.add(indices)
        self._study.enqueue_trial(
            {parameter.name: index for parameter, index in zip(self._parameters, indices)}
        )
        return self._study.ask(self._space)

    def propose(self) -> Any:
        """Return an optuna trial of a candidate that was not proposed before, and record it as proposed.

        At least one such candidate must remain. If optuna repeats itself eight times, it is chosen at random.
        """
        for _ in range(_PROPOSALS):
            trial = self._study.ask(self._space)
            indices = tuple(trial.params[parameter.name] for parameter in self._parameters)
            if indices not in self._seen:
                self._seen.add(indices)
                return trial
            self._study.tell(
                trial, state=self._optuna.trial.TrialState.FAIL
            )  # the sampler ignores failed trials
        return self.enqueue(self._choose_at_random())

    def learn(self, trial: Any, outcome: Outcome) -> None:
        """Report to optuna the objective of one of its trials in ns, or that the candidate was refused."""
        if outcome.length_ns is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, outcome.length_ns)

    def compute_importance(self) -> dict[str, float]:
        """Return the share of the differences between times that each parameter explains, by its name.

        Empty with fewer than four distinct times.
        """
        times = {trial.value for trial in self._study.get_trials(False) if trial.value is not None}
        if len(times) < _LEAST_TIMES:
            return {}
        importances = self._optuna.importance.get_param_importances(self._study)
        return {name: float(share) for name, share in importances.items() if share == share}

    def _find_indices(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the index of each value of a candidate in its parameter's domain, in the order of the parameters."""
        return tuple(parameter.domain.index(candidate[parameter.name]) for parameter in self._parameters)

    def _choose_at_random(self) -> Candidate:
        """Return the first candidate not proposed before, from a random position in the order of all candidates on."""
        sizes = [len(parameter.domain) for parameter in self._parameters]
        candidate_number = self._random.randrange(prod(sizes))
        while True:
            indices, quotient = [], candidate_number
            for size in sizes:
                indices.append(quotient % size)
                quotient //= size
            if tuple(indices) not in self._seen:
                return {
                    parameter.name: parameter.domain[index]
                    for parameter, index in zip(self._parameters, indices)
                }
            candidate_number = (candidate_number + 1) % prod(sizes)

    def _make_distribution(self, parameter: Parameter) -> Any:
        """Return the optuna distribution of a parameter's indices: integers for an ordered domain, else categories."""
        last = len(parameter.domain) - 1
        if parameter.ordered:
            return self._optuna.distributions.IntDistribution(0, last)
        return self._optuna.distributions.CategoricalDistribution(range(last + 1))
