"""Keys of mutants that are no faults, with the reason why no input can distinguish them from the original kernel."""

from __future__ import annotations

from fnmatch import fnmatchcase

EQUIVALENTS: dict[str, tuple[str, ...]] = {
    "another entry of the table of parameters, or none: parameters change the time and never the results": (
        "matmul.matmul_bucket condition: *",
        "tuning.name_bucket condition: *",
        "tuning.name_bucket bound: *",
        "tuning.name_bucket arithmetic: *",
        "tuning.find_generation condition: *",
    ),
    "the blocks overlap: some rows or columns are computed again, from the same operands, with the same result": (
        "*.* bound: range(0, tokens, PARTITIONS): PARTITIONS - 1",
        "projection.row_groups.divide_into_groups bound: range(0, rows, rows_per_group): rows_per_group - 1",
        "tiles.transpose_into bound: range(0, full, per_bank): per_bank - 1",
    ),
    "the tile has partitions, or a block, that nobody touches; every operand is sliced to what was written": (
        "*.* clamp: min(tokens, PARTITIONS) -> PARTITIONS",
        "recurrent.selective_prompt.scan_prompts arithmetic: end - begin -> (end) + (begin)",
        "recurrent.ssd_chunk.load_rows bound: upper of sizes.left:*: sizes.left + sizes.width + 1",
        "projection.gated_product.accumulate clamp: min(hidden, PARTITIONS) -> PARTITIONS",
    ),
    "a smaller tile, or fewer banks: the same sums in more instructions; only time differs": (
        "convolution.products.plan_banks arithmetic: outputs[1] - outputs[0] -> (outputs[1]) + (outputs[0])",
        "convolution.products.count_resident_outputs arithmetic: most >= outputs -> most > outputs",
        "delta.wave_plan.split_heads condition: if group <= HEADS -> False",
        "matmul.count_fitting_columns condition: if dtype == nl.float32 -> True",
        "projection.gated_product.count_packed_columns arithmetic: PARTITIONS // 4 -> *",
        "projection.residual_product.load_resident_columns clamp: *",
        "tiles.count_columns_at_once clamp: max(1, ACCUMULATOR_BANKS // blocks(rows)) -> 1",
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 - 1",
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 // 2",
        "tiles.constants tile size: BANK = 512 // 2",
        "tiles.constants tile size: RESIDENT_ELEMENTS = 16384 - 1",
        "tiles.constants tile size: RESIDENT_ELEMENTS = 16384 // 2",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 - 1",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 // 2",
        "tiles.choose_rows_at_once arithmetic: PARTITIONS * max(1, tiles) -> (PARTITIONS) + (max(1, tiles))",
        "tiles.choose_rows_at_once clamp: max(1, tiles) -> 1",
    ),
    "elements of which only the sum is used, which is added up in float32 before they are rounded": (
        "experts.top_experts.select_by_softmax dtype: (rows, experts) dtype=nl.float32 -> nl.int32",
    ),
    "chosen experts or all of them are loaded: the same sums, only time differs": (
        "experts_decode.experts_decode arithmetic: tokens * ids.shape[1] <= count -> *",
    ),
    "other columns are searched as rows; the largest are the same, only time differs": (
        "sampling.vocabulary.plan_tail arithmetic: hidden*",
        "sampling.vocabulary.plan_tail arithmetic: TAIL_HIDDEN*",
        "sampling.vocabulary.plan_tail arithmetic: nisa*",
        "sampling.vocabulary.plan_tail arithmetic: spread_columns*",
        "sampling.vocabulary.plan_tail bound: *",
        "sampling.vocabulary.plan_tail condition: *",
    ),
    "loads of other sizes, of the same blocks": (
        "projection.spread_product.divide_into_loads clamp: max(1, LEAST_ELEMENTS // columns) -> 1",
        "projection.spread_product.divide_into_loads clamp: max(1, WEIGHT_ELEMENTS // columns) -> 1",
    ),
    "another tile size that fits as well, at the largest sizes too (the dry cases); only time differs": (
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 + 1",
        "tiles.constants tile size: ACCUMULATOR_BANKS = 4 * 2",
        "tiles.constants tile size: RESIDENT_ELEMENTS = 16384 + 1",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 + 1",
        "tiles.constants tile size: WEIGHT_ELEMENTS = 8192 * 2",
    ),
    "the limits that the kernels assert keep the other argument at 1 or more": (
        "tiles.count_columns_at_once clamp: max(1, ACCUMULATOR_BANKS // blocks(rows)) -> "
        "ACCUMULATOR_BANKS // blocks(rows)",
        "tiles.choose_rows_at_once clamp: max(1, tiles) -> tiles",
    ),
    "what is done again reads nothing that it writes, and sums begin anew, so it writes the same bytes": (
        "*.* duplicate: transpose_into(*",
        "causal_conv1d.* duplicate: transpose_rows(*",
        "projection.row_groups.transpose_tiles duplicate: transpose_rows(*",
        "recurrent.* duplicate: transpose_rows(*",
        "prefill.cached.load_cached duplicate: load_cached_piece(*",
        "prefill.keys.clean_new_keys duplicate: clean_tile(*",
        "rope.rotate duplicate: nisa.tensor_tensor(dst=with_*",
        "norms.row_tiles.sum_squares duplicate: nisa.activation(dst=terms*",
    ),
    "two instructions that write two halves of a tile and read neither": (
        "rope.rotate swap: nisa.tensor_tensor(dst=target*",
    ),
    "a number is bounded twice by the same bound": (
        "experts_decode.plan_choice_passes duplicate: nisa.tensor_scalar(dst=ids*",
        "recurrent.ssd_times.limit_time_steps duplicate: *",
    ),
    "two cores take the first and the second half of the channels: a sum of both ends has as many factors of two": (
        "recurrent.selective_layout.count_lanes arithmetic: channels[1] - channels[0] -> *",
    ),
    "scores are repeated for each head, or read by all heads: only time differs": (
        "recurrent.ssd_chunk.compute_scores arithmetic: REPEATED * groups * sizes.most -> (REPEATED * groups) + *",
    ),
    "an address behind the states is skipped, also one twice as far behind": (
        "delta.state_lanes.compute_lane_offsets duplicate: nisa.tensor_tensor(dst=offsets, *",
    ),
    "padding of one column more, which is loaded afterwards": (
        "convolution.windows.load_region bound: lower of end_column:width: end_column - 1",
    ),
    "the last product of a block, and blocks of others: neither reads what the other writes": (
        "experts_prefill.experts_prefill swap: finish_down(row_blocks, pipeline.pend* <-> if table*",
    ),
    "the same ranges: four heads of one key head are one range, and the last group begins before the last head": (
        "delta.wave_plan.split_heads arithmetic: group <= HEADS -> group < HEADS",
        "delta.wave_plan.split_heads bound: range(0, heads, group): heads - 1",
    ),
    "the DMA casts in place of the engine: values are rounded once as well": (
        "experts.row_blocks.finish_down condition: if len(pending.targets) == 0 -> True",
        "weights.load_blocks_into dtype: tile.shape dtype=elements.dtype -> nl.bfloat16",
    ),
    "one more tile passes the first stage, and no other": (
        "router.route_tiles arithmetic: step < len(tiles) -> step <= len(tiles)",
        "router.route_tiles condition: if step < len(tiles) -> True",
    ),
    "another engine copies transposes to SBUF; only time differs": (
        "router.route_tiles arithmetic: len(tiles) > 1 -> len(tiles) >= 1",
        "router.route_tiles condition: if len(tiles) > 1 -> *",
    ),
    "a copy more, of the same values": ("tiles.cast condition: if tile.dtype == dtype -> False",),
    "the step of a dim of size 1, or the leading step beside a vector_offset, which NKI ignores": (
        "embedding.gather_table_rows pattern: [[width, rows], [1, width]]: width *",
        "prefill.spans.load_row_sinks pattern: [[1, heads], [0, queries.count], [1, 1]]: 1 + 1 #2",
        "rope.gather pattern: [[half, rows], [1, half]]: half *",
    ),
    "another of the ranks attends with the new keys and values, which all of them have": (
        "decode.ranks.zero_on_other_ranks value: operand0=0.0: 0.0 + 1",
    ),
    "all groups are the best ones": (
        "experts.top_experts.select_by_* condition: if selection.top_groups < selection.groups -> True",
        "experts.top_experts.select_by_* arithmetic: selection.top_groups < selection.groups -> *<=*",
    ),
    "zero is added": ("projection.rows.load_repeated_row condition: if offset == 0.0 -> False",),
    "only distances of keys that are masked differ": (
        "prefill.slopes.write_cached_distances operand: tensor_scalar operand1=0.0 -> *",
        "prefill.slopes.write_cached_distances value: operand1=0.0: 0.0 + 1",
    ),
    "whole numbers up to 127, which bfloat16 holds": (
        "prefill.slopes.number_rows dtype: (span.rows, 1) dtype=nl.float32 -> nl.bfloat16",
    ),
    "the strided slice ends between two of its elements": (
        "sampling.candidates.merge_ranks bound: upper of 0:ranks * keep:keep: ranks * keep - 1",
        "projection.spread_product.make_padding_operands bound: upper of chunks - 1:width:chunks: width - 1",
    ),
    "stored, joined or computed again from the same operands": (
        "gated_delta_step.advance_sequences duplicate: store_outputs(*",
        "sampling.candidates.add_exponentials duplicate: nisa.activation(*",
        "sampling.candidates.find_candidates duplicate: add_exponentials(*",
        "lm_head.lm_head duplicate: nisa.dma_copy(dst=ids*",
        "sample.find_ids duplicate: nisa.nc_n_gather(*",
        "sample.draw_rows duplicate: nisa.dma_copy(*",
        "projection.spread_product.spread_rows duplicate: load_normalised(*",
        "sampling.top_k.collect duplicate: join(*",
        "sampling.top_k.search duplicate: search_groups(*",
    ),
    "neither instruction touches what the other writes, though tiles or parts of a tile are named in both": (
        "sampling.draw.compute_candidate_weights swap: nisa.memset(dst=ahead*",
        "sampling.draw.prepare_parameters swap: *",
        "sample.draw_rows swap: *",
        "projection.spread_product.make_padding_operands swap: *",
    ),
    "whole numbers below 2**24, or ones, which both dtypes hold": (
        "decode.ranks.subtract_rank dtype: first_positions.shape dtype=nl.float32 -> nl.int32",
        "sampling.draw.compute_candidate_weights dtype: (rows, count) dtype=nl.float32 -> nl.int32 #4",
        "sampling.draw.sum_cumulatively dtype: (rows, count) dtype=nl.float32 -> nl.bfloat16",
        "sampling.draw.draw dtype: (rows, count) dtype=nl.float32 -> nl.bfloat16 #4",
        "sampling.draw.draw dtype: (rows, count) dtype=nl.float32 -> nl.int32*",
        "lm_head.lm_head dtype: cast(best_ids, nl.int32) -> nl.float32",
        "sample.draw_rows dtype: cast(chosen, nl.int32) -> nl.float32",
        "sample.draw_rows dtype: cast(found_ids, nl.int32) -> nl.float32",
        "sample.find_largest_adjusted dtype: load(ids[:, 0:keep], nl.float32) -> nl.int32",
        "sample.load_limits dtype: load(top_k, nl.float32) -> nl.int32",
        "sampling.top_k.join dtype: (lanes, count) dtype=nl.float32 -> nl.int32",
        "sampling.top_k.search_groups dtype: (lanes, keep) dtype=nl.float32 -> nl.int32 #*",
        "sampling.top_k.search_groups dtype: (lanes, keep) dtype=nl.uint32 -> nl.uint16",
        "sampling.top_k.search_groups dtype: (lanes, keep, _EIGHT) dtype=nl.float32 -> nl.*",
    ),
    "the general way for a piece that is full: the same elements chunk by chunk": (
        "sampling.vocabulary.finish_logits arithmetic: chunks * size -> (chunks) + (size)",
        "sampling.vocabulary.finish_logits condition: if columns == chunks * size -> False",
        "sampling.penalties.load_piece arithmetic: chunks * size -> (chunks) + (size) #2",
        "sampling.penalties.load_piece clamp: min(total - first, chunks * size) -> total - first",
        "sampling.penalties.load_piece condition: if columns == chunks * size -> False",
    ),
    "searches the copy in SBUF, or merges earlier or later: only time differs": (
        "sampling.vocabulary.search_pieces arithmetic: i == len(cuts) - 1 -> i != len(cuts) - 1",
        "sampling.vocabulary.search_pieces arithmetic: len(cuts) - 1 -> (len(cuts)) + (1)",
        "sampling.vocabulary.search_pieces clamp: min(end, start + chunks * size) -> end",
        "sampling.top_k.search condition: if is_grouped(size, keep) -> False",
    ),
    "there is no chunk of no columns, or it is refused or loaded as nothing": (
        "sampling.vocabulary.finish_logits bound: range(chunks): chunks + 1",
        "sampling.penalties.load_piece bound: range(chunks): chunks + 1",
        "projection.spread_product.project_piece bound: range(chunks): chunks + 1",
    ),
    "columns that no window reaches, and zeros that are overwritten": (
        "projection.spread_product.make_padding_operands arithmetic: chunks - 1 -> (chunks) + (1)",
        "projection.spread_product.make_padding_operands bound: * of *BANK*",
        "projection.spread_product.make_padding_operands tile size: *",
        "projection.spread_product.spread_rows arithmetic: chunks - 1 -> (chunks) + (1)",
        "projection.spread_product.spread_rows arithmetic: chunks > 1 -> chunks >= 1",
        "projection.spread_product.spread_rows condition: if chunks > 1 -> True",
    ),
    "padding lies as far below any logit, or is nothing": (
        "projection.spread_product.write_padding accumulate: accumulate=padded -> None",
        "projection.spread_product.write_padding arithmetic: present < size -> present <= size",
        "projection.spread_product.write_padding clamp: max(0, *",
        "projection.spread_product.write_padding condition: if present < size -> True",
        "projection.spread_product.write_padding duplicate: nisa.nc_matmul(*",
        "projection.spread_product.make_padding_operands value: value=1.0: 1.0 + 1",
        "projection.spread_product.project_piece accumulate: accumulate=begun -> None",
    ),
    "one or the other of two tests for above zero, of counts that are not negative": (
        "sampling.penalties.load_adjusted operand: scalar_tensor_tensor op*",
        "sampling.penalties.load_adjusted operator: op0=nl.add -> nl.subtract",
    ),
    "a size of 1 in a pattern": ("sampling.penalties.load_for_chunks pattern: *: 1 * #2",),
    "a sum over ranks promises no order of its terms": (
        "all_reduce.sum_over_ranks group: all_reduce replica_group: the order reversed",
        "embedding.gather_table_rows group: all_reduce replica_group: the order reversed",
    ),
}
"""Patterns of keys (`*` stands for anything) under the reason they share."""


def reason(key: str) -> str | None:
    """Return why the mutant with a key is equivalent to the original, or None if it is not listed."""
    for why, patterns in EQUIVALENTS.items():
        if any(matches(key, pattern) for pattern in patterns):
            return why
    return None


def matches(key: str, pattern: str) -> bool:
    """Return whether a pattern matches a key.

    `*` matches anything, and brackets and question marks match themselves.
    """
    plain = {ord("["): "(", ord("]"): ")", ord("?"): "@"}
    return fnmatchcase(key.translate(plain), pattern.translate(plain))
