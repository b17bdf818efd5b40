"""How a model is deployed: ranks and replicas on an instance, pages of the cache, and the limits of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from model.device import Instance, chip, find_instance
from model.engine import GroupScheduler, Scheduler, SchedulerOptions
from model.engine.bucket_sizes import BucketLimits
from model.engine.buckets import Buckets
from model.engine.speculation import NO_RECURRENT_DRAFTS
from model.errors import ModelError
from model.layers import unsupported
from model.layers.paged import STATES, CacheGroup
from model.mesh import check_expert_groups, routed_experts
from model.plan.memory import (
    Demand,
    PageKind,
    allocate_pages,
    compute_footprint,
    find_smallest_tp,
    list_page_kinds,
    list_possible_tp,
)
from model.plan.predict import Predictor
from model.plan.sizes import ModelSizes
from model.state import INTERVAL, PagePool, SlotPool, WindowPool
from model.traffic.clock import PredictedClock
from model.traffic.drafts import Drafts, Speculation
from model.traffic.handover import SeparateService
from model.traffic.link import Link, link_between
from model.traffic.record import Record
from model.traffic.replica import Replica
from model.traffic.service import Service
from model.traffic.workload import Workload

LIMITS = SchedulerOptions()


@dataclass(frozen=True)
class Setup:
    """The options of a deployment; None leaves the choice to the planner.

    `max_model_len` are positions of a request, `mean_len` those of requests on average, which divide the memory among
    the kinds of pages; as many where it is None. Steps are rounded up to `sizes`, by default powers of two; with
    `few_buckets` to every second size only, the largest among them. `prefill_replicas` of the replicas compute prompts,
    and the others decode; with 0 each does both. A replica is `ep` groups of `tp` ranks, which divide routed experts;
    the limits of a step hold for each. `speculation` goes with the speculative_tokens of `options`.
    """

    instance: str
    dtype: str
    max_model_len: int
    tp: int | None = None
    replicas: int | None = None
    block_size: int = 16
    options: SchedulerOptions = LIMITS
    few_buckets: bool = False
    mean_len: int | None = None
    sizes: Buckets | None = None
    prefill_replicas: int = 0
    speculation: Speculation | None = None
    ep: int = 1

    @property
    def bucket_limits(self) -> BucketLimits:
        """What steps may ask for."""
        own = self.options
        return BucketLimits(
            own.max_num_seqs, own.max_num_batched_tokens, self.max_model_len, own.speculative_tokens
        )

    def whole_prompts(self) -> Setup:
        """The same without chunks of prompts, with steps that take the longest prompt at once."""
        most = max(self.options.max_num_batched_tokens, self.max_model_len)
        options = replace(self.options, chunked_prefill=False, max_num_batched_tokens=most)
        return replace(self, options=options, sizes=None)

    def without_drafts(self) -> Setup:
        """The same without speculation."""
        options = replace(self.options, speculative_tokens=0)
        return replace(self, options=options, speculation=None, sizes=None)

    @property
    def buckets(self) -> Buckets:
        """The sizes of steps."""
        sizes = self.sizes or self.bucket_limits.powers
        if not self.few_buckets:
            return sizes
        few = [each[::-2][::-1] for each in (sizes.sequences, sizes.tokens, sizes.context)]
        return Buckets(few[0], few[1], few[2], sizes.drafts, sizes.mixes)


class Deployment:
    """Replicas of one model, and the clock of their steps."""

    def __init__(self, model: ModelSizes, setup: Setup, like: Deployment | None = None) -> None:
        """Predictions of another deployment `like` this one, of the same instance, dtype and lengths, are taken over.

        ModelError for what the model, the instance or the options do not allow.
        """
        models = [model]
        if setup.speculation is not None and setup.speculation.model is not None:
            models.append(setup.speculation.model)
        instance = find_instance(setup.instance)
        record, cores, length = chip(instance.target), instance.physical_cores, setup.max_model_len
        for each in models:
            _check_model(each, length)
        models = [replace(each, config=each.config.fix_rope_length(length)) for each in models]
        model = models[0]
        if len(models) > 1 and model.config.vocab_size != models[1].config.vocab_size:
            raise ModelError(
                f"the draft model has {models[1].config.vocab_size} tokens, the model {model.config.vocab_size}"
            )
        check_expert_groups(model.config, setup.ep)
        tp = setup.tp or _fewest(model, setup, max(1, cores // setup.ep), record.hbm_bytes_per_core)
        if model.config.cross_positions:
            setup = _of_speech(setup, len(models))
        self.replicas = _replicas(models, setup, instance, tp)
        self.setup, self.instance, self.tp = replace(setup, tp=tp), instance, tp
        # The instance's own name, so that collectives go over its links.
        known = like.predictors if like is not None and like.tp == tp else []
        self.predictors: list[Predictor] = known[: len(models)] + [
            Predictor(
                *(each.config, instance.name, tp, setup.dtype, length), expert=expert_groups(each, setup)
            )
            for each in models[len(known) :]
        ]
        self.kinds = _kinds(models, self.setup, record.hbm_bytes_per_core)
        self._check_room(length)
        pages: dict[CacheGroup, int] = {
            STATES if kind.recurrent else kind.window: kind.pages for kind in self.kinds
        }
        self.clock, *others = (
            PredictedClock(
                predictor,
                setup.buckets.for_model(model.config, predictor.on_pages(pages, setup.block_size)),
                tuple(pages),
                setup.ep,
            )
            for model, predictor in zip(models, self.predictors)
        )
        self.draft_clock: PredictedClock | None = others[0] if others else None
        self.link: Link | None = link_between(instance, record) if setup.prefill_replicas else None

    @property
    def pages(self) -> int:
        """Pages of all kinds and slots, of one replica."""
        return self.setup.ep * sum(kind.pages for kind in self.kinds)

    @property
    def takes_speech(self) -> bool:
        """Whether requests are windows of speech."""
        return self.clock.takes_speech

    @property
    def ranks(self) -> str:
        """The ranks of a replica, in words."""
        return f"tp {self.tp}, ep {self.setup.ep}" if self.setup.ep > 1 else f"tp {self.tp}"

    def _check_room(self, length: int) -> None:
        """ModelError where a request of a length alone does not fit."""
        setup, left = self.setup, f"{self.ranks} on {self.instance.name} leaves"
        for kind, pool in zip(self.kinds, self._pools(length)):
            needed = pool.most_pages(length, min(length, setup.options.max_num_batched_tokens))
            if kind.pages < needed:
                seen = "" if kind.window is None else f" of layers that see {kind.window:,} of them"
                raise ModelError(
                    f"{left} {kind.pages:,} pages of {setup.block_size} positions{seen} beside the weights; a request "
                    f"of {length:,} tokens takes {needed:,}; more ranks leave more"
                )
        if any(kind.recurrent and not kind.pages for kind in self.kinds):
            what = "window" if setup.options.prompts_at_once else "states"
            raise ModelError(
                f"{left} no slot for the {what} of a sequence beside the weights; more ranks leave more"
            )

    def _pools(self, positions: int) -> list[PagePool]:
        """Pools of pages, of no more than so many positions fill."""
        size = self.setup.block_size
        most = -(-positions // size)
        return [
            PagePool(max(1, min(kind.pages, most)), size, kind.window)
            for kind in self.kinds
            if not kind.recurrent
        ]

    def _slots(self, workload: Workload) -> SlotPool | None:
        """Slots of states, no more than all requests take for themselves and their snapshots."""
        size = self.setup.block_size
        make = WindowPool if self.takes_speech else SlotPool
        most = sum(2 + query.positions // INTERVAL for query in workload.queries)
        return next((make(min(kind.pages, most), size) for kind in self.kinds if kind.recurrent), None)

    @property
    def limits(self) -> SchedulerOptions:
        """The limits of a step."""
        return self.setup.options

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts of steps are rooflines."""
        clocks = (self.clock, self.draft_clock) if self.draft_clock else (self.clock,)
        return tuple(dict.fromkeys(refusal for clock in clocks for refusal in clock.refusals))

    @property
    def units(self) -> int:
        """Equal groups of replicas: single ones, or as few as keep the share that computes prompts."""
        return (
            gcd(self.replicas, self.setup.prefill_replicas) if self.setup.prefill_replicas else self.replicas
        )

    @property
    def decoding_of_unit(self) -> int:
        """Replicas of a unit that decode."""
        return (self.replicas - self.setup.prefill_replicas) // self.units

    def serve(self, workload: Workload) -> list[Record]:
        """What the replicas do with a workload whose requests go to each of them in turn.

        Where some compute prompts, their records come first.
        """
        if self.setup.prefill_replicas:
            return self._separate(workload, self.setup.prefill_replicas, self.replicas)
        shares = (workload.of_replica(number, self.replicas) for number in range(self.replicas))
        return [record for each in shares if each is not None for record in self.serve_unit(each)]

    def serve_unit(self, workload: Workload) -> list[Record]:
        """What one of the units does with its own workload."""
        if self.setup.prefill_replicas:
            units = self.units
            return self._separate(workload, self.setup.prefill_replicas // units, self.replicas // units)
        return [Service(self._replica(workload)).run(workload)]

    def _separate(self, workload: Workload, prompts: int, replicas: int) -> list[Record]:
        # A prompt's last token may be alone in its step, where it is not to be given drafts.
        options = replace(self.setup.options, speculative_tokens=0)
        own = [
            self._replica(workload, number, options if number < prompts else None)
            for number in range(replicas)
        ]
        link = self.link
        assert link is not None, "replicas of their own compute prompts"

        def transfer_ns(pages: Sequence[int]) -> int:
            return link.time_ns(sum(count * kind.page_bytes for count, kind in zip(pages, self.kinds)))

        return SeparateService(own[:prompts], own[prompts:], transfer_ns).run(workload)

    def _replica(
        self, workload: Workload, number: int = 0, options: SchedulerOptions | None = None
    ) -> Replica:
        # More pages than all requests together fill would never be taken.
        size, speculation = self.setup.block_size, self.setup.speculation
        room = self.setup.options.speculative_tokens
        most = sum(-(-(query.positions + room) // size) * size for query in workload.queries)
        drafts = None if speculation is None else Drafts(speculation.outcomes, self.draft_clock, number)
        groups = [
            Scheduler(self._pools(most), options or self.setup.options, self._slots(workload))
            for _ in range(self.setup.ep)
        ]
        return Replica(groups[0] if len(groups) == 1 else GroupScheduler(groups), self.clock, drafts)


def expert_groups(model: ModelSizes, setup: Setup) -> int:
    """The groups that divide the experts of a model; 1 of a draft model without experts, which each computes alone."""
    return setup.ep if routed_experts(model.config) else 1


def _check_model(model: ModelSizes, length: int) -> None:
    """ModelError for a model whose steps cannot be predicted, or that does not take requests of a length."""
    missing = unsupported(model.config)
    if missing:
        raise ModelError(
            f"no kernel of this project computes {' or '.join(missing)}, so traffic has no predicted steps; "
            "nkw plan gives the rooflines"
        )
    longest = model.config.max_position_embeddings
    if longest is not None and length > longest:
        raise ModelError(f"requests of up to {length:,} tokens exceed the model's context, {longest:,}")


def _of_speech(setup: Setup, models: int) -> Setup:
    """With the limits of steps that encode windows; ModelError for drafts, which are of texts."""
    if setup.options.speculative_tokens or models > 1:
        raise ModelError("drafts are for texts; this model transcribes speech")
    return replace(setup, options=setup.options.of_windows(setup.max_model_len))


def _replicas(models: list[ModelSizes], setup: Setup, instance: Instance, tp: int) -> int:
    """How many copies of the model there are; ModelError for more ranks than the instance or a model takes."""
    cores, prompts = instance.physical_cores, setup.prefill_replicas
    ranks = tp * setup.ep
    if ranks > cores:
        raise ModelError(f"{ranks} ranks on {instance.name}, which has {cores} cores")
    for each in models:
        refusal = each.config.refusal(tp)
        if refusal is not None:
            raise ModelError(refusal)
    replicas = setup.replicas or cores // ranks
    if replicas * ranks > cores:
        raise ModelError(
            f"{replicas} replicas of {ranks} ranks take {replicas * ranks} cores; {instance.name} has {cores}"
        )
    if prompts and prompts >= replicas:
        raise ModelError(
            f"{prompts} of {replicas} replicas compute prompts, which leaves none to decode; give fewer "
            "--prefill-replicas, or more --replicas"
        )
    if prompts and not setup.options.continuous:
        raise ModelError("static batches take no requests whose prompts were computed elsewhere")
    return replicas


def _kinds(models: list[ModelSizes], setup: Setup, core_bytes: int) -> list[PageKind]:
    """The pages and slots that fill what the weights of all models leave; a page of a kind is one of each model's."""
    tp, length, own = setup.tp or 1, setup.max_model_len, setup.options
    of_models = [list_page_kinds(each, setup.dtype, tp, setup.block_size, length) for each in models]
    kinds = of_models[0]
    for others in of_models[1:]:
        if [each.window for each in others] != [each.window for each in kinds]:
            raise ModelError("the layers of the draft model see other windows than those of the model")
        kinds = [replace(one, page_bytes=one.page_bytes + two.page_bytes) for one, two in zip(kinds, others)]
    weight_bytes = sum(compute_footprint(each, setup.dtype, tp, 0, setup.ep).weight_bytes for each in models)
    state_bytes = [each.page_bytes(tp, setup.dtype)[STATES] for each in models]
    if any(state_bytes[1:]):
        raise ModelError(NO_RECURRENT_DRAFTS)
    if state_bytes[0]:
        kinds.append(PageKind(None, state_bytes[0], recurrent=True))
    mean = setup.mean_len or length
    slots = 2 + mean // INTERVAL if own.prefix_caching else 1  # a window has one for all continuations
    demand = Demand(own.max_num_seqs, mean, length, own.max_num_batched_tokens, slots)
    return allocate_pages(kinds, max(0, core_bytes - weight_bytes), setup.block_size, demand)


def _fewest(model: ModelSizes, setup: Setup, cores: int, core_bytes: int) -> int:
    """The fewest ranks that hold as many sequences as run at most; else one sequence; else the most there are."""
    length = setup.max_model_len
    for sequences in (setup.options.max_num_seqs, 1):
        tp = find_smallest_tp(model, setup.dtype, length, sequences, cores, core_bytes, setup.ep)
        if tp is not None:
            return tp
    return list_possible_tp(model, cores)[-1]
