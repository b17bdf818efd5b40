"""Decode attention on one core: its share of a launch, the loads of the new tokens, and the start of the pipeline.

`attention_decode` and `attention_mixed` call `attend_share`; `attention_block_decode` makes a `ShareStart` first, so
that loads begin before its projection. A *share* is what one physical core computes of a launch, see `decode.share`.
A *group* is a set of (sequence, kv head) pairs whose cached keys are loaded together, see `decode.sizes`.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.decode.group_loads import GroupLoads
from nki_kernels.decode.launch import DecodeLaunch, SeenKeys, TokenRows
from nki_kernels.decode.pipeline import run
from nki_kernels.decode.ranks import gather_queries, merge_ranks
from nki_kernels.decode.share import compute_share_sizes, find_core_share
from nki_kernels.decode.tokens import NewTokens
from nki_kernels.decode.values import load_rounded_values, load_value_rows
from nki_kernels.tiles import PARTITIONS


def attend_share(o, tokens, cache, sizes, step, ranks):
    """Compute attention for this core's share of a launch and write it to the share's rows and columns of `o`.

    Unless the caches hold them already, the new keys and values of the share are stored there. Does nothing on a core
    for which `find_core_share` leaves no share.

    Args:
        o: outputs of the whole launch, [T, Hq * D] in HBM.
        tokens: (q, k, v) of the whole launch in HBM; k and v are None if the caches hold them.
        cache: keys and values of the whole launch.
        sizes: the `Sizes` of the whole launch.
        step: a `DecodeStep`.
        ranks: `RankArguments`.
    """
    share = find_core_share(sizes)
    if share is not None:
        start = ShareStart(share, cache, sizes, step)
        start.attend(o, tokens, ranks)


class ShareStart(nl.NKIObject):
    """A core's share of a launch, whose loads of positions and rotary angles begin when the object is made.

    `sizes`, `cache` and `step` are passed for the whole launch and cut to the share.
    """

    def __init__(self, share, cache, sizes, step):
        self.share, self.launch_sizes = share, sizes
        self.cache = cache.select_share(share)
        self.sizes = compute_share_sizes(sizes, share, self.cache)
        self.step = step.select_share(share, sizes)
        self.tokens = NewTokens(self.sizes, self.step, self.cache.k_cache.dtype)

    def attend(self, o, tokens, ranks):
        """Compute attention for the share and write it to the share's rows and columns of `o` [T, Hq * D] in HBM.

        Stores the share's new keys and values in the caches unless the caches hold them already. A share is one
        core's part of a launch.

        Args:
            tokens: (q, k, v) of the whole launch in HBM.
            ranks: `RankArguments`.
        """
        position_ranks = ranks.load()
        local_o = self.share.select_heads(o, self.launch_sizes)
        launch = DecodeLaunch(self.sizes, self.share, position_ranks, self.cache, local_o, self.step)
        local_tokens = []
        for tensor in tokens:
            local_tokens.append(self.share.select_heads(tensor, self.launch_sizes))
        attend(launch, self.tokens, local_tokens)


def attend(launch, tokens, qkv):
    """Load the new tokens, issue the pipeline over all cached and new keys, and write the outputs to `launch.o`.

    Stores new keys and values in the caches unless they are there already (`sizes.stored`). If ranks divide
    positions, it gathers their queries first and merges the partial outputs of all ranks at the end.

    Args:
        launch: the `DecodeLaunch` of this core.
        tokens: its `NewTokens`, whose loads of positions and angles have begun.
        qkv: q [T, Hq * D], k and v [T, Hk * D] of this core's share in HBM; k and v may be None.
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
        if launch.step.scales is not None and sizes.tokens <= PARTITIONS:
            v = load_rounded_values(v, sizes, launch.step.scales)
    rows = TokenRows(queries, keys, v, key_rows, value_rows, key_addresses, value_addresses)
    loads.take_tokens(rows, seen_keys, None)
    run(launch, loads, seen_keys, 0)
    if launch.ranks is not None:
        merge_ranks(launch)
