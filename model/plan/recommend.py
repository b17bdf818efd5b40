"""Instances for a load of requests: how many of each type keep a service level, and what they cost.

`nkw plan --recommend` calls `recommend`. A copy of the model decodes at most `batch` sequences together; a slot is the
room for one of them. While requests use all slots, a copy computes one request of each slot in a cycle:

    cycle = prompts * prompt + (generate - 1) * step           requests per second of a copy = batch / cycle

A request is interrupted by the prompts of the other slots, so the mean time between its tokens is (cycle - prompt) /
(generate - 1). Requests that arrive at random also wait for a slot, in the mean

    wait = cycle / (2 batch) * utilisation^(sqrt(2 (batch + 1)) - 1) / (1 - utilisation)

(Sakasegawa 1977, "An approximation formula L_q = alpha rho^beta / (1 - rho)", for `batch` servers of constant time and
Poisson arrivals). The number of copies is the least with which the mean times keep the service level.

Meshes of an instance are chosen as in the policy of plans: those with the fewest pipeline stages are ranked by
rooflines and collectives. Dry runs predict at most the best three. Meshes that keep the service level by predicted
times come first. Meshes of equal cores whose collectives take equal times are predicted once for all instances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain

from model.device import INSTANCES, Instance, chip, compute_collective_ns, find_instance, limit_lnc
from model.errors import ModelError
from model.layers import find_unsupported
from model.plan.dry import Time
from model.plan.memory import MeshShape, list_powers_of_two
from model.plan.meshes import Candidate, check_mesh
from model.plan.plan import Request, check_batch, choose_tokens
from model.plan.policy import PREDICTED, Choice, Question
from model.plan.predict import Predictor
from model.plan.prices import Price, find_price
from model.plan.roofline import LEAST, USUAL
from model.plan.service_level import ServiceLevel
from model.plan.sizes import ModelSizes
from model.plan.stack_records import STACKS
from model.plan.stacks import Served, Stack

MOST_SEQUENCES = 128
"""The most sequences that a copy decodes together if the request leaves them open: the rows of a tile of kernels."""

MOST_INSTANCES = 10**6
"""The most instances of one type that are offered for a load."""

_ABOVE_ROUNDING = 1 + 1e-12
"""A factor that keeps utilisations below 1 in float64."""

_PAYLOADS = tuple(4**exponent for exponent in range(5, 15))
"""Bytes of collectives whose times are compared between instances: 1 KiB to 256 MiB."""


@dataclass(frozen=True)
class Load:
    """Load of a service: requests per second, their prompt and generated tokens, and the service level to keep."""

    rate: float
    prompt: int
    generate: int
    level: ServiceLevel


@dataclass(frozen=True)
class Offer:
    """Instances of one type for a load, all with copies of the model on equal meshes.

    | field | meaning |
    |---|---|
    | `lnc` | physical cores of a rank |
    | `shape`, `copies` | the mesh of a copy, and the copies of an instance |
    | `batch` | sequences that a copy decodes together at most |
    | `first_token`, `step` | times of a prompt, and of a decode step of the batch, for a user of the serving stack |
    | `predicted` | whether the times are dry runs of kernels, and not rooflines |
    | `price` | price of one instance for an hour; None if it is not known |
    """

    load: Load
    instance: Instance
    lnc: int
    shape: MeshShape
    copies: int
    batch: int
    first_token: Served
    step: Served
    predicted: bool
    price: Price | None

    @property
    def prompt_ns(self) -> float:
        """Time in ns that a user waits for one prompt's pass, engine time included."""
        return self.first_token.time.program_ns

    @property
    def step_ns(self) -> float:
        """Time in ns that a user waits for a decode step of the batch, engine time included."""
        return self.step.time.program_ns

    @property
    def prompts(self) -> int:
        """Prompts that each expert-parallel group computes one after another in a cycle: its share of the batch."""
        return -(-self.batch // self.shape.ep)

    @property
    def cycle_ns(self) -> float:
        """Time in ns in which a copy computes one request of every slot."""
        return self.prompts * self.prompt_ns + (self.load.generate - 1) * self.step_ns

    @property
    def copy_requests_per_s(self) -> float:
        """Highest number of requests per second that one copy can compute."""
        return 1e9 * self.batch / self.cycle_ns

    @cached_property
    def needed_copies(self) -> int:
        """Fewest copies with which the mean times keep the service level.

        If the level cannot be kept even without waiting, the fewest copies whose capacity exceeds the load.
        """
        fewest = math.floor(self.load.rate / self.copy_requests_per_s * _ABOVE_ROUNDING) + 1
        if self._list_excesses(0.0):
            return fewest
        enough = fewest
        while self._list_excesses(self._compute_wait(enough)):
            enough *= 2
        short = enough // 2 if enough > fewest else fewest - 1
        while enough - short > 1:
            middle = (short + enough) // 2
            if self._list_excesses(self._compute_wait(middle)):
                short = middle
            else:
                enough = middle
        return enough

    @property
    def instances(self) -> int:
        """Number of instances that together have the needed copies."""
        return -(-self.needed_copies // self.copies)

    @property
    def chips(self) -> int:
        """Number of chips of all instances."""
        return self.instances * self.instance.chips

    @property
    def utilisation(self) -> float:
        """Load over the highest number of requests per second of all copies, from 0 to 1."""
        return self.load.rate / (self.instances * self.copies * self.copy_requests_per_s)

    @property
    def tokens_per_s(self) -> float:
        """Highest number of generated tokens per second of all copies together."""
        return self.instances * self.copies * self.copy_requests_per_s * self.load.generate

    @property
    def wait_ns(self) -> float:
        """Mean time in ns that a request waits for a free slot."""
        return self._compute_wait(self.instances * self.copies)

    @property
    def ttft_ns(self) -> float:
        """Mean time to first token in ns: the wait for a slot, and the prompt."""
        return self.wait_ns + self.prompt_ns

    @property
    def mean_itl_ns(self) -> float:
        """Mean time between tokens in ns while all slots are in use, with the interruptions by other requests' prompts.

        0 if requests generate one token.
        """
        steps = self.load.generate - 1
        return (self.cycle_ns - self.prompt_ns) / steps if steps else 0.0

    @property
    def e2e_ns(self) -> float:
        """Mean time of a request in ns, from its arrival to its last token."""
        return self._time_request(self.wait_ns).e2e_ns

    @property
    def excesses(self) -> dict[str, float]:
        """Ratio of time to limit, by name (ttft, itl, e2e), for each limit that the mean times exceed."""
        return self._list_excesses(self.wait_ns)

    @property
    def is_kept(self) -> bool:
        """Whether mean times keep the service level on at most `MOST_INSTANCES` instances."""
        return not self.excesses and self.instances <= MOST_INSTANCES

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all instances in dollars an hour; None if it is not known."""
        return None if self.price is None else self.instances * self.price.dollars_per_hour

    @property
    def dollars_per_million(self) -> tuple[float, float] | None:
        """Dollars per million prompt tokens, and per million tokens of decode steps; None if no price is known.

        A token costs its part of a copy's time at this load, so unused time makes tokens dearer.
        """
        if self.price is None:
            return None
        rate = self.price.dollars_per_hour / 3600e9 * 1e6 / (self.copies * self.batch * self.utilisation)
        return rate * self.prompts * self.prompt_ns / self.load.prompt, rate * self.step_ns

    def _compute_wait(self, copies: int) -> float:
        """Return the mean time in ns that a request waits for a slot if `copies` copies serve the load.

        Infinite if the copies cannot keep up with the load.
        """
        utilisation = self.load.rate / (copies * self.copy_requests_per_s)
        if utilisation >= 1:
            return math.inf
        queue = utilisation ** (math.sqrt(2 * (self.batch + 1)) - 1) / (1 - utilisation)
        return self.cycle_ns / (2 * self.batch) * queue

    def _list_excesses(self, wait_ns: float) -> dict[str, float]:
        """Return ratios of time to limit, by name, for each limit that requests exceed if they wait `wait_ns`."""
        return self.load.level.list_excesses(self._time_request(wait_ns))

    def _time_request(self, wait_ns: float) -> _Times:
        """Return the times of a request that waits `wait_ns` for a slot."""
        ttft_ns, itl_ns = wait_ns + self.prompt_ns, self.mean_itl_ns
        return _Times(ttft_ns, itl_ns, ttft_ns + (self.load.generate - 1) * itl_ns)


@dataclass(frozen=True)
class _Times:
    """Times of a request in ns, in the form that a service level compares."""

    ttft_ns: float
    mean_itl_ns: float
    e2e_ns: float


@dataclass(frozen=True)
class InstanceOffers:
    """Offers of one instance type, the best mesh and batch first; if there are none, `refusal` is the reason."""

    instance: Instance
    offers: tuple[Offer, ...]
    refusal: str = ""


@dataclass(frozen=True)
class Recommendation:
    """Offers of several instance types for a load, with the instance types in the order of the request."""

    model: ModelSizes
    load: Load
    dtype: str
    stack: Stack
    rows: tuple[InstanceOffers, ...]

    @property
    def best(self) -> tuple[Offer, ...]:
        """Best offer of each instance type that holds the model, in the order of `_rank_by_price`.

        Offers that keep the service level come first, the cheapest of them at the front.
        """
        return tuple(sorted((row.offers[0] for row in self.rows if row.offers), key=_rank_by_price))

    @property
    def cheapest(self) -> Offer | None:
        """Offer with the lowest price; None if no offer with a known price keeps the service level."""
        priced = (offer for offer in self.best if offer.is_kept and offer.price is not None)
        return min(priced, key=_rank_by_price, default=None)

    @property
    def smallest(self) -> Offer | None:
        """Offer with the fewest chips; None if no offer keeps the service level."""
        kept = (offer for offer in self.best if offer.is_kept)
        return min(kept, key=lambda offer: (offer.chips, *_rank_by_price(offer)), default=None)

    @property
    def chosen(self) -> Offer | None:
        """Cheapest offer, or the one with the fewest chips if no price is known; None if none keeps the level."""
        return self.cheapest or self.smallest

    @property
    def nearest(self) -> Offer | None:
        """Offer with the smallest excess over a limit of the service level; None if no instance holds the model."""
        offers = (offer for row in self.rows for offer in row.offers)
        return min(offers, key=_measure_excess, default=None)

    @property
    def frontier(self) -> tuple[Offer, ...]:
        """Offers that keep the service level and that no other one beats in price and in time of a request.

        The cheapest comes first. Offers without a price are left out; if no offer has one, the number of chips replaces
        it.
        """
        kept = [offer for row in self.rows for offer in row.offers if offer.is_kept]
        if self.cheapest is not None:
            kept = [offer for offer in kept if offer.price is not None]
        frontier: list[Offer] = []
        for offer in sorted(kept, key=lambda offer: (offer.dollars_per_hour or offer.chips, offer.e2e_ns)):
            if not frontier or offer.e2e_ns < frontier[-1].e2e_ns:
                frontier.append(offer)
        return tuple(frontier)


def recommend(
    model: ModelSizes,
    request: Request,
    names: Sequence[str],
    rate: float,
    batch: int | None,
    report_progress: Callable[[str], None],
) -> Recommendation:
    """Return the offers of instance types for a load.

    Args:
        model: The model.
        request: The options of a plan; `instance` and `batch` are not read.
        names: Instance types that are compared; all known ones if empty.
        rate: Requests per second.
        batch: Sequences that a copy decodes together; None tries powers of two up to `MOST_SEQUENCES`.
        report_progress: Called with the name of each instance when its prediction begins.

    Raises:
        ModelError: An instance is unknown, or options exclude one another or exceed a limit.
    """
    instances = [find_instance(name) for name in dict.fromkeys(names)] or list(INSTANCES.values())
    if request.accelerator is not None:
        raise ModelError("--recommend compares instances: leave --accelerator out")
    if request.sp:
        raise ModelError(
            "--recommend compares meshes whose ranks do not divide the rows of prompts: leave --sp out"
        )
    if request.price is not None and len(instances) > 1:
        raise ModelError(
            f"--price is that of one instance, and {len(instances)} are compared: give --prices FILE instead"
        )
    check_batch(batch or 1)
    dtype = request.dtype or model.config.dtype or "bfloat16"
    prompt, generate = choose_tokens(model, request)
    load = Load(rate, prompt, generate, request.level)
    comparison = _Comparison(
        model, replace(request, batch=batch or MOST_SEQUENCES), dtype, load, batch is None
    )
    rows = []
    for number, instance in enumerate(instances, 1):
        report_progress(f"{instance.name}, {number} of {len(instances)}")
        rows.append(comparison.compare(instance))
    return Recommendation(model, load, dtype, STACKS[request.stack], tuple(rows))


class _Comparison:
    """Comparison of instances for one load, in which equal meshes are predicted only once.

    With `fewer`, batches are powers of two up to that of the request; otherwise only that batch is compared.
    """

    def __init__(self, model: ModelSizes, request: Request, dtype: str, load: Load, fewer: bool) -> None:
        self._model, self._request, self._dtype, self._load, self._fewer = model, request, dtype, load, fewer
        self._stack = STACKS[request.stack]
        self._padded = self._stack.pad_prompt(load.prompt, load.prompt + load.generate)
        self._predictors: dict[object, Predictor | None] = {}
        self._first_tokens: dict[object, Served] = {}
        self._steps: dict[tuple[object, int], Served] = {}

    def compare(self, instance: Instance) -> InstanceOffers:
        """Return the offers of an instance, the best first.

        If the instance cannot have the requested mesh or does not hold the model, there are no offers but a reason.
        """
        request, load = self._request, self._load
        model = self._model.on_chip(instance.target)
        lnc = limit_lnc(instance.target, request.lnc, largest=True)
        sizes = request.tp, request.pp, request.ep
        if request.tp is not None:
            sizes = request.tp, request.pp or 1, request.ep or 1
        try:
            check_mesh(model, *sizes, instance, lnc)
        except ModelError as refusal:
            return InstanceOffers(instance, (), str(refusal))
        choice = Choice(
            Question(
                *(model, instance, self._dtype, load.prompt, load.generate, request.batch, load.level),
                fewer=self._fewer,
                lnc=lnc,
            )
        )
        ranked = choice.estimator.rank(*sizes)
        holding = [mesh for mesh in ranked if mesh.step is not None]
        if not holding:
            return InstanceOffers(instance, (), _describe_lack(ranked, instance, lnc))
        if request.tp is None:
            # Ranks without heads are for models that no fewer ranks hold.
            most = model.config.most_busy_ranks
            holding = [mesh for mesh in holding if mesh.shape.tp <= most] or holding
        # Stages add memory to a copy and no speed to its steps.
        stages = min(mesh.shape.pp for mesh in holding)
        price = find_price(instance, request.price, request.prices)
        meshes = [
            sorted(self._estimate(choice, mesh, instance, lnc, price), key=_rank_in_instance)
            for mesh in holding
            if mesh.shape.pp == stages
        ]
        return InstanceOffers(instance, self._predict_best(choice, meshes))

    def _predict_best(self, choice: Choice, meshes: Sequence[Sequence[Offer]]) -> tuple[Offer, ...]:
        """Return the offers of the best meshes with times by dry runs, the best first.

        Returns the estimated offers of all meshes if no kernel computes the model. Otherwise predicts at most
        `PREDICTED` meshes, in the order of their estimates. A mesh is left out if it is unlikely to need fewer
        instances than the best prediction so far. For that test, its estimates are multiplied by the least ratio of
        prediction to estimate so far.

        Args:
            choice: The meshes of the instance.
            meshes: Estimated offers of each mesh, the best first.
        """
        pairs: list[tuple[Offer, Offer]] = []
        predicted: list[Offer] = []
        for estimates in sorted(meshes, key=lambda offers: _rank_in_instance(offers[0]))[:PREDICTED]:
            if predicted:
                likely = min(_rank_in_instance(_lengthen(offer, pairs)) for offer in estimates)
                if _rank_in_instance(predicted[0])[:3] <= likely[:3]:
                    continue
            for estimate in [offer for offer in estimates if offer.is_kept] or estimates:
                prediction = self._predict(choice, estimate)
                if prediction is None:
                    return tuple(sorted(chain.from_iterable(meshes), key=_rank_in_instance))
                pairs.append((prediction, estimate))
            predicted = sorted((prediction for prediction, _ in pairs), key=_rank_in_instance)
        return tuple(predicted)

    def _list_batches(self, mesh: Candidate) -> list[int]:
        """Return the batch sizes to offer on a mesh.

        With `fewer`, these are the powers of two up to the mesh's batch that give every expert-parallel group a
        sequence. Otherwise it is the mesh's batch alone.
        """
        if not self._fewer:
            return [mesh.batch]
        return [batch for batch in list_powers_of_two(mesh.batch) if batch >= mesh.shape.ep] or [mesh.batch]

    def _estimate(
        self, choice: Choice, mesh: Candidate, instance: Instance, lnc: int, price: Price | None
    ) -> Iterator[Offer]:
        """Yield an offer for each batch size of a mesh, with times from rooflines and collectives."""
        estimator, stack = choice.estimator, self._stack
        prompt = Time.exact(estimator.estimate_prompt(mesh.shape, self._padded))
        first_token = stack.serve_roofline(self._widen(prompt), 1)
        for batch in self._list_batches(mesh):
            step = self._widen(Time.exact(estimator.estimate_step(mesh.shape, batch).step_ns))
            yield Offer(
                *(self._load, instance, lnc, mesh.shape, mesh.copies, batch, first_token),
                *(stack.serve_step(step, batch), False, price),
            )

    def _widen(self, roofline: Time) -> Time:
        """Return the time of a roofline in the three readings that plans use.

        For a model with kernels, returns the roofline unchanged. For other models, the program and serial readings are
        at the usual and the least share of the bandwidth. That share stands for both peaks, because the roofline is
        already the larger of two times.
        """
        if not find_unsupported(self._model.config):
            return roofline
        bound_ns = roofline.dataflow_ns
        return Time(bound_ns, bound_ns / USUAL.bytes, bound_ns / LEAST.bytes)

    def _predict(self, choice: Choice, offer: Offer) -> Offer | None:
        """Return an offer with times by dry runs; None if no kernel computes the model.

        Times are kept by mesh and batch for equal meshes of other instances.
        """
        shape, batch = offer.shape, offer.batch
        key = _describe_ranks(offer.instance, offer.lnc, shape)
        if key not in self._predictors:
            self._predictors[key] = choice.find_predictor(shape)
        predictor = self._predictors[key]
        if predictor is None:
            return None
        if key not in self._first_tokens:
            self._first_tokens[key] = self._stack.serve_prompts(predictor.predict_prompts(self._padded), 1)
        if (key, batch) not in self._steps:
            self._steps[key, batch] = self._stack.serve_step(predictor.predict_step(batch).time, batch)
        first_token, step = self._first_tokens[key], self._steps[key, batch]
        return replace(offer, first_token=first_token, step=step, predicted=True)


_OF_CHIP = ("name", "chip", "neuronlink_", "collective_", "provenance")
"""Beginnings of the names of a record's fields that change no time of a core but through collectives."""


def _describe_ranks(instance: Instance, lnc: int, shape: MeshShape) -> tuple[object, ...]:
    """Return a key that is equal for meshes whose predicted times are equal: cores, LNC, shape, and collective times.

    Collectives may be between the ranks of a group, between groups, and between stages.
    """
    cores, record = chip(instance.target), chip(instance.name, lnc)
    numbers = [getattr(cores, field.name) for field in fields(cores) if not field.name.startswith(_OF_CHIP)]
    sizes = {shape.tp, shape.tp * shape.ep, 2 * shape.tp * shape.ep if shape.pp > 1 else 1} - {1}
    collectives = tuple(
        compute_collective_ns(record, size, payload, all_reduces)
        for size in sorted(sizes)
        for payload in _PAYLOADS
        for all_reduces in (False, True)
    )
    return lnc, shape, repr(numbers), collectives


def _describe_lack(ranked: Iterable[Candidate], instance: Instance, lnc: int) -> str:
    """Return a text with the memory that the smallest mesh needs on a rank, and the memory that a rank has."""
    core_bytes = lnc * chip(instance.target).hbm_bytes_per_core
    needed_bytes = min(mesh.needed_bytes for mesh in ranked)
    return f"does not fit: {needed_bytes / 1e9:,.2f} > {core_bytes / 1e9:,.2f} GB"


def _lengthen(estimate: Offer, pairs: Sequence[tuple[Offer, Offer]]) -> Offer:
    """Return an estimated offer with its times multiplied by the least ratios of prediction to estimate.

    Args:
        estimate: the offer.
        pairs: pairs of a predicted offer and its estimate.
    """
    prompt_ratio = min(prediction.prompt_ns / estimate.prompt_ns for prediction, estimate in pairs)
    step_ratio = min(prediction.step_ns / estimate.step_ns for prediction, estimate in pairs)
    return replace(
        estimate,
        first_token=Served(estimate.first_token.time * prompt_ratio, 0.0),
        step=Served(estimate.step.time * step_ratio, 0.0),
    )


def _measure_excess(offer: Offer) -> float:
    """Return the largest ratio of a time to its limit, 0 if all are kept; infinite above `MOST_INSTANCES` instances."""
    if offer.instances > MOST_INSTANCES:
        return math.inf
    return max(offer.excesses.values(), default=0.0)


def _rank_in_instance(offer: Offer) -> tuple[bool, float, int, float]:
    """Return the sort key for offers of one instance type.

    Offers that keep the service level come first, then smaller excesses, fewer instances, and shorter requests.
    """
    return not offer.is_kept, _measure_excess(offer), offer.instances, offer.e2e_ns


def _rank_by_price(offer: Offer) -> tuple[float, ...]:
    """Return the sort key for offers of different instance types.

    Offers that keep the service level come first, then smaller excesses, lower prices (unknown ones last), fewer chips,
    and shorter requests.
    """
    dollars = offer.dollars_per_hour
    return (
        *(not offer.is_kept, _measure_excess(offer), dollars is None, dollars or 0.0),
        *(offer.chips, offer.e2e_ns),
    )
