"""Deployment of a model for `nkw traffic`: ranks and replicas on an instance, pages of caches, limits of a step."""

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
from model.layers import find_unsupported
from model.layers.paged import STATES
from model.mesh import check_expert_groups, collect_expert_counts
from model.plan.memory import (
    Demand,
    PageKind,
    allocate_pages,
    compute_footprint,
    list_page_kinds,
)
from model.plan.meshes import describe_cores
from model.plan.predict import Predictor
from model.plan.sizes import ModelSizes
from model.plan.stack_records import STACKS, THIS
from model.plan.stacks import Padding
from model.state import INTERVAL, PagePool, SlotPool, WindowPool
from model.traffic.clock import PredictedClock
from model.traffic.drafts import DraftProposer, Speculation
from model.traffic.handover import SeparateService
from model.traffic.link import Link, find_slowest_link
from model.traffic.record import Record
from model.traffic.replica import Replica
from model.traffic.service import serve
from model.traffic.workload import Workload

LIMITS = SchedulerOptions()

_LENGTHS = 128
"""Lengths of caches are in multiples of the positions of a tile."""


@dataclass(frozen=True)
class Setup:
    """Options of a deployment; `Deployment` chooses `replicas` and `sizes` where they are None.

    | field | meaning |
    |---|---|
    | `max_model_len` | most positions of a request, its prompt and new tokens together |
    | `mean_len` | mean positions of a request, by which memory is divided among page kinds; None: `max_model_len` |
    | `tp`, `ep` | a replica is `ep` groups of `tp` ranks, which divide routed experts |
    | `options` | limits of a step, for each group |
    | `sizes` | sizes to which steps are rounded up; by default powers of two |
    | `few_buckets` | rounds steps up to every second size only; the largest stays |
    | `prefill_replicas` | replicas that only compute prompts, while the others decode; with 0 each does both |
    | `lnc` | physical cores of a rank |
    | `speculation` | outcomes of the speculative_tokens of `options` |
    | `stack` | name of the serving stack; if it pads prompts and caches to its own lengths, these replace the sizes |
    """

    instance: str
    dtype: str
    max_model_len: int
    tp: int = 1
    replicas: int | None = None
    block_size: int = 16
    options: SchedulerOptions = LIMITS
    few_buckets: bool = False
    mean_len: int | None = None
    sizes: Buckets | None = None
    prefill_replicas: int = 0
    speculation: Speculation | None = None
    ep: int = 1
    lnc: int = 1
    stack: str = THIS.name

    @property
    def bucket_limits(self) -> BucketLimits:
        """Largest number of sequences, tokens and positions of a step, and its number of draft tokens."""
        options = self.options
        return BucketLimits(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            self.max_model_len,
            options.speculative_tokens,
        )

    def with_whole_prompts(self) -> Setup:
        """Return a copy of the setup without chunked prefill, whose steps take at least `max_model_len` tokens.

        `sizes` of the copy is None.
        """
        tokens = max(self.options.max_num_batched_tokens, self.max_model_len)
        options = replace(self.options, chunked_prefill=False, max_num_batched_tokens=tokens)
        return replace(self, options=options, sizes=None)

    def without_drafts(self) -> Setup:
        """Return a copy of the setup without speculative tokens and draft model; `sizes` of the copy is None."""
        options = replace(self.options, speculative_tokens=0)
        return replace(self, options=options, speculation=None, sizes=None)

    @property
    def buckets(self) -> Buckets:
        """Sizes to which steps are rounded up: `sizes`, or powers of two; every second one with `few_buckets`."""
        sizes = self.sizes or self._pad_lengths(self.bucket_limits.powers)
        if not self.few_buckets:
            return sizes
        sequences, tokens, context = (
            axis[::-2][::-1] for axis in (sizes.sequences, sizes.tokens, sizes.context)
        )
        return replace(sizes, sequences=sequences, tokens=tokens, context=context)

    def _pad_lengths(self, sizes: Buckets) -> Buckets:
        """Return `sizes` with the prompt and cache lengths to which the serving stack pads.

        A stack that pads to pages keeps `sizes`. A stack that pads to lengths computes prompts and decodes in separate
        launches.
        """
        stack = STACKS[self.stack]
        if stack.cache_padding.value is Padding.pages:
            return sizes
        longest = -(-(self.max_model_len + self.options.speculative_tokens) // _LENGTHS) * _LENGTHS
        lengths = [min(size, longest) for size in sizes.context]
        tokens, context = (
            tuple(sorted({pad(length, longest) for length in lengths}))
            for pad in (stack.pad_prompt, stack.pad_cache)
        )
        return replace(sizes, tokens=tokens, context=context, mixes=False)


class Deployment:
    """Replicas of one model on an instance, the pages of their caches, and the clocks of their steps.

    `clocks` and `predictors` have an entry for the model and, if there is one, an entry for its draft model.
    `page_kinds` are the pages of one group of ranks. `link` is the link between replicas, or None unless some only
    compute prompts.
    """

    def __init__(self, model: ModelSizes, setup: Setup, base: Deployment | None = None) -> None:
        """Place the replicas on the instance, and divide its memory into pages.

        Args:
            model: The model.
            setup: The options.
            base: A deployment with the same instance, dtype and lengths, whose predicted times are reused if its tp is
                the same.

        Raises:
            ModelError: If the model, the instance or the options do not allow the deployment.
        """
        models = [model]
        if setup.speculation is not None and setup.speculation.model is not None:
            models.append(setup.speculation.model)
        instance = find_instance(setup.instance)
        record, length, tp = chip(instance.target), setup.max_model_len, setup.tp
        for model in models:
            _check_model(model, length)
        models = [replace(model, config=model.config.fix_rope_length(length)) for model in models]
        model = models[0]
        if len(models) > 1 and model.config.vocab_size != models[1].config.vocab_size:
            raise ModelError(
                f"the draft model has a vocabulary of {models[1].config.vocab_size} tokens, the model one of "
                f"{model.config.vocab_size}: give a draft model with the same vocabulary"
            )
        check_expert_groups(model.config, setup.ep)
        if model.config.cross_positions:
            if setup.options.speculative_tokens or len(models) > 1:
                raise ModelError(
                    "drafts are for texts; this model transcribes speech: leave --speculative-tokens and --draft-model "
                    "out"
                )
            setup = replace(setup, options=setup.options.for_windows(length))
        self.replicas = _count_replicas(models, setup, instance, tp)
        self.setup, self.instance, self.tp = setup, instance, tp
        known = base.predictors if base is not None and base.tp == tp else []
        # The instance's own name, so that collectives go over its links. Each group computes a draft model without
        # experts alone.
        self.predictors: list[Predictor] = known[: len(models)] + [
            Predictor(
                *(model.config, instance.name, tp, setup.dtype, length),
                expert=setup.ep if collect_expert_counts(model.config) else 1,
                lnc=setup.lnc,
                cache_dtype=model.cache_dtype,
            )
            for model in models[len(known) :]
        ]
        self.page_kinds = _size_pages(models, self.setup, setup.lnc * record.hbm_bytes_per_core)
        self._check_capacity(length)
        pages = {
            STATES if page_kind.recurrent else page_kind.window: page_kind.pages
            for page_kind in self.page_kinds
        }
        self.clocks = [
            PredictedClock(
                predictor,
                setup.buckets.for_model(model.config, predictor.make_paged_step(pages, setup.block_size)),
                tuple(pages),
                setup.ep,
                # The host's time of a draft model's passes is part of the step that verifies the drafts.
                STACKS[setup.stack] if number == 0 else None,
            )
            for number, (model, predictor) in enumerate(zip(models, self.predictors))
        ]
        self.link: Link | None = None
        if setup.prefill_replicas:
            self.link = find_slowest_link(instance, record, setup.lnc)

    @property
    def pages(self) -> int:
        """Number of pages of all kinds, and of slots, of one replica: those of all its groups of ranks together."""
        return self.setup.ep * sum(page_kind.pages for page_kind in self.page_kinds)

    @property
    def clock(self) -> PredictedClock:
        """Clock of the model's steps, without those of a draft model."""
        return self.clocks[0]

    @property
    def ranks(self) -> str:
        """Ranks of a replica as text, such as "tp 4, ep 2 (LNC 2)"."""
        groups = f", ep {self.setup.ep}" if self.setup.ep > 1 else ""
        logical = f" (LNC {self.setup.lnc})" if self.setup.lnc > 1 else ""
        return f"tp {self.tp}{groups}{logical}"

    def _check_capacity(self, length: int) -> None:
        """Check that a replica without other requests has pages and slots for a request of `length` positions.

        Raises:
            ModelError: It has not.
        """
        setup, prefix = self.setup, f"{self.ranks} on {self.instance.name} leaves"
        for page_kind, pool in zip(self.page_kinds, self._make_pools(length)):
            needed = pool.count_most_pages(length, min(length, setup.options.max_num_batched_tokens))
            if page_kind.pages < needed:
                layers = (
                    "" if page_kind.window is None else f" of layers that see {page_kind.window:,} of them"
                )
                raise ModelError(
                    f"{prefix} {page_kind.pages:,} pages of {setup.block_size} positions{layers} beside the weights; a "
                    f"request of {length:,} tokens takes {needed:,}; more ranks leave more"
                )
        if any(page_kind.recurrent and not page_kind.pages for page_kind in self.page_kinds):
            content = "window" if setup.options.prompts_at_once else "states"
            raise ModelError(
                f"{prefix} no slot for the {content} of a sequence beside the weights; more ranks leave more"
            )

    def _make_pools(self, positions: int) -> list[PagePool]:
        """Return a page pool for each page kind without slots, of at most the pages that `positions` positions fill."""
        size = self.setup.block_size
        limit = -(-positions // size)
        return [
            PagePool(max(1, min(page_kind.pages, limit)), size, page_kind.window)
            for page_kind in self.page_kinds
            if not page_kind.recurrent
        ]

    def _make_slots(self, workload: Workload) -> SlotPool | None:
        """Return the pool of slots for recurrent states or speech windows, or None if the model has neither.

        It has no more slots than all requests of the workload take for themselves and their snapshots.
        """
        make = WindowPool if self.clock.takes_speech else SlotPool
        limit = sum(2 + query.positions // INTERVAL for query in workload.queries)
        slots = (page_kind.pages for page_kind in self.page_kinds if page_kind.recurrent)
        return next((make(min(count, limit), self.setup.block_size) for count in slots), None)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Distinct reasons for which some kernels of the predicted steps have a roofline as their time."""
        return tuple(dict.fromkeys(refusal for clock in self.clocks for refusal in clock.refusals))

    @property
    def units(self) -> int:
        """Number of equal units that can be simulated alone.

        A unit is one replica. If some replicas only compute prompts, it is the smallest group with the same share of
        them.
        """
        return (
            gcd(self.replicas, self.setup.prefill_replicas) if self.setup.prefill_replicas else self.replicas
        )

    @property
    def decoding_per_unit(self) -> int:
        """Number of replicas of a unit that decode."""
        return (self.replicas - self.setup.prefill_replicas) // self.units

    def serve(self, workload: Workload) -> list[Record]:
        """Serve a workload on all replicas, to which its requests go in turn.

        Returns:
            A record for each replica that got requests; those of prefill replicas come first.

        Raises:
            ModelError: If a request never fits into the pages or steps of a replica.
        """
        if self.setup.prefill_replicas:
            return self._serve_separately(workload, 1)
        shares = (workload.select_share(replica, self.replicas) for replica in range(self.replicas))
        return [record for share in shares if share is not None for record in self.serve_unit(share)]

    def serve_unit(self, workload: Workload) -> list[Record]:
        """Serve all of a workload on one unit of the replicas.

        Returns:
            A record for each replica of the unit; those of prefill replicas come first.

        Raises:
            ModelError: If a request never fits into the pages or steps of a replica.
        """
        if self.setup.prefill_replicas:
            return self._serve_separately(workload, self.units)
        return [serve(self._make_replica(workload), workload)]

    def _serve_separately(self, workload: Workload, units: int) -> list[Record]:
        """Serve a workload on one of `units` equal groups of replicas, of which some only compute prompts.

        Returns:
            The records of the group's prefill replicas, then those of its decoding replicas.
        """
        # A prompt's last token may be alone in its step, where it is not to be given drafts.
        options = replace(self.setup.options, speculative_tokens=0)
        prefill_replicas = self.setup.prefill_replicas // units
        replicas = [
            self._make_replica(workload, number, options if number < prefill_replicas else None)
            for number in range(self.replicas // units)
        ]
        prefill, decoding = replicas[:prefill_replicas], replicas[prefill_replicas:]
        return SeparateService(prefill, decoding, self._transfer_ns).run(workload)

    def _transfer_ns(self, pages: Sequence[int]) -> int:
        """Return the time in ns in which pages move between two replicas.

        Args:
            pages: Number of pages of each page kind, in the order of `page_kinds`.
        """
        assert self.link is not None, "prefill replicas have a link"
        return self.link.transfer_ns(
            sum(count * page_kind.page_bytes for count, page_kind in zip(pages, self.page_kinds))
        )

    def _make_replica(
        self, workload: Workload, number: int = 0, options: SchedulerOptions | None = None
    ) -> Replica:
        """Return a new replica with empty pools that are large enough for a workload.

        Args:
            workload: Its requests bound the pools, because more pages than they fill would never be taken.
            number: Seed of the draws of accepted drafts.
            options: Limits of a step, in place of those of the setup.
        """
        # More pages than all requests together fill would never be taken.
        size, speculation = self.setup.block_size, self.setup.speculation
        drafts = self.setup.options.speculative_tokens
        positions = sum(-(-(query.positions + drafts) // size) * size for query in workload.queries)
        draft_clock = self.clocks[1] if len(self.clocks) > 1 else None
        proposer = None if speculation is None else DraftProposer(speculation.outcomes, draft_clock, number)
        groups = [
            Scheduler(self._make_pools(positions), options or self.setup.options, self._make_slots(workload))
            for _ in range(self.setup.ep)
        ]
        return Replica(groups[0] if len(groups) == 1 else GroupScheduler(groups), self.clock, proposer)


def _check_model(model: ModelSizes, length: int) -> None:
    """Raise ModelError if no kernel computes some layer of a model, or if its context is below `length` tokens."""
    missing = find_unsupported(model.config)
    if missing:
        raise ModelError(
            f"no kernel of this project computes {' or '.join(missing)}, so traffic has no predicted steps; "
            "nkw plan gives the rooflines"
        )
    longest = model.config.max_position_embeddings
    if longest is not None and length > longest:
        raise ModelError(
            f"requests of up to {length:,} tokens exceed the model's context, {longest:,}; give shorter ones, or "
            "--max-model-len"
        )


def _count_replicas(models: list[ModelSizes], setup: Setup, instance: Instance, tp: int) -> int:
    """Return the setup's number of replicas, or as many as the instance has cores for.

    Args:
        models: The model and, if there is one, its draft model.
        setup: The options.
        instance: The instance.
        tp: Ranks of a group.

    Raises:
        ModelError: If the ranks exceed the cores, a model cannot be divided among them, no replica is left to decode,
            or
        static batches are to decode prompts of other replicas.
    """
    cores, prefill_replicas = instance.physical_cores // setup.lnc, setup.prefill_replicas
    ranks = tp * setup.ep
    if ranks > cores:
        raise ModelError(
            f"{ranks} ranks on {instance.name}, which has {describe_cores(cores, setup.lnc)}; give a smaller --tp "
            "or --ep"
        )
    for model in models:
        refusal = model.config.refusal(tp)
        if refusal is not None:
            raise ModelError(refusal)
    replicas = setup.replicas or cores // ranks
    if replicas * ranks > cores:
        raise ModelError(
            f"{replicas} replicas of {ranks} ranks take {replicas * ranks} cores; {instance.name} has "
            f"{describe_cores(cores, setup.lnc)}; give fewer --replicas"
        )
    if prefill_replicas and prefill_replicas >= replicas:
        raise ModelError(
            f"{prefill_replicas} of {replicas} replicas compute prompts, which leaves none to decode; give fewer "
            "--prefill-replicas, or more --replicas"
        )
    if prefill_replicas and not setup.options.continuous:
        raise ModelError(
            "static batches take no requests whose prompts were computed elsewhere; leave --prefill-replicas out"
        )
    return replicas


def _size_pages(models: list[ModelSizes], setup: Setup, core_bytes: int) -> list[PageKind]:
    """Return the page kinds, with the numbers of pages and slots that fill the memory next to the weights.

    A page has the keys and values of the model and of its draft model.

    Args:
        models: The model and, if there is one, its draft model.
        setup: The options.
        core_bytes: HBM bytes of a rank.

    Raises:
        ModelError: If the layers of a draft model have other attention windows, or if it has recurrent layers.
    """
    tp, length, options = setup.tp, setup.max_model_len, setup.options
    pools, *draft_pools = (
        list_page_kinds(model, setup.dtype, tp, setup.block_size, length) for model in models
    )
    for drafts in draft_pools:
        if [pool.window for pool in drafts] != [pool.window for pool in pools]:
            raise ModelError(
                "the layers of the draft model have other attention windows than those of the model, so they cannot "
                "share pages; give another draft model"
            )
        pools = [
            replace(pool, page_bytes=pool.page_bytes + draft.page_bytes) for pool, draft in zip(pools, drafts)
        ]
    weight_bytes = sum(
        compute_footprint(model, setup.dtype, tp, 0, setup.ep).weight_bytes for model in models
    )
    state_bytes, *draft_state_bytes = (model.count_page_bytes(tp, setup.dtype)[STATES] for model in models)
    if any(draft_state_bytes):
        raise ModelError(NO_RECURRENT_DRAFTS)
    if state_bytes:
        pools.append(PageKind(None, state_bytes, recurrent=True))
    mean = setup.mean_len or length
    slots = 2 + mean // INTERVAL if options.prefix_caching else 1  # a window has one for all continuations
    demand = Demand(options.max_num_seqs, mean, length, options.max_num_batched_tokens, slots)
    return allocate_pages(pools, max(0, core_bytes - weight_bytes), setup.block_size, demand)
