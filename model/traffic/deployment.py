"""How a model is deployed: ranks and replicas on an instance, pages of the cache, and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.device import chip, instance_named
from model.engine import Scheduler, SchedulerOptions
from model.engine.bucket_sizes import BucketLimits
from model.engine.buckets import Buckets
from model.errors import ModelError
from model.layers import unsupported
from model.plan.memory import Demand, footprint, page_kinds, possible_tp, smallest_tp, with_pages
from model.plan.parameters import ModelCounts
from model.plan.predict import Predictor
from model.state import PagePool
from model.traffic.clock import PredictedClock
from model.traffic.service import Record, Service
from model.traffic.workload import Workload

LIMITS = SchedulerOptions()


@dataclass(frozen=True)
class Setup:
    """The options of a deployment; None leaves the choice to the planner.

    `max_model_len` are positions of a request, `mean_len` those of requests on average, which divide the memory among
    the kinds of pages; as many where it is None. Steps are rounded up to `buckets`, by default powers of two; with
    `few_buckets` to every second size only, the largest among them.
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
    buckets: Buckets | None = None

    @property
    def bucket_limits(self) -> BucketLimits:
        """What steps may ask for."""
        return BucketLimits(
            self.options.max_num_seqs, self.options.max_num_batched_tokens, self.max_model_len
        )

    def whole_prompts(self) -> Setup:
        """The same without chunks of prompts, with steps that take the longest prompt at once."""
        most = max(self.options.max_num_batched_tokens, self.max_model_len)
        options = replace(self.options, chunked_prefill=False, max_num_batched_tokens=most)
        return replace(self, options=options, buckets=None)


class Deployment:
    """Replicas of one model, and the clock of their steps."""

    def __init__(self, model: ModelCounts, setup: Setup, like: Deployment | None = None) -> None:
        """Predictions of another deployment `like` this one, of the same instance, dtype and lengths, are taken over.

        ModelError for what the model, the instance or the options do not allow.
        """
        missing = unsupported(model.config)
        if missing:
            raise ModelError(
                f"no kernel of this project computes {' or '.join(missing)}, so traffic has no predicted steps; "
                "nkw plan gives the rooflines"
            )
        instance = instance_named(setup.instance)
        record, cores, length = chip(instance.target), instance.physical_cores, setup.max_model_len
        longest = model.config.max_position_embeddings
        if longest is not None and length > longest:
            raise ModelError(f"requests of up to {length:,} tokens exceed the model's context, {longest:,}")
        model = replace(model, config=model.config.of_length(length))
        tp = setup.tp or _fewest(model, setup, cores, record.hbm_bytes_per_core)
        if tp > cores:
            raise ModelError(f"{tp} ranks on {instance.name}, which has {cores} cores")
        refusal = model.config.refusal(tp)
        if refusal is not None:
            raise ModelError(refusal)
        self.replicas = setup.replicas or cores // tp
        if self.replicas * tp > cores:
            raise ModelError(
                f"{self.replicas} replicas of {tp} ranks take {self.replicas * tp} cores; {instance.name} has {cores}"
            )
        self.setup, self.instance, self.tp = replace(setup, tp=tp), instance, tp
        held, own = footprint(model, setup.dtype, tp, 0), setup.options
        kinds = page_kinds(model, setup.dtype, tp, setup.block_size, length)
        free_bytes = max(0, record.hbm_bytes_per_core - held.weight_bytes)
        mean = setup.mean_len or length
        demand = Demand(own.max_num_seqs, mean, length, own.max_num_batched_tokens)
        self.kinds = with_pages(kinds, free_bytes, setup.block_size, demand)
        for kind, pool in zip(self.kinds, self._pools(length)):
            needed = pool.most_pages(length, min(length, own.max_num_batched_tokens))
            if kind.pages < needed:
                seen = "" if kind.window is None else f" of layers that see {kind.window:,} of them"
                raise ModelError(
                    f"tp {tp} on {instance.name} leaves {kind.pages:,} pages of {setup.block_size} positions{seen} "
                    f"beside the weights; a request of {length:,} tokens takes {needed:,}; more ranks leave more"
                )
        buckets = setup.buckets or setup.bucket_limits.powers
        if setup.few_buckets:
            buckets = Buckets(
                buckets.sequences[::-2][::-1], buckets.tokens[::-2][::-1], buckets.context[::-2][::-1]
            )
        # The instance's own name, so that collectives go over its links.
        self.predictor: Predictor
        if like is not None and like.tp == tp:
            self.predictor = like.predictor
        else:
            self.predictor = Predictor(model.config, instance.name, tp, setup.dtype, length)
        pages = {kind.window: kind.pages for kind in self.kinds}
        self.clock = PredictedClock(self.predictor, buckets, pages, setup.block_size)

    @property
    def pages(self) -> int:
        """Pages of all kinds, of one replica."""
        return sum(kind.pages for kind in self.kinds)

    def _pools(self, positions: int) -> list[PagePool]:
        """Pools of pages, of no more than so many positions fill."""
        size = self.setup.block_size
        most = -(-positions // size)
        return [PagePool(max(1, min(kind.pages, most)), size, kind.window) for kind in self.kinds]

    @property
    def limits(self) -> SchedulerOptions:
        """The limits of a step."""
        return self.setup.options

    def serve(self, workload: Workload) -> list[Record]:
        """What the replicas do with a workload whose requests go to each of them in turn."""
        shares = (workload.of_replica(number, self.replicas) for number in range(self.replicas))
        return [self.serve_one(each) for each in shares if each is not None]

    def serve_one(self, workload: Workload) -> Record:
        """What one replica does with its own workload."""
        # More pages than all requests together fill would never be taken.
        size = self.setup.block_size
        pools = self._pools(sum(-(-query.positions // size) * size for query in workload.queries))
        return Service(Scheduler(pools, self.setup.options), self.clock).run(workload)


def _fewest(model: ModelCounts, setup: Setup, cores: int, core_bytes: int) -> int:
    """The fewest ranks that hold as many sequences as run at most; else one sequence; else the most there are."""
    length = setup.max_model_len
    for sequences in (setup.options.max_num_seqs, 1):
        tp = smallest_tp(model, setup.dtype, length, sequences, cores, core_bytes)
        if tp is not None:
            return tp
    return possible_tp(model, cores)[-1]
