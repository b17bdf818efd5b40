"""The engine's model runner, which computes batches of requests on paged KV caches.

Four records describe a step; each is computed from the record before it:

    Batch        the scheduler's decision: a chunk of tokens of each request (vLLM: SchedulerOutput)
    PaddedBatch  chunks that are launched together, and the StepShape that they are padded to
    StepShape    rounded sizes with the model's dtypes, ranks and pages, which determine the launch list
    StepInputs   the arrays of the step: ids, positions, slot mapping, block tables, logits indices

Sizes are rounded up to buckets. Padding tokens are written to a page that no request reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from model.config import ModelConfig
from model.engine import Batch, Request
from model.engine.buckets import Buckets
from model.engine.padded_batch import BucketUse, PaddedBatch
from model.engine.speculation import NO_ROWS, Rows
from model.execution.bound_launch import Device
from model.execution.expert_load import ExpertLoad
from model.layers.cache_formats import AUTO, CACHE_FORMATS, UNSCALED, CacheScales
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.paged import STATES, CacheGroup
from model.layers.sample import DRAWS, select_device_rows
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.step_inputs import StepInputs
from model.runners.window import WindowRunner, make_token_runner
from model.sampling import RowSampling, StepOutput
from model.state import PagePool, SlotPool


class PagedModel:
    """Model runner of the engine, which computes its batches on a device with paged KV caches.

    Each data-parallel group has pages and slots of its own and computes its own requests. On the device each pool has
    one more page, and the slots one more slot, for padding. `use` counts launched steps.
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
        cache_scales: CacheScales = UNSCALED,
    ) -> None:
        """Put weights, pages and slots on the device.

        Args:
            config: The model.
            weights: The distinct weight shards of the ranks in this process.
            device: The device that launches kernels.
            pools: The page pool of each cache group: layers without a window, and layers of each window.
            buckets: The sizes that steps are rounded up to.
            candidates: Number of likeliest tokens that the sampler needs; see `KernelModel`.
            slots: Slots of recurrent states or of encoded speech, if the model has any.
            mesh: The ranks of each axis, by default tensor parallelism over all ranks of the device.
            kv_cache_dtype: One of `CACHE_FORMATS`.
            cache_scales: Scales of the caches, if the format has any.

        Raises:
            ModelError: The pages and slots do not fit into memory.
        """
        assert config.longest_short is None, (
            "pages are shared by sequences of all lengths: see ModelConfig.fix_rope_length"
        )
        self._mesh = mesh = mesh or Mesh(device.ranks)
        self._pools = [pools] if isinstance(pools, PagePool) else list(pools)
        self._slots = slots
        self._cache_groups: list[CacheGroup] = [pool.window for pool in self._pools] + (
            [STATES] if slots else []
        )
        self._vocab_size = config.vocab_size
        self._packs_pages = CACHE_FORMATS[kv_cache_dtype].packs_pages
        first_rank = weights[0]
        self._largest_step = largest_step(
            config,
            mesh,
            first_rank.dtype,
            first_rank.dtypes,
            self._pools,
            slots,
            buckets,
            candidates,
            kv_cache_dtype,
            device.sorted_expert_width,
            cache_scales,
        )
        self._buckets = buckets.for_model(config, self._largest_step)
        self.use = BucketUse(self._buckets, ExpertLoad.for_model(config, mesh))
        self._inputs = StepInputs(self._largest_step.context, self._pools, slots, config.cross_positions)
        self._runner = make_token_runner(
            config,
            weights,
            device,
            self._largest_step,
            mesh,
            self._describe_memory("states" if config.spectrum is None else "windows"),
            max_bound_steps=4 * (1 + len(DRAWS)) * len(buckets.sequences) * len(buckets.context),
            expert_load=self.use.experts,
        )

    def _describe_memory(self, content: str) -> str:
        """Return a phrase that names the pages and slots, which messages about memory quote.

        Args:
            content: What the slots contain, such as "states".
        """
        pages = sum(pool.count for pool in self._pools)
        purposes = [f"{pages:,} pages of {self._largest_step.block_size} positions"] if pages else []
        if self._slots:
            purposes.append(f"{self._slots.count:,} slots of {content}")
        return " and ".join(purposes)

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        """Copy pages, compute a batch, and return the outputs of the requests that sample or score tokens.

        If the cache format packs full pages, those that the batch fills are packed then.

        Args:
            batch: The scheduled chunks and page copies.
            rows: The sampling parameters of the rows of each request. The device draws a row's token where it can; all
                other outputs have logits.

        Returns:
            For a request that samples, the output of its next token and of the token after each verified draft token.
            For a request that scores, the output of each token of its chunk.
        """
        for number, cache_group in enumerate(self._cache_groups):
            group_copies = [
                {new: old for (pool_number, new), old in group.copies.items() if pool_number == number}
                for group in batch.split_groups(self._mesh.data)
            ]
            self._runner.network.copy_pages(group_copies, cache_group)
        # A chunk that scores is launched alone, because the head computes the logits of all its tokens.
        scored = [Batch({chunk.request: chunk}) for chunk in batch.chunks.values() if chunk.scores]
        unscored = {request: chunk for request, chunk in batch.chunks.items() if not chunk.scores}
        outputs: dict[Request, list[StepOutput]] = {}
        for sub_batch in (Batch(unscored), *scored):
            for padded_batch in self._buckets.pad(*sub_batch.split_groups(self._mesh.data)):
                self.use.add(padded_batch)
                outputs |= self._compute(padded_batch, rows)
        if self._packs_pages:
            groups = batch.split_groups(self._mesh.data)
            full_pages = [self._inputs.list_full_pages(group.chunks.values()) for group in groups]
            self._runner.network.pack_pages(full_pages)
        return outputs

    def launch_padding(self, step: StepShape) -> None:
        """Launch a step of padding only, so that its graph is compiled before requests need it.

        No request's pages change.
        """
        no_chunks = ((),) * self._mesh.data
        decoding = None if step.decoding is None else PaddedBatch(step.decoding, no_chunks)
        padded_batch = PaddedBatch(step, no_chunks, decoding)
        self._encode(padded_batch)
        inputs = self._inputs.build_arrays(padded_batch)
        if step.draws is not None:
            inputs |= self._runner.draw_inputs([None] * (self._mesh.data * step.head_rows), step.draws)
        self._runner.step(step, inputs)

    def launch_packs(self, count: int) -> None:
        """Pack the padding page `count` times, so that the graph is compiled before requests need it."""
        padding = self._runner.network.padding_pages
        self._runner.network.pack_pages([[padding] * count] * self._mesh.data)

    def launch_copies(self, count: int, cache_group: CacheGroup) -> None:
        """Launch copies of the first `count` pages or slots of a cache group onto themselves.

        Contents stay, but the graph of such copies is compiled before requests need it.
        """
        self._runner.network.copy_pages(
            [{page: page for page in range(count)}] * self._mesh.data, cache_group
        )

    def _compute(self, padded_batch: PaddedBatch, rows: Rows) -> dict[Request, list[StepOutput]]:
        """Run the step of a padded batch, and return the outputs of its requests that sample or score.

        Args:
            padded_batch: The padded batch.
            rows: The sampling parameters of each request of the step.
        """
        step = padded_batch.step
        if step.phase is Phase.prefill and any(chunk.scores for chunk in padded_batch.chunks):
            step = replace(step, scores=True)
        self._encode(padded_batch)
        inputs = self._inputs.build_arrays(padded_batch)
        output_rows = _find_output_rows(padded_batch)
        group_rows = step.tokens if step.scores else step.head_rows
        sample_rows: list[RowSampling | None] = [None] * (self._mesh.data * group_rows)
        for request, request_rows in output_rows.items():
            request_samples = rows.get(request, ())
            sample_rows[request_rows.start : request_rows.start + len(request_samples)] = request_samples
        draws, device_rows = select_device_rows(sample_rows, self._vocab_size, self._largest_step.ranks)
        if draws is not None:
            inputs |= self._runner.draw_inputs(device_rows, draws)
        needs_logits = sample_rows != device_rows or any(request not in rows for request in output_rows)

        outputs = self._runner.step(replace(step, draws=draws), inputs, logits=needs_logits)
        return {
            request: [
                outputs[row] if device_rows[row] is not None else replace(outputs[row], drawn=None)
                for row in request_rows
            ]
            for request, request_rows in output_rows.items()
        }

    def _encode(self, padded_batch: PaddedBatch) -> None:
        """Run the encoder of a speech model on the window of the padded batch's one prompt, or on silence for padding.

        Does nothing for a decode step or a model without such an encoder.
        """
        if isinstance(self._runner, WindowRunner) and padded_batch.step.phase is Phase.prefill:
            inputs = next((chunk.request.inputs for chunk in padded_batch.chunks), None)
            self._runner.encode([None if inputs is None else inputs.features])


def _find_output_rows(padded_batch: PaddedBatch) -> dict[Request, range]:
    """Return, for each request that samples or scores, the range of the head's rows that compute its outputs.

    Row numbers continue from group to group. In a group the rows of sequences that decode with prompts come first.
    """
    decoding = () if padded_batch.decoding is None else (padded_batch.decoding,)
    output_rows: dict[Request, range] = {}
    first_row = 0
    for group in range(len(padded_batch.groups)):
        for sub_batch in (*decoding, padded_batch):
            step = sub_batch.step
            scores = any(chunk.scores for chunk in sub_batch.chunks)
            rows_per_sequence = step.new_tokens if step.phase is Phase.decode or scores else 1
            for sequence, chunk in enumerate(sub_batch.groups[group]):
                if chunk.samples or chunk.scores:
                    count = chunk.num_scheduled_tokens if chunk.scores else 1 + chunk.num_draft_tokens
                    first = first_row + sequence * rows_per_sequence
                    output_rows[chunk.request] = range(first, first + count)
            first_row += step.sequences * rows_per_sequence
    return output_rows


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
    sorted_expert_width: float = 0.0,
    cache_scales: CacheScales = UNSCALED,
) -> StepShape:
    """Return the step that determines the sizes of states and constants on the device.

    Arguments are those of `PagedModel`, except:

    Args:
        activations: Dtype of activations.
        weights: Dtypes of weights.
        sorted_expert_width: That of the device.
    """
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
        cache_scales=cache_scales,
        sorted_expert_width=sorted_expert_width,
    )
