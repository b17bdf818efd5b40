"""Meshes on which an instance can run a model, ranked by the tokens per second that all copies of the model decode.

A copy of the model takes `pp` pipeline stages of `ep` groups of `tp` tensor-parallel ranks. Each group computes its
share of the batch. The groups of a stage divide the routed experts among them. `policy` chooses a mesh from this
ranking.

The time of a step is an estimate: on every stage the roofline of a rank, and the simulator's times of collectives over
the links between the cores. The collectives are two all-reduces of a layer over `tp` ranks, two all-to-alls of a layer
with experts over `ep` groups, and a send from each stage to the next. If the ranks of a collective are not neighbours,
the collective is estimated as if all ranks between the first and the last of them took part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from model.config.blocks import SpeechEncoder
from model.config.mixers import GroupedAttention
from model.device import Hardware, Instance, chip, compute_collective_ns, schedule_stages
from model.errors import ModelError
from model.execution.stages import divide_evenly
from model.layers.launch import Phase
from model.loading.weights import check_ranks
from model.mesh import check_expert_groups, collect_expert_counts
from model.plan.memory import MeshShape, list_powers_of_two
from model.plan.predict import MAX_MICRO_BATCHES
from model.plan.roofline import compute_core_peaks, count_prefill_work
from model.plan.sizes import DTYPE_BYTES, LayerSizes, ModelSizes


@dataclass(frozen=True)
class Estimate:
    """Estimated time of a decode step of one copy, whose batch passes the stages in `micro_batches` equal parts.

    `core`, `collectives` and `bubble` are shares of `step_ns`, averaged over the pipeline stages. In them, a stage
    reads weights and cache and computes (`core`), communicates (`collectives`), or waits for other stages (`bubble`).
    """

    micro_batches: int
    step_ns: float
    core: float
    collectives: float
    bubble: float


@dataclass(frozen=True)
class Candidate:
    """Mesh that an instance can have, with the memory and the estimated step of a copy of the model on it.

    | field | meaning |
    |---|---|
    | `copies` | copies of the model on the instance |
    | `weight_bytes`, `cache_bytes_per_sequence` | bytes on the rank that needs most memory |
    | `sequences` | most sequences whose cache fits into one copy |
    | `batch` | sequences that a copy decodes together |
    | `step` | estimated decode step of the batch; None if the batch does not fit |
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
        """Tokens that all copies together decode per second; 0 if a copy does not hold the batch."""
        return 0.0 if self.step is None else 1e9 * self.copies * self.batch / self.step.step_ns

    @property
    def needed_bytes(self) -> int:
        """Bytes for weights and the group's share of the batch, on the rank that needs most memory."""
        return self.weight_bytes + self.cache_bytes_per_sequence * -(-self.batch // self.shape.ep)


@dataclass(frozen=True)
class Stage:
    """Layers of one pipeline stage.

    `blocks` has pairs of distinct decoder layers and how often each occurs. `ends` has the layers before the first and
    after the last decoder layer of the model, where the stage has them.
    """

    blocks: tuple[tuple[LayerSizes, int], ...]
    ends: tuple[LayerSizes, ...]

    def count_weight_bytes(self, shape: MeshShape, dtype: str) -> int:
        """Return the bytes of weights that one rank of the stage holds, as `LayerSizes` counts them."""
        return sum(section.count_weight_bytes(shape.tp, 1, dtype) for section in self.ends) + sum(
            count * section.count_weight_bytes(shape.tp, shape.ep, dtype) for section, count in self.blocks
        )


class Meshes:
    """Generator of candidate meshes for a model on an instance, with estimates of their decode steps and prompts."""

    def __init__(
        self,
        model: ModelSizes,
        dtype: str,
        instance: Instance,
        context: int,
        batch: int,
        lnc: int = 1,
        fewer: bool = False,
    ) -> None:
        """Set the model, the instance and the batch for which meshes are compared.

        Args:
            model: The model.
            dtype: Dtype of weights and cache.
            instance: The instance.
            context: Positions of a sequence.
            batch: Sequences that a copy decodes together.
            lnc: Physical cores of a rank.
            fewer: Whether a copy that does not hold the batch decodes fewer sequences, the largest power of two.
        """
        self._fewer = fewer
        self._model, self._dtype, self._size = model, dtype, DTYPE_BYTES[dtype]
        self._context, self._batch = context, batch
        self._cores = instance.physical_cores // lnc
        self._chip: Hardware = chip(instance.name, lnc)
        self._peaks = compute_core_peaks(self._chip, dtype, lnc)
        self._capacity = lnc * self._chip.hbm_bytes_per_core
        sizes = dict(zip(Counter(model.config.blocks), model.blocks, strict=True))
        self._blocks = [sizes[block] for block in model.config.blocks]
        self._stages = lru_cache(maxsize=None)(self._divide)

    def rank(self, tp: int | None = None, pp: int | None = None, ep: int | None = None) -> list[Candidate]:
        """Return all meshes of the requested sizes; None leaves a size open, which then takes powers of two.

        Meshes that hold the batch come first, by descending tokens per second. Then follow the others, by ascending
        memory that a rank needs.
        """
        candidates = [self.create_candidate(shape) for shape in self._list_shapes(tp, pp, ep)]
        return sorted(candidates, key=lambda mesh: (-mesh.tokens_per_s, mesh.needed_bytes, mesh.shape.ranks))

    def create_candidate(self, shape: MeshShape) -> Candidate:
        """Return the candidate with a shape: its memory, its batch and the estimated step.

        With `fewer`, the batch is the largest power of two that fits, at least 1 and at most the requested batch. The
        step is None if this batch does not fit.
        """
        stages = self._stages(shape.tp, shape.pp)
        weight_bytes = [stage.count_weight_bytes(shape, self._dtype) for stage in stages]
        cache_bytes = [self._cache_bytes(stage, shape.tp) for stage in stages]
        capacity = self._capacity
        sequences = shape.ep * min(
            max(0, capacity - weights) // max(1, cache) for weights, cache in zip(weight_bytes, cache_bytes)
        )
        batch = list_powers_of_two(min(self._batch, sequences))[-1] if self._fewer else self._batch
        group_batch = -(-batch // shape.ep)
        fullest = max(
            range(shape.pp), key=lambda index: weight_bytes[index] + cache_bytes[index] * group_batch
        )
        fits = sequences >= batch and max(weight_bytes) <= capacity
        return Candidate(
            shape,
            self._cores // shape.ranks,
            weight_bytes[fullest],
            cache_bytes[fullest],
            sequences,
            batch,
            self.estimate_step(shape, batch) if fits else None,
        )

    def estimate_prompt(self, shape: MeshShape, tokens: int) -> float:
        """Return the estimated time in ns of one prompt on one group of ranks: its roofline plus all collectives.

        The roofline is multiplied by the weights on all `tp` ranks over those on a single rank. So padded weights, and
        weights that several ranks hold, count as work.
        """
        row_bytes = tokens * self._model.config.hidden_size * self._size
        collectives_ns = sum(
            self._compute_collectives_ns(section, shape, row_bytes) for section in self._blocks
        )
        work = count_prefill_work(self._model, self._dtype, 1, tokens)
        repeated = shape.tp * self._count_weights(shape.tp) / self._count_weights(1)
        return 1e9 * repeated * work.compute_seconds(self._peaks.scale(shape.tp)) + collectives_ns

    def estimate_step(self, shape: MeshShape, batch: int) -> Estimate:
        """Return the estimate of a decode step with the fastest number of micro-batches, among powers of two."""
        largest = min(batch // shape.ep, MAX_MICRO_BATCHES) if shape.pp > 1 else 1
        estimates = (self._estimate(shape, batch, count) for count in list_powers_of_two(largest))
        return min(estimates, key=lambda estimate: estimate.step_ns)

    def _list_shapes(self, tp: int | None, pp: int | None, ep: int | None) -> Iterator[MeshShape]:
        """Yield the mesh shapes that the instance has cores for; a size that is None takes powers of two."""
        counts = collect_expert_counts(self._model.config)
        experts = gcd(*counts) if counts else 1
        for tp_size in self._list_tp() if tp is None else [tp]:
            stages = min(len(self._cuts) + 1, self._cores // tp_size)
            for pp_size in list_powers_of_two(stages) if pp is None else [pp]:
                groups = min(experts & -experts, self._batch, self._cores // (tp_size * pp_size))
                for ep_size in list_powers_of_two(groups) if ep is None else [ep]:
                    shape = MeshShape(tp_size, pp_size, ep_size)
                    if shape.ranks <= self._cores:
                        yield shape

    def _list_tp(self) -> list[int]:
        """Return the numbers of tensor-parallel ranks to try: powers of two, at most the cores and the vocabulary size.

        The largest may exceed the model's heads; further ranks then compute padding.
        """
        return list_powers_of_two(min(self._cores, self._model.config.vocab_size))

    def _count_weights(self, tp: int) -> int:
        """Return the number of weight elements in all decoder layers that one of `tp` ranks holds."""
        return sum(section.count * section.count_elements(tp).total() for section in self._model.blocks)

    @property
    def _cuts(self) -> list[int]:
        """Numbers of decoder layers after which a pipeline stage may end; empty for a model with a speech encoder.

        A stage may not end between a layer and a later layer that reads the first one's cache.
        """
        if isinstance(self._model.config.encoder, SpeechEncoder):
            return []
        mixers = [block.mixer for block in self._model.config.blocks]
        shared = [
            (mixer.cache_of, index)
            for index, mixer in enumerate(mixers)
            if isinstance(mixer, GroupedAttention) and mixer.cache_of is not None
        ]
        return [
            count
            for count in range(1, len(mixers))
            if not any(owner < count <= reader for owner, reader in shared)
        ]

    def _divide(self, tp: int, pp: int) -> list[Stage]:
        """Return `pp` pipeline stages with nearly equal numbers of weights on a rank."""
        model = self._model
        costs = [section.count_elements(tp).total() for section in self._blocks]
        costs[-1] += model.head.count_elements(tp).total()
        return [
            Stage(
                tuple(Counter(self._blocks[span.start : span.stop]).items()),
                (() if span.start else (model.embedding, model.aside))
                + ((model.head,) if span.stop == len(costs) else ()),
            )
            for span in divide_evenly(costs, pp, self._cuts)
        ]

    def _cache_bytes(self, stage: Stage, tp: int) -> int:
        """Return the cache bytes of one sequence on one rank of a stage."""
        return sum(
            count * section.count_cache_bytes(self._context, tp, self._dtype)
            for section, count in stage.blocks
        )

    def _estimate(self, shape: MeshShape, batch: int, micro_batches: int) -> Estimate:
        """Return the estimate of a decode step whose batch is divided into `micro_batches` micro-batches.

        `batch` counts the sequences of all groups of a copy.
        """
        sequences = -(-batch // (shape.ep * micro_batches))
        row_bytes = sequences * self._model.config.hidden_size * self._size
        stages = self._stages(shape.tp, shape.pp)
        core = [self._compute_core_ns(stage, shape, sequences) for stage in stages]
        collectives = [
            sum(
                count * self._compute_collectives_ns(section, shape, row_bytes)
                for section, count in stage.blocks
            )
            for stage in stages
        ]
        sends = [compute_collective_ns(self._chip, 2 * shape.ep * shape.tp, row_bytes)] * (shape.pp - 1)
        computed = [core_ns + exchanged_ns for core_ns, exchanged_ns in zip(core, collectives)]
        schedule = schedule_stages([computed] * micro_batches, [sends] * micro_batches)
        stage_ns = shape.pp * schedule.length_ns / micro_batches
        return Estimate(
            micro_batches,
            schedule.length_ns,
            sum(core) / stage_ns,
            (sum(collectives) + 2 * sum(sends)) / stage_ns,
            schedule.bubble_share,
        )

    def _compute_core_ns(self, stage: Stage, shape: MeshShape, sequences: int) -> float:
        """Return the roofline in ns of one rank for a step of `sequences` sequences, those of its group."""
        elements, products, saved = 0.0, 0.0, 0.0
        for section, count in stage.blocks:
            weights = section.count_elements(shape.tp, shape.ep)
            routed, always = weights["experts"], weights.total() - weights["experts"]
            elements += count * (always + routed * section.compute_share_of_experts(sequences * shape.ep))
            tokens = sequences * shape.ep
            saved += count * section.count_saved_bytes_read(tokens, shape.tp, shape.ep, self._dtype)
            # A token passes its experts on one of the groups, which all have equally many tokens.
            chosen = routed * shape.ep * section.compute_share_of_experts(1)
            attended = section.count_products(Phase.decode, self._context, shape.tp)
            products += count * sequences * (always + chosen + attended)
        head = sum(section.count_elements(shape.tp)["head"] for section in stage.ends)
        elements, products = elements + head, products + sequences * head
        cached = sequences * self._cache_bytes(stage, shape.tp)
        saved += sum(section.count_saved_bytes(shape.tp, 1, self._dtype)["head"] for section in stage.ends)
        return 1e9 * self._peaks.compute_seconds(2 * products, self._size * elements - saved + cached)

    def _compute_collectives_ns(self, layers: LayerSizes, shape: MeshShape, row_bytes: int) -> float:
        """Return the time in ns of one layer's all-reduces over `tp` ranks and all-to-alls over `ep` groups.

        Args:
            layers: the layer.
            shape: the mesh.
            row_bytes: bytes of the hidden states of all rows that a rank exchanges.
        """
        time_ns = 0.0
        if shape.tp > 1:
            sums = 2 if layers.parameters["mlp"] or layers.parameters["experts"] else 1
            time_ns += sums * compute_collective_ns(self._chip, shape.tp, row_bytes, all_reduces=True)
        if shape.ep > 1 and layers.experts is not None:
            copies = min(layers.experts.per_token, shape.ep)
            time_ns += 2 * compute_collective_ns(self._chip, shape.ep * shape.tp, copies * row_bytes)
        return time_ns


def describe_cores(cores: int, lnc: int) -> str:
    """Return words for a number of ranks such as "64 logical cores (LNC 2)" for `lnc` 2, or "128 cores" for `lnc` 1."""
    noun = "core" if cores == 1 else "cores"
    return f"{cores} {noun}" if lnc == 1 else f"{cores} logical {noun} (LNC {lnc})"


def check_mesh(
    model: ModelSizes, tp: int | None, pp: int | None, ep: int | None, instance: Instance, lnc: int
) -> None:
    """Check that a mesh is possible for a model on an instance; sizes that are None count as 1.

    Raises:
        ModelError: the mesh has more ranks than the instance has cores, a size does not divide the model, or `pp` cuts
            a model with a speech encoder.
    """
    tp, pp, ep = tp or 1, pp or 1, ep or 1
    ranks, cores = tp * pp * ep, instance.physical_cores // lnc
    if ranks > cores:
        raise ModelError(
            f"a copy of the model takes {ranks} ranks on {instance.name}, which has {describe_cores(cores, lnc)}: "
            "ask for fewer with --tp, --pp or --ep"
        )
    check_ranks(model.config, tp)
    if pp > model.num_layers:
        raise ModelError(
            f"{pp} pipeline stages for {model.num_layers} layers; this model takes --pp 1 to {model.num_layers}"
        )
    if pp > 1 and isinstance(model.config.encoder, SpeechEncoder):
        raise ModelError(
            f"--pp {pp} cuts a model with an encoder of speech, which has one stage: leave --pp out"
        )
    check_expert_groups(model.config, ep)
