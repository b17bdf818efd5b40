"""Decode attention of one core: what it takes of a launch, and the order in which that begins."""

from __future__ import annotations

from nki_kernels.decode.cache import new_value_rows
from nki_kernels.decode.loads import bring_after_gather, bring_first, take_tokens
from nki_kernels.decode.pipeline import run
from nki_kernels.decode.ranks import expect_ranks, merge_ranks, queries_of_all_ranks
from nki_kernels.decode.share import share_of_core, sizes_of_share
from nki_kernels.decode.tokens import expect_tokens, key_heights, load_tokens, transposed_tokens
from nki_kernels.decode.work import Work, place_tokens, prepare


def attend_share(o, tokens, sizes, caches, places, scale, tables, norms, options, ranks, cache_rows=None):
    """Attention of this core's share of a launch with `sizes`, into its part of o; nothing where none is left for it.

    tokens: q, k and v. caches: keys, values, slots and block tables. places: positions, and the rows of the tables.
    tables: cosines and sines. norms: the weights of queries and of keys, and eps. options: window, soft cap and sinks.
    ranks: the group, the number and the place of ranks that divide positions.
    """
    share = share_of_core(sizes)
    if share is None:
        return
    q, k, v = tokens
    k_cache, v_cache, slots, block_tables = caches
    window, softcap, sinks = options
    mine = sizes_of_share(sizes, share, k_cache, block_tables, cache_rows)
    positions, rows = share.rows(places[0], sizes.sequences), share.rows(places[1], sizes.sequences)
    expected = expect_tokens(mine, positions, rows, tables)
    own_ranks = expect_ranks(ranks[0], ranks[1], ranks[2])
    own_caches = share.caches(k_cache, v_cache, slots, block_tables, sizes)
    own_options = window, softcap, share.columns(sinks, sizes.kv_heads)
    own_v, own_o = share.part(v, sizes), share.part(o, sizes)
    work = Work(mine, share, own_ranks, scale, own_caches, own_v, own_o, own_options)
    work.cache_rows = share.rows(cache_rows, sizes.sequences)
    attend(work, share.part(q, sizes), share.part(k, sizes), expected, norms)


def attend(work, q, k, tokens, norms):
    """Attention of one core, into its output; `tokens` has begun to load what depends on the positions alone."""
    load_tokens(tokens, q, k, work.sizes)
    heights = key_heights(tokens, work.sizes)
    bring_first(work)
    prepare(work, tokens.first_positions)
    queries, keys, key_rows = transposed_tokens(tokens, work.sizes, norms)
    if work.ranks is not None:
        queries = queries_of_all_ranks(queries, work.ranks, work.sizes)
        bring_after_gather(work)
    value_rows = []
    if not work.sizes.stored:
        place_tokens(work, tokens.positions, heights)
        value_rows = new_value_rows(work.v, heights, work.sizes)
    take_tokens(work, queries, keys, key_rows, value_rows)
    run(work)
    if work.ranks is not None:
        merge_ranks(work)
