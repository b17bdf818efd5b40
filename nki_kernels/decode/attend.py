"""Decode attention of one core: what it takes of a launch, and the order in which that begins."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.decode.group_loads import GroupLoads
from nki_kernels.decode.launch import DecodeLaunch, SeenKeys, TokenRows
from nki_kernels.decode.pipeline import run
from nki_kernels.decode.ranks import gather_queries, merge_ranks
from nki_kernels.decode.share import compute_share_sizes, find_core_share
from nki_kernels.decode.tokens import NewTokens
from nki_kernels.decode.values import load_value_rows


def attend_share(o, tokens, cache, sizes, step, ranks):
    """Compute attention of this core's share of a launch with `sizes`, if any, into its rows and columns of o.

    tokens: q, k and v. step: see `DecodeStep`. ranks: see `RankArguments`.
    """
    share = find_core_share(sizes)
    if share is not None:
        start = ShareStart(share, cache, sizes, step)
        start.attend(o, tokens, ranks)


class ShareStart(nl.NKIObject):
    """A share of a launch with `sizes`, whose loads that depend on the positions alone have begun."""

    def __init__(self, share, cache, sizes, step):
        self.share, self.launch_sizes = share, sizes
        self.cache = cache.select_share(share)
        self.sizes = compute_share_sizes(sizes, share, self.cache)
        self.step = step.select_share(share, sizes)
        self.tokens = NewTokens(self.sizes, self.step)

    def attend(self, o, tokens, ranks):
        """Compute attention into the share's rows and columns of o; tokens: q, k and v of the launch."""
        position_ranks = ranks.load()
        local_o = self.share.select_heads(o, self.launch_sizes)
        launch = DecodeLaunch(self.sizes, self.share, position_ranks, self.cache, local_o, self.step)
        local_tokens = []
        for tensor in tokens:
            local_tokens.append(self.share.select_heads(tensor, self.launch_sizes))
        attend(launch, self.tokens, local_tokens)


def attend(launch, tokens, qkv):
    """Compute attention of one core: tokens are loaded beside the first groups, whose loads continue in the pipeline.

    tokens: `NewTokens` whose loads have begun that depend on the positions alone. qkv: queries, keys and values.
    """
    sizes = launch.sizes
    q, k, v = qkv
    # New tokens are few bytes and precede the bulk loads of the caches, so that no score waits for them.
    tokens.load(q, k)
    heights = tokens.list_key_heights()
    loads = GroupLoads(launch)
    seen_keys = SeenKeys(launch, tokens.first_positions)
    queries, keys, key_rows = tokens.transpose_heads()
    if launch.ranks is not None:
        queries = gather_queries(queries, launch.ranks, sizes)
        loads.load_after_gather()
    value_rows, key_addresses, value_addresses = [], None, None
    if not sizes.stored:
        key_addresses, value_addresses = launch.cache.compute_new_addresses(
            launch, launch.step.positions, heights
        )
        value_rows = load_value_rows(v, heights, sizes, launch.step.scales)
    rows = TokenRows(queries, keys, v, key_rows, value_rows, key_addresses, value_addresses)
    loads.take_tokens(rows, seen_keys, None)
    run(launch, loads, seen_keys, 0)
    if launch.ranks is not None:
        merge_ranks(launch)
