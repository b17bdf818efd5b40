"""The input arrays of a step on pages, computed on the host from the chunks of tokens that the step computes.

`PagedModel` makes them for each padded batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from model.engine import Chunk
from model.engine.padded_batch import PaddedBatch
from model.layers import paged
from model.layers.cross_attention import LAST_OF_WINDOW
from model.layers.launch import Phase, StepShape
from model.state import PagePool, SlotPool

Arrays = dict[str, np.ndarray]
"""Input arrays by name."""


@dataclass(frozen=True)
class StepInputs:
    """Builder of the input arrays of a model's steps; `Value` describes the arrays.

    `context` is the largest number of positions of a sequence. `pools` has the page pool of each cache group. `slots`
    has the recurrent states or the encoded speech of sequences, if the model has any. `encoder_positions` is the number
    of positions of an encoder's window, or 0.
    """

    context: int
    pools: Sequence[PagePool]
    slots: SlotPool | None
    encoder_positions: int

    def build_arrays(self, padded_batch: PaddedBatch) -> Arrays:
        """Return the input arrays of a padded batch's step by name, int32 [groups, ...] each."""
        groups = range(len(padded_batch.groups))
        group_arrays = [self._build_group_arrays(padded_batch, group) for group in groups]
        return {name: np.stack([arrays[name] for arrays in group_arrays]) for name in group_arrays[0]}

    def _build_group_arrays(self, padded_batch: PaddedBatch, group: int) -> Arrays:
        """Return the input arrays of one data-parallel group by name, int32.

        Columns [rows, 1] have a number for each token or sequence; block tables are [sequences, blocks]. Rows of
        sequences that decode with prompts come first.
        """
        step, decoding = padded_batch.step, padded_batch.decoding
        columns, tables = self._build_sequence_arrays(step.prompts, padded_batch.groups[group])
        if decoding is not None:
            decode_columns, decode_tables = self._build_sequence_arrays(decoding.step, decoding.groups[group])
            columns["logits_indices"] = columns["logits_indices"] + decoding.step.tokens
            columns = {
                name: np.concatenate([decode_columns[name], column]) for name, column in columns.items()
            }
            prompt_tables = {
                name.replace("block_tables", "prompt_tables"): table for name, table in tables.items()
            }
            tables = decode_tables | prompt_tables
        return {name: column.astype(np.int32).reshape(-1, 1) for name, column in columns.items()} | tables

    def _build_sequence_arrays(self, step: StepShape, chunks: Sequence[Chunk]) -> tuple[Arrays, Arrays]:
        """Return the inputs of a step that only decodes, or only computes prompts.

        Args:
            step: The sizes of the step.
            chunks: A chunk for each sequence; sequences without a chunk are padding.

        Returns:
            Arrays with one number for each token or sequence, and block tables [sequences, blocks], by name.
        """
        ids = np.zeros((step.sequences, step.new_tokens), np.int32)
        num_computed_tokens = np.zeros((step.sequences, 1), np.int32)
        num_scheduled_tokens = np.zeros((step.sequences, 1), np.int32)
        for row, chunk in enumerate(chunks):
            ids[row, : chunk.num_scheduled_tokens] = chunk.tokens
            num_computed_tokens[row] = chunk.num_computed_tokens
            num_scheduled_tokens[row] = chunk.num_scheduled_tokens
        positions = num_computed_tokens + np.arange(step.new_tokens, dtype=np.int32)
        columns = {
            "ids": ids,
            "positions": np.minimum(positions, self.context - 1),
            "logits_indices": _compute_logits_indices(step, num_scheduled_tokens),
        }
        if self.slots is not None:
            state_slots = np.full(step.sequences, self.slots.count)
            state_slots[: len(chunks)] = [chunk.request.slot for chunk in chunks]
            columns |= {
                "state_slots": state_slots,
                "num_computed_tokens": num_computed_tokens,
                "num_scheduled_tokens": num_scheduled_tokens,
            }
        if self.encoder_positions:
            columns[LAST_OF_WINDOW] = np.full(step.sequences, self.encoder_positions - 1)
        tables: Arrays = {}
        for number, pool in enumerate(self.pools):
            block_table, first_blocks = self._build_block_table(step, number, chunks)
            slot_mapping = _compute_slot_mapping(
                block_table, first_blocks, positions, num_scheduled_tokens, pool
            )
            tables[paged.name_in_group("block_tables", step, pool.window)] = block_table
            columns[paged.name_in_group("slot_mapping", step, pool.window)] = slot_mapping
            if pool.window is not None:
                last_position = block_table.shape[1] * pool.block_size - 1
                positions_in_table = np.minimum(positions - first_blocks * pool.block_size, last_position)
                columns[paged.name_in_group("positions", step, pool.window)] = positions_in_table
        return {name: column.reshape(-1) for name, column in columns.items()}, tables

    def _build_block_table(
        self, step: StepShape, pool_number: int, chunks: Sequence[Chunk]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the block table of one page pool, int32 [sequences, blocks], and first blocks, int32 [sequences, 1].

        An element is the page of a block. For a windowed pool, a row begins with the block that `first_blocks` names,
        the first one in the window. Blocks without a page have the padding page, whose number is `pool.count`.

        Args:
            step: The sizes of the step.
            pool_number: Index of the pool.
            chunks: A chunk for each sequence; sequences without a chunk are padding.
        """
        pool = self.pools[pool_number]
        blocks = step.for_window(pool.window).cache_length // pool.block_size
        block_table = np.full((step.sequences, blocks), pool.count, np.int32)
        first_blocks = np.zeros((step.sequences, 1), np.int32)
        for row, chunk in enumerate(chunks):
            table = chunk.request.tables[pool_number]
            pages = table.pages[: pool.count_pages(chunk.seq_len) - table.first]
            block_table[row, : len(pages)] = pages
            first_blocks[row] = table.first
        return block_table, first_blocks

    def list_full_pages(self, chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
        """Return the pages that chunks fill, as pairs of their number among the newest pages and of a full page.

        A chunk of several tokens begins a page, as `SchedulerOptions.whole_pages` arranges.
        """
        numbers = {pool.window: number for number, pool in enumerate(self.pools)}
        newest, packed = numbers[paged.NEWEST], numbers[None]
        size = self.pools[packed].block_size
        pages: list[tuple[int, int]] = []
        for chunk in chunks:
            start, end = chunk.num_computed_tokens, chunk.num_computed_tokens + chunk.num_scheduled_tokens
            assert chunk.num_scheduled_tokens == 1 or start % size == 0, f"a chunk starts at position {start}"
            newest_table, table = (chunk.request.tables[number] for number in (newest, packed))
            for block in range(start // size, end // size):
                pages.append((newest_table.pages[block - newest_table.first], table.pages[block]))
        return pages


def _compute_logits_indices(step: StepShape, num_scheduled_tokens: np.ndarray) -> np.ndarray:
    """Return the rows after which the step computes logits.

    These are all rows of a decode step, and the last token of each prompt.
    """
    if step.phase is Phase.decode:
        return np.arange(step.tokens)
    last_tokens = np.maximum(num_scheduled_tokens[:, 0], 1) - 1
    return np.arange(step.sequences) * step.new_tokens + last_tokens


def _compute_slot_mapping(
    block_table: np.ndarray,
    first_blocks: np.ndarray,
    positions: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    pool: PagePool,
) -> np.ndarray:
    """Return where the keys and values of each token are written, [sequences, tokens]: page * block size + offset.

    Padding, and tokens before the first block of the table, are written to the padding page.

    Args:
        block_table: Page of each block, [sequences, blocks].
        first_blocks: Number of the block in column 0 of the table, [sequences, 1].
        positions: Position of each token in its sequence, [sequences, tokens].
        num_scheduled_tokens: Number of tokens of each sequence that are no padding, [sequences, 1].
        pool: The page pool.
    """
    blocks = positions // pool.block_size - first_blocks
    pages = np.take_along_axis(block_table, np.clip(blocks, 0, block_table.shape[1] - 1), axis=1)
    is_written = (np.arange(positions.shape[1]) < num_scheduled_tokens) & (blocks >= 0)
    return np.where(is_written, pages, pool.count) * pool.block_size + positions % pool.block_size
