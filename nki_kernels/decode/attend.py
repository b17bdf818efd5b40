"""Decode attention of one core: what it takes of a launch, and the order in which that begins."""

from __future__ import annotations

from nki_kernels.decode.buffers import new_value_rows
from nki_kernels.decode.loads import bring_after_gather, bring_first, take_tokens
from nki_kernels.decode.pipeline import run
from nki_kernels.decode.ranks import merge_ranks, queries_of_all_ranks
from nki_kernels.decode.share import share_of_core, sizes_of_share
from nki_kernels.decode.tokens import expect_tokens, key_heights, load_tokens, transposed_tokens
from nki_kernels.decode.work import Work, place_tokens, prepare


def attend_share(o, tokens, cache, sizes, step, ranks):
    """Attention of this core's share of a launch with `sizes`, into its part of o; nothing where none is left for it.

    tokens: q, k and v. step: see `DecodeStep`. ranks: see `RankArguments`.
    """
    share = share_of_core(sizes)
    if share is None:
        return
    q, k, v = tokens
    own_cache = cache.of_share(share)
    own_sizes, own_step = sizes_of_share(sizes, share, own_cache), step.of_share(share, sizes)
    expected = expect_tokens(own_sizes, own_step)
    own_ranks = ranks.load()
    work = Work(own_sizes, share, own_ranks, own_cache, share.part(v, sizes), share.part(o, sizes), own_step)
    attend(work, share.part(q, sizes), share.part(k, sizes), expected)


def attend(work, q, k, tokens):
    """Attention of one core, into its output; `tokens` has begun to load what depends on the positions alone."""
    load_tokens(tokens, q, k, work.sizes)
    heights = key_heights(tokens, work.sizes)
    bring_first(work)
    prepare(work, tokens.first_positions)
    queries, keys, key_rows = transposed_tokens(tokens, work.sizes)
    if work.ranks is not None:
        queries = queries_of_all_ranks(queries, work.ranks, work.sizes)
        bring_after_gather(work)
    value_rows = []
    if not work.sizes.stored:
        place_tokens(work, heights)
        value_rows = new_value_rows(work.v, heights, work.sizes, work.step.scales)
    take_tokens(work, queries, keys, key_rows, value_rows)
    run(work)
    if work.ranks is not None:
        merge_ranks(work)
