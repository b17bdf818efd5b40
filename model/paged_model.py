"""Steps of the engine, computed with kernels on a device: requests of any lengths, whose states are pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from model.config import ModelConfig
from model.engine import Batch, Request
from model.engine.buckets import Buckets, BucketUse, Part, PartShape
from model.errors import ModelError
from model.launched import Device, LaunchedModel
from model.layers.launch import Phase, StepShape
from model.mesh import Mesh
from model.sampling import StepOutput
from model.state import PagePool
from model.weights import RankWeights


class PagedModel:
    """A model whose sequences hold pages of `pool`, up to the largest of `buckets.context` positions each.

    One more page than the pool has takes the keys and values of padding. `candidates` are as in KernelModel.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        pool: PagePool,
        buckets: Buckets,
        candidates: int = 1,
    ) -> None:
        """ModelError for longrope beyond the sequences whose rotations never change, and for too little memory."""
        context, first = buckets.context[-1], weights[0]
        if config.longest_short is not None and context > config.longest_short:
            raise ModelError(
                f"sequences of more than {config.longest_short} tokens change the rotations of cached keys; "
                f"give a max_model_len of at most {config.longest_short}"
            )
        self.use = BucketUse()
        self._buckets = buckets
        self._pool = pool
        self._positions = min(context, config.context)
        self._largest = StepShape(
            Phase.decode,
            tokens=1,
            sequences=1,
            cache_length=context,
            context=self._positions,
            ranks=device.ranks,
            activations=first.dtype,
            weights=first.arrays[next(iter(first.arrays))].dtype,
            candidates=candidates,
            padded=True,
            pages=pool.count + 1,
            block_size=pool.block_size,
        )
        purpose = f"{pool.count:,} pages of {pool.block_size} positions"
        kept = 4 * len(buckets.sequences) * len(buckets.context)
        self._model = LaunchedModel(
            config, weights, device, self._largest, Mesh(device.ranks), purpose, kept=kept
        )

    def step(self, batch: Batch) -> dict[Request, list[StepOutput]]:
        """Compute a batch; says what follows the last token of each request that chooses, and each of its drafts."""
        self._model.copy_pages(batch.copies)
        outputs: dict[Request, list[StepOutput]] = {}
        for part in self._buckets.parts(batch):
            self.use.add(part)
            rows = self._model.step(step_of(part.shape, self._largest), self._given(part))
            of_each = part.shape.tokens if part.shape.decodes else 1
            for number, chunk in enumerate(part.chunks):
                if chunk.chooses:
                    first = number * of_each
                    outputs[chunk.request] = rows[first : first + 1 + chunk.verified]
        return outputs

    def _given(self, part: Part) -> dict[str, np.ndarray]:
        """The arrays of a part, with an axis for the one group of ranks before them."""
        own, block = part.shape, self._pool.block_size
        spare = self._pool.count
        ids = np.zeros((own.sequences, own.tokens), np.int32)
        starts, counts = np.zeros((own.sequences, 1), np.int32), np.ones((own.sequences, 1), np.int32)
        tables = np.full((own.sequences, own.context // block), spare, np.int32)
        for row, chunk in enumerate(part.chunks):
            request, end = chunk.request, chunk.start + chunk.count
            ids[row, : chunk.count] = chunk.tokens
            starts[row], counts[row] = chunk.start, chunk.count
            used = request.table[: self._pool.pages_of(end)]
            tables[row, : len(used)] = used
        counts[len(part.chunks) :] = 0
        steps = np.arange(own.tokens, dtype=np.int32)
        positions = starts + steps
        pages = np.take_along_axis(tables, np.minimum(positions // block, tables.shape[1] - 1), axis=1)
        slots = np.where(steps < counts, pages, spare) * block + positions % block
        ends = np.arange(own.sequences) * own.tokens + np.maximum(counts[:, 0], 1) - 1
        given = {
            "ids": ids,
            "positions": np.minimum(positions, self._positions - 1),
            "slots": slots,
            "ends": ends,
        }
        columns = {name: each.astype(np.int32).reshape(1, -1, 1) for name, each in given.items()}
        return {**columns, "block_tables": tables[None]}


def step_of(part: PartShape, paged: StepShape) -> StepShape:
    """The step that computes a part, of a model with the pages of another step."""
    return replace(
        paged,
        phase=Phase.decode if part.decodes else Phase.prefill,
        tokens=part.sequences * part.tokens,
        sequences=part.sequences,
        cache_length=part.context,
        prefix=part.prefix,
    )
