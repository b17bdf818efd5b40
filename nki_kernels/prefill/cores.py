"""How the physical cores of a logical core divide the work of attention_prefill.

Each core takes whole key/value heads of whole sequences where their number is even, else half of the query heads that
share one, else every other tile of queries. In the last two cases both cores load the keys and values of all heads, and
write half of them each to the caches. No core waits for the other one, except where cached positions are read. A *pair*
is one key/value head of one sequence; a *tile of queries* has up to 128 queries of a pair.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


class CoreShare(nl.NKIObject):
    """Work that this physical core takes of a launch.

    `pairs` counts pairs of a sequence and a key/value head. `whole_group` is the number of query heads that share a
    key/value head. This core takes `group` of them, from number `first_of_group` on. If `divides_tiles`, the cores
    divide the tiles of queries of each pair. If `both_load`, both cores load the keys and values of every pair.

    Args:
        tiles: number of tiles of queries of each pair; one tile is not divided.
    """

    def __init__(self, pairs, whole_group, tiles):
        self.cores, self.core = nl.num_programs(), nl.program_id(0)
        self.pairs, self.whole_group = pairs, whole_group
        unequal = pairs % self.cores > 0
        divides_group = unequal and whole_group % self.cores == 0
        self.divides_tiles = unequal and not divides_group and tiles > 1
        self.both_load = divides_group or self.divides_tiles
        self.group = whole_group // self.cores if divides_group else whole_group
        self.first_of_group = self.core * self.group if divides_group else 0

    def index_query_head(self, kv_head, head):
        """Return the index among all query heads of query head `head` of `kv_head`, counted from this core's first."""
        return kv_head * self.whole_group + self.first_of_group + head

    def choose_core(self, pair, keys, seen_by_core):
        """Return the core that computes a tile of queries, whose queries see `keys` keys.

        If both cores load every head but do not divide tiles, it is this core: each takes its own query heads.

        Args:
            pair: index of the tile's sequence and key/value head, sequence * Hk + head.
            seen_by_core: list with the keys that each core's tiles of the pair see so far. If the cores divide tiles,
                the core with fewest gets the tile, and its number is increased by `keys`.
        """
        if self.divides_tiles:
            least = 0
            for core in range(self.cores):
                if seen_by_core[core] < seen_by_core[least]:
                    least = core
            seen_by_core[least] += keys
            return least
        if self.both_load:
            return self.core
        return pair * self.cores // self.pairs


def is_stored_here(prompts, index):
    """Return whether this core writes new keys and values of a head, of DMA load number `index`, to the caches.

    It does not if the caches hold them already, or there are none. If both cores load every head, they write alternate
    loads.
    """
    share = prompts.share
    return prompts.writes and (not share.both_load or index % share.cores == share.core)


def needs_late_stores(prompts):
    """Return whether the caches are written only after both cores have read all cached positions.

    It is so with two cores and a prefix in pages: a table may name pages of the other core behind its last position.
    """
    shared = prompts.share.cores > 1 and prompts.cache.shares_pages
    return prompts.writes and shared and prompts.prefix > 0


def wait_for_reads(cache):
    """Issue a barrier of both cores for each cache, so that earlier reads of both precede later writes to it."""
    for tensor in (cache.k_cache, cache.v_cache):
        nisa.core_barrier(data=tensor, cores=(0, 1))
