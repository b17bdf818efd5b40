"""Meshes on which an instance holds a model, ranked by what their copies decode together.

A copy of the model takes `pp` stages of `ep` groups of `tp` ranks: a group computes its part of the batch, and the
groups of a stage hold its routed experts once. The time of a step is an estimate: on every stage the roofline of a
core, and the collectives of the simulator's clock between cores, which take their times from the links. These are two
all-reduces of a layer over `tp` ranks, two all-to-alls of a layer with experts over `ep` groups, and a send from each
stage to the next. A collective of ranks that lie apart is taken as one of all ranks among which they lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from model.config.mixers import GroupedAttention
from model.config.parts import SpeechEncoder
from model.device import Hardware, Instance, chip, collective_ns, schedule_stages
from model.errors import ModelError
from model.execution.stages import divided
from model.layers.launch import Phase
from model.loading.weights import check_ranks
from model.mesh import routed_experts
from model.plan import roofline
from model.plan.memory import MeshShape, possible_tp
from model.plan.predict import MOST_MICRO_BATCHES
from model.plan.sizes import DTYPE_BYTES, LayerSizes, ModelSizes


@dataclass(frozen=True)
class Estimate:
    """A decode step of a copy, in so many micro-batches: its length, and the shares of it, averaged over stages.

    A stage is busy with weights, cache and products (`core`) or with `collectives`, or it waits (`bubble`).
    """

    micro_batches: int
    step_ns: float
    core: float
    collectives: float
    bubble: float


@dataclass(frozen=True)
class Candidate:
    """A mesh on an instance: copies, the bytes of the rank that holds most, sequences of a copy, and its step.

    `step` is None where a copy does not hold the batch.
    """

    shape: MeshShape
    copies: int
    weight_bytes: int
    cache_bytes_per_sequence: int
    sequences: int
    batch: int
    step: Estimate | None

    @property
    def tokens_per_s(self) -> float:
        """Of all copies, decoding; 0 where a copy does not hold the batch."""
        return 0.0 if self.step is None else 1e9 * self.copies * self.batch / self.step.step_ns

    @property
    def needed_bytes(self) -> int:
        """What the rank that holds most needs, with its part of the batch."""
        return self.weight_bytes + self.cache_bytes_per_sequence * -(-self.batch // self.shape.ep)


@dataclass(frozen=True)
class Stage:
    """The decoder layers of a stage, equal ones once and their number, and the layers around them on it."""

    blocks: tuple[tuple[LayerSizes, int], ...]
    before: tuple[LayerSizes, ...]
    head: tuple[LayerSizes, ...]

    def elements(self, shape: MeshShape) -> int:
        """Return the weights of a rank."""
        around = sum(section.elements(shape.tp).total() for section in (*self.before, *self.head))
        return around + sum(
            count * section.elements(shape.tp, shape.ep).total() for section, count in self.blocks
        )


class Meshes:
    """The meshes of an instance for a model, for sequences that end at `context` tokens."""

    def __init__(self, model: ModelSizes, dtype: str, instance: Instance, context: int, batch: int) -> None:
        self._model, self._dtype, self._size = model, dtype, DTYPE_BYTES[dtype]
        self._instance, self._context, self._batch = instance, context, batch
        self._cores = instance.physical_cores
        self._chip: Hardware = chip(instance.name)
        self._peaks = roofline.core(chip(instance.target), dtype)
        kinds = dict(zip(Counter(model.config.blocks), model.blocks, strict=True))
        self._blocks = [kinds[block] for block in model.config.blocks]
        self._stages = lru_cache(maxsize=None)(self._divided)

    def ranked(self, tp: int | None = None, pp: int | None = None, ep: int | None = None) -> list[Candidate]:
        """All meshes with the sizes that are given, the fastest first; behind them the nearest that do not fit."""
        found = [self.candidate(shape) for shape in self._shapes(tp, pp, ep)]
        return sorted(found, key=lambda each: (-each.tokens_per_s, each.needed_bytes, each.shape.ranks))

    def candidate(self, shape: MeshShape) -> Candidate:
        """One mesh."""
        stages = self._stages(shape.tp, shape.pp)
        held = [stage.elements(shape) * self._size for stage in stages]
        cache = [self._cache_bytes(stage, shape.tp) for stage in stages]
        capacity = chip(self._instance.target).hbm_bytes_per_core
        sequences = shape.ep * min(
            max(0, capacity - weights) // max(1, own) for weights, own in zip(held, cache)
        )
        fullest = max(range(shape.pp), key=lambda at: held[at] + cache[at] * -(-self._batch // shape.ep))
        fits = sequences >= self._batch and max(held) <= capacity
        return Candidate(
            shape,
            self._cores // shape.ranks,
            held[fullest],
            cache[fullest],
            sequences,
            self._batch,
            self.step(shape, self._batch) if fits else None,
        )

    def step(self, shape: MeshShape, batch: int) -> Estimate:
        """A step of a batch, in the number of micro-batches that takes least."""
        most = min(batch // shape.ep, MOST_MICRO_BATCHES) if shape.pp > 1 else 1
        found = (self._step(shape, batch, count) for count in powers_of_two(most))
        return min(found, key=lambda each: each.step_ns)

    def _shapes(self, tp: int | None, pp: int | None, ep: int | None) -> Iterator[MeshShape]:
        """Powers of two, but for the sizes that are given."""
        counts = routed_experts(self._model.config)
        experts = gcd(*counts) if counts else 1
        for own_tp in possible_tp(self._model, self._cores) if tp is None else [tp]:
            for own_pp in (
                powers_of_two(min(len(self._cuts) + 1, self._cores // own_tp)) if pp is None else [pp]
            ):
                most = min(experts & -experts, self._batch, self._cores // (own_tp * own_pp))
                for own_ep in powers_of_two(most) if ep is None else [ep]:
                    shape = MeshShape(own_tp, own_pp, own_ep)
                    if shape.ranks <= self._cores:
                        yield shape

    @property
    def _cuts(self) -> list[int]:
        """The numbers of layers after which a stage may end: none behind reads a cache of one before, or an encoder."""
        if isinstance(self._model.config.encoder, SpeechEncoder):
            return []
        mixers = [block.mixer for block in self._model.config.blocks]
        read = [
            (each.cache_of, at)
            for at, each in enumerate(mixers)
            if isinstance(each, GroupedAttention) and each.cache_of is not None
        ]
        return [
            count
            for count in range(1, len(mixers))
            if not any(owner < count <= reader for owner, reader in read)
        ]

    def _divided(self, tp: int, pp: int) -> list[Stage]:
        model = self._model
        costs = [section.elements(tp).total() for section in self._blocks]
        costs[-1] += model.head.elements(tp).total()
        spans = divided(costs, pp, self._cuts)
        return [
            Stage(
                tuple(Counter(self._blocks[span.start : span.stop]).items()),
                () if span.start else (model.embedding, model.aside),
                (model.head,) if span.stop == len(costs) else (),
            )
            for span in spans
        ]

    def _cache_bytes(self, stage: Stage, tp: int) -> int:
        """The cache of a sequence on a rank of a stage."""
        return sum(
            count * section.cache_bytes(self._context, tp, self._dtype) for section, count in stage.blocks
        )

    def _step(self, shape: MeshShape, batch: int, micro_batches: int) -> Estimate:
        own = -(-batch // (shape.ep * micro_batches))
        stages = self._stages(shape.tp, shape.pp)
        core = [self._core_ns(stage, shape, own) for stage in stages]
        exchanged = [
            sum(count * self._collectives_ns(section, shape, own) for section, count in stage.blocks)
            for stage in stages
        ]
        sent = [self._sent_ns(shape, own)] * (shape.pp - 1)
        computed = [one + other for one, other in zip(core, exchanged)]
        done = schedule_stages([computed] * micro_batches, [sent] * micro_batches)
        whole = shape.pp * done.length_ns / micro_batches
        return Estimate(
            micro_batches,
            done.length_ns,
            sum(core) / whole,
            (sum(exchanged) + 2 * sum(sent)) / whole,
            done.bubble_share,
        )

    def _core_ns(self, stage: Stage, shape: MeshShape, sequences: int) -> float:
        """The roofline of a rank for a token of each of so many sequences of its group."""
        elements, products = 0.0, 0.0
        for section, count in stage.blocks:
            held = section.elements(shape.tp, shape.ep)
            routed, always = held["experts"], held.total() - held["experts"]
            elements += count * (always + routed * section.share_of_experts(sequences * shape.ep))
            # Each token passes its experts on one of the groups, of which all have as many tokens.
            chosen = routed * shape.ep * section.share_of_experts(1)
            attended = section.products(Phase.decode, self._context) / shape.tp
            products += count * sequences * (always + chosen + attended)
        head = sum(section.elements(shape.tp)["head"] for section in stage.head)
        elements, products = elements + head, products + sequences * head
        cached = sequences * self._cache_bytes(stage, shape.tp)
        return 1e9 * self._peaks.seconds(2 * products, self._size * elements + cached)

    def _collectives_ns(self, layers: LayerSizes, shape: MeshShape, sequences: int) -> float:
        """The sums and exchanges of one layer."""
        row_bytes = sequences * self._model.config.hidden_size * self._size
        time_ns = 0.0
        if shape.tp > 1:
            sums = 2 if layers.parameters["mlp"] or layers.parameters["experts"] else 1
            time_ns += sums * collective_ns(self._chip, shape.tp, row_bytes, all_reduces=True)
        if shape.ep > 1 and layers.experts is not None:
            copies = min(layers.experts.per_token, shape.ep)
            time_ns += 2 * collective_ns(self._chip, shape.ep * shape.tp, copies * row_bytes)
        return time_ns

    def _sent_ns(self, shape: MeshShape, sequences: int) -> float:
        row_bytes = sequences * self._model.config.hidden_size * self._size
        return collective_ns(self._chip, 2 * shape.ep * shape.tp, row_bytes)


def check_mesh(
    model: ModelSizes,
    tp: int | None,
    pp: int | None,
    ep: int | None,
    name: str,
    cores: int,
) -> None:
    """ModelError for a mesh that an instance or a model cannot have."""
    ranks = (tp or 1) * (pp or 1) * (ep or 1)
    if ranks > cores:
        raise ModelError(f"{ranks} ranks on {name}, which has {cores} cores")
    check_ranks(model.config, tp or 1)
    if pp is not None and pp > model.num_layers:
        raise ModelError(
            f"{pp} pipeline stages for {model.num_layers} layers; this model takes --pp 1 to {model.num_layers}"
        )
    if pp is not None and pp > 1 and isinstance(model.config.encoder, SpeechEncoder):
        raise ModelError("--pp cuts a decoder into stages; beside an encoder it stays whole: leave --pp out")
    counts = routed_experts(model.config)
    if ep is not None and ep > 1 and (not counts or any(count % ep for count in counts)):
        held = (
            f"does not divide its {max(counts)} experts"
            if counts
            else "divides routed experts, and it has none"
        )
        raise ModelError(f"--ep {ep} is nothing for this model: it {held}")


def powers_of_two(most: int) -> list[int]:
    """The powers of two up to `most`."""
    return [2**exponent for exponent in range(max(1, most).bit_length())]
