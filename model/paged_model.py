"""Steps of the engine, computed with kernels on a device: requests of any lengths, with states in pages and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from model.bound_launch import Device
from model.config import ModelConfig
from model.engine import Batch, Chunk, Request
from model.engine.buckets import MOST_ROWS, Buckets, BucketUse, Part, PartShape
from model.engine.speculation import NO_ROWS, Rows
from model.expert_load import ExpertLoad
from model.families import compose
from model.launched import LaunchedModel
from model.layers import paged
from model.layers.cross_attention import LAST_OF_WINDOW
from model.layers.launch import Decoding, Draws, Phase, StepShape
from model.layers.paged import STATES, Kind
from model.layers.sample import DRAWS, arguments_of, served
from model.mesh import Mesh
from model.sampling import SampleRow, StepOutput
from model.state import PagePool, SlotPool
from model.weights import RankWeights


class PagedModel:
    """A model whose sequences hold pages of `pools`, up to the largest of `buckets.context` positions each.

    A layer with a window uses the pool of that window if there is one, and the pool without a window otherwise. Each
    pool has one page more on the device, where padding writes. Recurrent layers have their states in `slots`, with one
    more as well; so have windows of speech, which are encoded with their prompts. `candidates` are as in KernelModel.
    Each group of `mesh` has as many pages and slots, and computes the requests that are given to it.
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
    ) -> None:
        """ModelError for too little memory."""
        self._mesh = mesh = mesh or Mesh(device.ranks)
        assert config.longest_short is None, (
            "pages are shared by sequences of all lengths: see ModelConfig.of_length"
        )
        buckets, first = buckets_of(config, buckets), weights[0]
        self.use = BucketUse(buckets, ExpertLoad.of(config, mesh))
        self._buckets = buckets
        self._pools = [pools] if isinstance(pools, PagePool) else list(pools)
        self._slots = slots
        self._kinds: list[Kind] = [pool.window for pool in self._pools] + ([STATES] if slots else [])
        self._block = (slots or self._pools[0]).block_size
        dtypes = first.dtype, first.arrays[next(iter(first.arrays))].dtype
        self._largest = largest_step(config, mesh, dtypes, self._pools, slots, buckets, candidates)
        self._positions = self._largest.context
        count = sum(pool.count for pool in self._pools)
        purpose = f"{count:,} pages of {self._block} positions" if count else ""
        if slots:
            what = "windows" if config.cross_positions else "states"
            purpose += f"{' and ' if count else ''}{slots.count:,} slots of {what}"
        self._vocabulary, self._window = config.vocab_size, config.cross_positions
        self._spectrum = config.spectrum
        kept = 4 * (1 + len(DRAWS)) * len(buckets.sequences) * len(buckets.context)
        self._model = LaunchedModel(
            *(config, weights, device, self._largest, mesh, purpose), kept=kept, expert_load=self.use.experts
        )

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        """Compute a batch; says what follows the last token of each request that chooses, and each of its drafts.

        The device draws for those of the `rows` that it can; what follows any other has logits. Chunks that score are
        parts of their own, of whose tokens it says what follows each.
        """
        of_groups = batch.groups(self._mesh.data)
        for number, kind in enumerate(self._kinds):
            copies = [
                {new: old for (own, new), old in each.copies.items() if own == number} for each in of_groups
            ]
            self._model.copy_pages(copies, kind)
        outputs: dict[Request, list[StepOutput]] = {}
        scored = [chunk for chunk in batch.chunks.values() if chunk.scores]
        others = Batch({each: chunk for each, chunk in batch.chunks.items() if not chunk.scores})
        alone = [Batch({chunk.request: chunk}) for chunk in scored]
        for each in (others, *alone):
            for part in self._buckets.parts(*each.groups(self._mesh.data)):
                self.use.add(part)
                outputs |= self._computed(part, rows)
        return outputs

    def launch_padding(self, part: PartShape, draws: Draws | None) -> None:
        """Launch a step of a shape without any request: its graph is compiled, and nothing that is read changes."""
        nobody = ((),) * self._mesh.data
        beside = None if part.beside is None else Part(part.beside, nobody)
        arrays = self._given(Part(part, nobody, beside))
        shape = replace(step_of(part, self._largest), draws=draws)
        if self._window and not part.decodes:
            self._encode(Part(part, nobody))
        if draws is not None:
            of_rows = arguments_of([None] * shape.head_rows, self._vocabulary, draws.whole)
            arrays |= {name: each[None] for name, each in of_rows.items()}
        self._model.step(shape, arrays)

    def launch_copies(self, count: int, kind: Kind) -> None:
        """Copy the first pages or slots of a kind onto themselves."""
        self._model.copy_pages([{page: page for page in range(count)}] * self._mesh.data, kind)

    def _computed(self, part: Part, rows: Rows) -> dict[Request, list[StepOutput]]:
        scores = any(chunk.scores for chunk in part.chunks)
        shape = step_of(part.shape, self._largest)
        if scores and not part.shape.decodes:
            shape = replace(shape, scores=True)
        places = _places(part)
        if self._window and not part.shape.decodes:
            self._encode(part)
        of_group = shape.tokens if shape.scores else shape.head_rows
        asked: list[SampleRow | None] = [None] * (self._mesh.data * of_group)
        for request, own in places.items():
            given = rows.get(request, ())
            asked[own.start : own.start + len(given)] = given
        draws, drawn = served(asked, self._vocabulary, self._largest.ranks)
        host = asked != drawn or any(request not in rows for request in places)
        arrays = self._given(part)
        if draws is not None:
            of_rows = arguments_of(drawn, self._vocabulary, draws.whole)
            arrays |= {name: each.reshape(self._mesh.data, of_group, -1) for name, each in of_rows.items()}
        if shape.scores:
            arrays["ends"] = np.zeros((self._mesh.data, min(shape.tokens, MOST_ROWS), 1), np.int32)
        found = self._model.step(replace(shape, draws=draws), arrays, logits=host)
        return {
            request: [found[at] if drawn[at] else replace(found[at], drawn=None) for at in own]
            for request, own in places.items()
        }

    def _encode(self, part: Part) -> None:
        """Run the encoder on the window of the one prompt of a part, or of nobody's."""
        assert self._spectrum is not None, "no encoder"
        spectra = [each.request.speech.features for each in part.chunks if each.request.speech is not None]
        features = spectra[0] if spectra else np.zeros(self._spectrum, np.float32)
        self._model.encode(features[None, None])

    def _given(self, part: Part) -> dict[str, np.ndarray]:
        """The arrays of a part, with an axis for the groups of ranks before them."""
        of_groups = [self._of_group(part, group) for group in range(self._mesh.data)]
        return {name: np.stack([each[name] for each in of_groups]) for name in of_groups[0]}

    def _of_group(self, part: Part, group: int) -> dict[str, np.ndarray]:
        """The arrays of a group."""
        columns, tables = self._of_sequences(part, group)
        if part.beside is not None:
            first, of_decoding = self._of_sequences(part.beside, group)
            columns["ends"] = columns["ends"] + part.beside.shape.rows
            columns = {name: np.concatenate([first[name], own]) for name, own in columns.items()}
            prompts = {name.replace("block_tables", "prompt_tables"): own for name, own in tables.items()}
            tables = of_decoding | prompts
        return {name: own.astype(np.int32).reshape(-1, 1) for name, own in columns.items()} | tables

    def _of_sequences(self, part: Part, group: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays of a group's chunks of one kind: columns of numbers for their rows, and tables."""
        own, chunks = part.shape.alone, part.groups[group]
        ids = np.zeros((own.sequences, own.tokens), np.int32)
        starts, counts = np.zeros((own.sequences, 1), np.int32), np.ones((own.sequences, 1), np.int32)
        for row, chunk in enumerate(chunks):
            ids[row, : chunk.count] = chunk.tokens
            starts[row], counts[row] = chunk.start, chunk.count
        counts[len(chunks) :] = 0
        positions = starts + np.arange(own.tokens, dtype=np.int32)
        ends = np.arange(own.sequences) * own.tokens + np.maximum(counts[:, 0], 1) - 1
        if own.decodes:
            ends = np.arange(own.rows)
        given = {"ids": ids, "positions": np.minimum(positions, self._positions - 1), "ends": ends}
        if self._slots is not None:
            slots = np.full(own.sequences, self._slots.count)
            slots[: len(chunks)] = [chunk.request.slot for chunk in chunks]
            given |= {"state_slots": slots, "starts": starts, "counts": counts}
        if self._window:
            given[LAST_OF_WINDOW] = np.full(own.sequences, self._window - 1)
        tables: dict[str, np.ndarray] = {}
        for kind in range(len(self._pools)):
            name, table, columns = self._of_kind(kind, own, chunks, positions, counts)
            tables[name] = table
            given = columns | given
        return {name: each.reshape(-1) for name, each in given.items()}, tables

    def _of_kind(
        self,
        kind: int,
        shape: PartShape,
        chunks: Sequence[Chunk],
        positions: np.ndarray,
        counts: np.ndarray,
    ) -> tuple[str, np.ndarray, dict[str, np.ndarray]]:
        """The tables of pages of one kind with their name; tokens' slots, and positions in the tables."""
        pool, step, block = self._pools[kind], step_of(shape, self._largest), self._block
        spare = pool.count
        blocks = step.of_window(pool.window).cache_length // block
        tables, firsts = np.full((len(positions), blocks), spare, np.int32), np.zeros_like(counts)
        for row, chunk in enumerate(chunks):
            table, end = chunk.request.tables[kind], pool.pages_of(chunk.start + chunk.count)
            used = table.pages[: end - table.first]
            firsts[row], tables[row, : len(used)] = table.first, used
        places = positions // block - firsts
        pages = np.take_along_axis(tables, np.clip(places, 0, blocks - 1), axis=1)
        is_written = (np.arange(positions.shape[1]) < counts) & (places >= 0)
        own_slots = np.where(is_written, pages, spare) * block + positions % block
        own_positions = np.minimum(positions - firsts * block, blocks * block - 1)
        table_name, slots, places_name = (
            paged.of_kind(name, step, pool.window) for name in ("block_tables", "slots", "positions")
        )
        return table_name, tables, {slots: own_slots, places_name: own_positions}


def _places(part: Part) -> dict[Request, range]:
    """The rows of the head's outputs, group after group, that are of each request which gets some."""
    found: dict[Request, range] = {}
    first = 0
    for group in range(len(part.groups)):
        for own in (part,) if part.beside is None else (part.beside, part):
            shape, chunks = own.shape.alone, own.groups[group]
            scores = any(chunk.scores for chunk in own.chunks)
            of_each = shape.tokens if shape.decodes or scores else 1
            for number, chunk in enumerate(chunks):
                at, count = first + number * of_each, chunk.count if chunk.scores else 1 + chunk.verified
                if chunk.chooses or chunk.scores:
                    found[chunk.request] = range(at, at + count)
            first += shape.sequences * of_each
    return found


def buckets_of(config: ModelConfig, buckets: Buckets) -> Buckets:
    """Buckets for a model: sequences decode beside prompts only where all of its layers take both."""
    mixes, takes_speech = buckets.mixes and compose(config).mixes, config.cross_positions > 0
    return replace(buckets, mixes=mixes, takes_speech=takes_speech)


def largest_step(
    config: ModelConfig,
    mesh: Mesh,
    dtypes: tuple[np.dtype, np.dtype],
    pools: Sequence[PagePool],
    slots: SlotPool | None,
    buckets: Buckets,
    candidates: int = 1,
) -> StepShape:
    """The step whose states and constants a model holds; `dtypes` are those of activations and of weights."""
    activations, weights = dtypes
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
    )


def step_of(part: PartShape, paged: StepShape) -> StepShape:
    """The step that computes a part, of a model with the pages of another step."""
    beside = part.beside
    return replace(
        paged,
        phase=Phase.decode if part.decodes else Phase.prefill,
        tokens=part.rows,
        sequences=part.sequences,
        cache_length=part.context,
        prefix=part.prefix,
        decoding=None if beside is None else Decoding(beside.sequences, beside.tokens, beside.context),
    )
