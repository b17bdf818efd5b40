"""The model runner of the engine: it computes batches of requests whose keys and values are in pages.

A step goes through four records, each made of the one before it:

    Batch        the scheduler's decision: a chunk of tokens of each request (vLLM: SchedulerOutput)
    PaddedBatch  chunks that are launched together, and the StepShape that they are padded to
    StepShape    rounded sizes with the model's dtypes, ranks and pages: what the launch list is computed from
    StepInputs   the arrays of the step: ids, positions, slot mapping, block tables, logits indices

Sizes are rounded up to buckets, so there is padding. Tokens of padding are written to a page that no request reads.
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
from model.layers.cache import AUTO
from model.layers.launch import Phase, StepShape, WeightDtypes
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
            "pages are shared by sequences of all lengths: see ModelConfig.fix_rope_length"
        )
        self._mesh = mesh = mesh or Mesh(device.ranks)
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
            buckets,
            candidates,
            kv_cache_dtype,
        )
        self._buckets = buckets.for_model(config, self._largest_step)
        self.use = BucketUse(self._buckets, ExpertLoad.of(config, mesh))
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
        """Compute a batch; returns the outputs of each request that samples a token or scores its tokens.

        A request that samples gets one output for its next token, and one more for each draft that is verified. A
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
        unscored = {request: chunk for request, chunk in batch.chunks.items() if not chunk.scores}
        outputs: dict[Request, list[StepOutput]] = {}
        for sub_batch in (Batch(unscored), *scored):
            for padded_batch in self._buckets.pad(*sub_batch.groups(self._mesh.data)):
                self.use.add(padded_batch)
                outputs |= self._compute(padded_batch, rows)
        return outputs

    def launch_padding(self, step: StepShape) -> None:
        """Launch a step without any request, so that its graph is compiled; no request's pages change."""
        no_chunks = ((),) * self._mesh.data
        decoding = None if step.decoding is None else PaddedBatch(step.decoding, no_chunks)
        padded_batch = PaddedBatch(step, no_chunks, decoding)
        self._encode(padded_batch)
        inputs = self._inputs.arrays(padded_batch)
        if step.draws is not None:
            inputs |= self._runner.draw_inputs([None] * (self._mesh.data * step.head_rows), step.draws)
        self._runner.step(step, inputs)

    def launch_copies(self, count: int, cache_group: CacheGroup) -> None:
        """Launch copies of the first `count` pages or slots of a cache group onto themselves."""
        self._runner.network.copy_pages(
            [{page: page for page in range(count)}] * self._mesh.data, cache_group
        )

    def _compute(self, padded_batch: PaddedBatch, rows: Rows) -> dict[Request, list[StepOutput]]:
        """Run the step of a padded batch; returns its outputs by request."""
        step = padded_batch.step
        if step.phase is Phase.prefill and any(chunk.scores for chunk in padded_batch.chunks):
            step = replace(step, scores=True)
        self._encode(padded_batch)
        inputs = self._inputs.arrays(padded_batch)
        output_rows = _output_rows(padded_batch)
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

    def _encode(self, padded_batch: PaddedBatch) -> None:
        """Encode the speech of the one prompt of a padded batch, if the model has an encoder; padding is silence."""
        if isinstance(self._runner, WindowRunner) and padded_batch.step.phase is Phase.prefill:
            requests = [chunk.request for chunk in padded_batch.chunks]
            inputs = [request.inputs for request in requests if request.inputs is not None]
            self._runner.encode([inputs[0].features if inputs else None])


def _output_rows(padded_batch: PaddedBatch) -> dict[Request, range]:
    """Return the rows of the head's outputs that belong to each request which gets outputs.

    Rows are numbered through all groups. In a group the rows of sequences that decode with prompts come first.
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
