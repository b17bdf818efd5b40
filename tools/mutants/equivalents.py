"""Mutants that are no faults, by their keys, with the reason why no input can tell them from the original."""

from __future__ import annotations

from fnmatch import fnmatchcase

EQUIVALENTS: dict[str, tuple[str, ...]] = {
    "the blocks overlap: some rows or columns are computed again, from the same operands, with the same result": (
        "*.* bound: range(0, tokens, PARTITIONS): PARTITIONS - 1",
        "*.* bound: range(0, tokens, step): step - 1",
        "attention_decode.attention_decode bound: range(0, capacity, step): step - 1",
        "attention_decode.attention_decode bound: range(0, kv_heads, together): together - 1",
        "tiles.load_transposed bound: range(0, rows, PARTITIONS): PARTITIONS - 1",
        "tiles.transpose_into bound: range(0, full, per_bank): per_bank - 1",
    ),
    "the tile has partitions, or a block, that nobody touches; every operand is sliced to what was written": (
        "*.* clamp: min(tokens, PARTITIONS) -> PARTITIONS",
        "attention_decode.block_diagonal_queries clamp: min(kv_heads, PARTITIONS // depth) -> PARTITIONS // depth",
        "tiles.load_blocks clamp: min(height, depth) -> height",
        "tiles.load_transposed clamp: min(depth, PARTITIONS) -> PARTITIONS",
        "tiles.transposed clamp: min(width, columns) -> width",
    ),
    "a smaller tile, or fewer banks: the same sums in more instructions; only time differs": (
        "attention_decode.attention_decode arithmetic: BANK * ACCUMULATOR_BANKS -> (BANK) + (ACCUMULATOR_BANKS)",
        "attention_decode.attention_decode clamp: max(1, BANK * ACCUMULATOR_BANKS // depth) -> 1",
        "tiles.columns_at_once clamp: max(1, ACCUMULATOR_BANKS // blocks(rows)) -> 1",
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 - 1",
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 // 2",
        "tiles.constants tile size: BANK = 512 // 2",
        "tiles.constants tile size: RESIDENT_ELEMENTS = 16384 - 1",
        "tiles.constants tile size: RESIDENT_ELEMENTS = 16384 // 2",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 - 1",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 // 2",
        "tiles.multiply clamp: max(1, WEIGHT_ELEMENTS // columns) -> 1",
        "tiles.rows_at_once arithmetic: PARTITIONS * max(1, tiles) -> (PARTITIONS) + (max(1, tiles))",
        "tiles.rows_at_once clamp: max(1, tiles) -> 1",
    ),
    "another tile size that fits as well, at the largest sizes too (the dry cases); only time differs": (
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 + 1",
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 * 2",
        "tiles.constants tile size: RESIDENT_ELEMENTS = 16384 + 1",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 + 1",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 * 2",
    ),
    "the limits that the kernels assert keep the other argument at 1 or more": (
        "attention_decode.attention_decode clamp: max(1, BANK * ACCUMULATOR_BANKS // depth) -> BANK*",
        "tiles.columns_at_once clamp: max(1, ACCUMULATOR_BANKS // blocks(rows)) -> ACCUMULATOR_BANKS // blocks(rows)",
        "tiles.multiply clamp: max(1, WEIGHT_ELEMENTS // columns) -> WEIGHT_ELEMENTS // columns",
        "tiles.rows_at_once clamp: max(1, tiles) -> tiles",
    ),
    "what is done again reads nothing that it writes, and sums begin anew, so it writes the same bytes": (
        "*.* duplicate: transpose_into(*",
        "attention_decode.attention_decode duplicate: write_row(*",
        "attention_prefill.attention_prefill duplicate: attend(*",
        "rmsnorm.rmsnorm duplicate: nisa.dma_copy(dst=y[first:last, :], src=rms_normalised(*",
        "rope.rotate duplicate: nisa.tensor_tensor(dst=with_*",
        "softmax.exponentials duplicate: nisa.activation(*",
        "tiles.rms_normalised duplicate: nisa.activation(dst=result*",
    ),
    "affine_select puts zeros where its condition fails and keeps the rest: in any order, and as often as one likes": (
        "attention_decode.block_diagonal_queries duplicate: nisa.affine_select(dst=result*",
        "attention_decode.own_part duplicate: nisa.affine_select(dst=whole*",
        "attention_decode.own_part swap: nisa.affine_select(*",
    ),
    "MASKED twice, or rounded, is as far below any score; 0 stays 0": (
        "attention_prefill.attend duplicate: nisa.tensor_tensor(dst=diagonal*",
        "attention_prefill.causal_mask dtype: (rows, rows) dtype=nl.float32 -> nl.bfloat16*",
    ),
    "two instructions that write two halves of a tile and read neither": (
        "rope.rotate swap: nisa.tensor_tensor(dst=target*",
    ),
    "the PSUM tile is fresh, so None overwrites with the first product and adds the others, as the flag said": (
        "attention_prefill.attend accumulate: accumulate=False -> None",
        "attention_prefill.weighted_values accumulate: * -> None",
        "tiles.multiply accumulate: * -> None",
    ),
    "the other branch is the general one; this one only saves its instructions": (
        "attention_decode.block_diagonal_queries condition: if kv_heads == 1 -> False",
    ),
    "a copy more, of the same values": (
        "attention_prefill.attend arithmetic: stop < end -> stop <= end",
        "attention_prefill.attend condition: if stop < end -> True",
        "tiles.cast condition: if tile.dtype == dtype -> False",
        "tiles.load_blocks condition: if matrix.dtype != dtype -> True*",
    ),
    "the step of a dim of size 1, or the leading step beside a vector_offset, which NKI ignores": (
        "embedding.embedding pattern: [[width, rows], [1, width]]: width *",
        "rope.gather pattern: [[half, rows], [1, half]]: half *",
    ),
    "a sum over ranks promises no order of its terms": (
        "all_reduce.sum_over_ranks group: all_reduce replica_group: the order reversed",
    ),
}
"""Patterns of keys (`*` stands for anything) under the reason they share."""


def reason(key: str) -> str | None:
    """Why the mutant of this key is no fault; None where nothing is claimed."""
    for why, patterns in EQUIVALENTS.items():
        if any(matches(key, pattern) for pattern in patterns):
            return why
    return None


def matches(key: str, pattern: str) -> bool:
    """Whether a pattern speaks of a key; brackets and question marks are themselves."""
    plain = {ord("["): "(", ord("]"): ")", ord("?"): "@"}
    return fnmatchcase(key.translate(plain), pattern.translate(plain))
