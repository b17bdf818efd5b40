"""The model runner of the engine: it computes batches of requests whose keys and values are in pages.

A step goes through four records, each made of the one before it:

    Batch        the scheduler's decision: a chunk of tokens of each request (vLLM: SchedulerOutput)
    Part         chunks that are launched together, in the rounded sizes of a PartShape (vLLM: a padded batch)
    StepShape    these sizes and those of the model: what the launch list is computed from
    StepInputs   the arrays of the step: ids, positions, slots, block tables, logits indices

Sizes are rounded up to buckets, so there is padding. Tokens of padding are written to a page that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from model.config import ModelConfig
from model.engine import Batch, Request
from model.engine.buckets import Buckets, BucketUse, Part, PartShape
from model.engine.speculation import NO_ROWS, Rows
from model.execution.bound_launch import Device
from model.execution.expert_load import ExpertLoad
from model.families import compose
from model.layers.cache import AUTO
from model.layers.launch import DrawVariant, Phase, StepShape, WeightDtypes
from model.layers.paged import STATES, CacheGroup
from model.layers.sample import DRAWS, served
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.step_inputs import StepInputs
from model.runners.window import WindowRunner, make_token_runner
from model.sampling import RowSampling, StepOutput
from model.state import PagePool, SlotPool


class PagedModel:
    """A model that computes the engine's batches on a device.

    `pools` has the pool of pages of each cache group. Layers that see all positions are one group. The layers of a
    window are another one where it has pages of its own. `slots` are the recurrent states of sequences, or their
    encoded windows of speech. On the device each pool has one more page, and `slots` one more slot, for padding.

    `buckets` are the sizes that steps are rounded up to. `candidates` and `kv_cache_dtype` are as in KernelModel. Each
    data-parallel group of `mesh` holds as many pages and slots, and computes its own requests.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        pools: PagePool | Sequence[PagePool],
        buckets: Buckets,
        candidates: int = 1,
        slots: SlotPool | None = None,
        mesh: Mesh | None = None,
        kv_cache_dtype: str = AUTO,
    ) -> None:
        """ModelError where the machine has too little memory for pages and slots."""
        assert config.longest_short is None, (
            "pages are shared by sequences of all lengths: see ModelConfig.of_length"
        )
        self._mesh = mesh = mesh or Mesh(device.ranks)
        self._buckets = buckets_of(config, buckets)
        self.use = BucketUse(self._buckets, ExpertLoad.of(config, mesh))
        self._pools = [pools] if isinstance(pools, PagePool) else list(pools)
        self._slots = slots
        self._cache_groups: list[CacheGroup] = [pool.window for pool in self._pools] + (
            [STATES] if slots else []
        )
        self._vocab_size = config.vocab_size
        first_rank = weights[0]
        self._largest_step = largest_step(
            config,
            mesh,
            first_rank.dtype,
            first_rank.dtypes,
            self._pools,
            slots,
            self._buckets,
            candidates,
            kv_cache_dtype,
        )
        self._inputs = StepInputs(self._largest_step.context, self._pools, slots, config.cross_positions)
        draw_variants = 1 + len(DRAWS)
        content = "states" if config.spectrum is None else "windows"
        self._runner = make_token_runner(
            config,
            weights,
            device,
            self._largest_step,
            mesh,
            self._memory_purpose(content),
            max_bound_steps=4 * draw_variants * len(buckets.sequences) * len(buckets.context),
            expert_load=self.use.experts,
        )

    def _memory_purpose(self, content: str) -> str:
        """What takes the memory of pages, and of slots with some content, for an error about too little memory."""
        pages = sum(pool.count for pool in self._pools)
        purposes = [f"{pages:,} pages of {self._largest_step.block_size} positions"] if pages else []
        if self._slots:
            purposes.append(f"{self._slots.count:,} slots of {content}")
        return " and ".join(purposes)

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        """Compute a batch; returns the outputs of each request that chooses a token or scores its tokens.

        A request that chooses gets one output for its next token, and one more for each draft that is verified. A
        request that scores gets one output for each token of its chunk. `rows` says how to draw: the device draws
        where it can, and the outputs of all other rows have logits.
        """
        for number, cache_group in enumerate(self._cache_groups):
            group_copies = [
                {new: old for (pool_number, new), old in group.copies.items() if pool_number == number}
                for group in batch.groups(self._mesh.data)
            ]
            self._runner.network.copy_pages(group_copies, cache_group)
        # A chunk that scores is launched alone: its head goes through all of its tokens.
        scored = [Batch({chunk.request: chunk}) for chunk in batch.chunks.values() if chunk.scores]
        others = {request: chunk for request, chunk in batch.chunks.items() if not chunk.scores}
        outputs: dict[Request, list[StepOutput]] = {}
        for sub_batch in (Batch(others), *scored):
            for part in self._buckets.parts(*sub_batch.groups(self._mesh.data)):
                self.use.add(part)
                outputs |= self._compute_part(part, rows)
        return outputs

    def launch_padding(self, shape: PartShape, draws: DrawVariant | None) -> None:
        """Launch a step of a shape without any request, so that its graph is compiled; no request's pages change."""
        no_chunks = ((),) * self._mesh.data
        beside = None if shape.beside is None else Part(shape.beside, no_chunks)
        part = Part(shape, no_chunks, beside)
        step = replace(step_of(shape, self._largest_step), draws=draws)
        self._encode(part)
        inputs = self._inputs.arrays(step, part)
        if draws is not None:
            inputs |= self._runner.draw_inputs([None] * (self._mesh.data * step.head_rows), draws)
        self._runner.step(step, inputs)

    def launch_copies(self, count: int, cache_group: CacheGroup) -> None:
        """Launch copies of the first `count` pages or slots of a cache group onto themselves."""
        self._runner.network.copy_pages(
            [{page: page for page in range(count)}] * self._mesh.data, cache_group
        )

    def _compute_part(self, part: Part, rows: Rows) -> dict[Request, list[StepOutput]]:
        """Run the step of a part; returns its outputs by request."""
        step = step_of(part.shape, self._largest_step)
        if not part.shape.decodes and any(chunk.scores for chunk in part.chunks):
            step = replace(step, scores=True)
        self._encode(part)
        inputs = self._inputs.arrays(step, part)
        output_rows = _output_rows(part)
        group_rows = step.tokens if step.scores else step.head_rows
        wanted_draws: list[RowSampling | None] = [None] * (self._mesh.data * group_rows)
        for request, request_rows in output_rows.items():
            sample_rows = rows.get(request, ())
            first = request_rows.start
            wanted_draws[first : first + len(sample_rows)] = sample_rows
        draws, device_draws = served(wanted_draws, self._vocab_size, self._largest_step.ranks)
        if draws is not None:
            inputs |= self._runner.draw_inputs(device_draws, draws)
        host_draws = wanted_draws != device_draws or any(request not in rows for request in output_rows)

        outputs = self._runner.step(replace(step, draws=draws), inputs, logits=host_draws)
        return {
            request: [
                outputs[row] if device_draws[row] is not None else replace(outputs[row], drawn=None)
                for row in request_rows
            ]
            for request, request_rows in output_rows.items()
        }

    def _encode(self, part: Part) -> None:
        """Encode the window of speech of a part's one prompt, if the model has an encoder; padding encodes silence."""
        if isinstance(self._runner, WindowRunner) and not part.shape.decodes:
            inputs = [chunk.request.inputs for chunk in part.chunks if chunk.request.inputs is not None]
            self._runner.encode([inputs[0].features if inputs else None])


def _output_rows(part: Part) -> dict[Request, range]:
    """The rows of the head's outputs that belong to each request which gets outputs.

    Rows are numbered through all groups. In a group the rows of sequences that decode beside prompts come first.
    """
    output_rows: dict[Request, range] = {}
    first_row = 0
    for group in range(len(part.groups)):
        for sub_part in (part,) if part.beside is None else (part.beside, part):
            shape = sub_part.shape.alone
            scores = any(chunk.scores for chunk in sub_part.chunks)
            rows_per_sequence = shape.tokens if shape.decodes or scores else 1
            for sequence, chunk in enumerate(sub_part.groups[group]):
                if chunk.chooses or chunk.scores:
                    count = chunk.count if chunk.scores else 1 + chunk.verified
                    first = first_row + sequence * rows_per_sequence
                    output_rows[chunk.request] = range(first, first + count)
            first_row += shape.sequences * rows_per_sequence
    return output_rows


def buckets_of(config: ModelConfig, buckets: Buckets) -> Buckets:
    """The buckets for a model: sequences decode beside prompts only where all of its layers take such steps."""
    mixes = buckets.mixes and compose(config).mixes
    return replace(buckets, mixes=mixes, whole_prompts=config.cross_positions > 0)


def largest_step(
    config: ModelConfig,
    mesh: Mesh,
    activations: np.dtype,
    weights: WeightDtypes,
    pools: Sequence[PagePool],
    slots: SlotPool | None,
    buckets: Buckets,
    candidates: int = 1,
    kv_cache_dtype: str = AUTO,
) -> StepShape:
    """Return the step that decides the sizes of states and constants."""
    return StepShape(
        Phase.decode,
        tokens=1,
        sequences=1,
        cache_length=buckets.context[-1],
        context=min(buckets.context[-1], config.context),
        ranks=mesh.tensor,
        activations=activations,
        weights=weights,
        candidates=candidates,
        padded=True,
        pages=sum(pool.count + 1 for pool in pools if pool.window is None),
        window_pages=tuple((pool.window, pool.count + 1) for pool in pools if pool.window),
        block_size=(slots or pools[0]).block_size,
        slots=slots.count + 1 if slots else 0,
        expert_ranks=mesh.expert,
        cache_dtype=kv_cache_dtype,
    )


def step_of(shape: PartShape, model_step: StepShape) -> StepShape:
    """The step that computes a part of this shape; ranks, dtypes, pages and slots are those of `model_step`."""
    return replace(
        model_step,
        phase=Phase.decode if shape.decodes else Phase.prefill,
        tokens=shape.rows,
        sequences=shape.sequences,
        cache_length=shape.context,
        prefix=shape.prefix,
        decoding=None if shape.beside is None else step_of(shape.beside, model_step),
    )
