"""How the physical cores of a logical core divide the work of attention_prefill.

Each core takes whole key/value heads of whole sequences where their number is even, else half of the query heads that
share one, else every other tile of queries. In the last two cases both cores load the keys and values of all heads,
and write half of them each to the caches. No core waits for the other one, except where cached positions are read.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


class CoreShare(nl.NKIObject):
    """What this core takes of `pairs` of a sequence and a key/value head: `group` query heads of each, or tiles.

    The heads begin at `first_of_group` of the `whole_group` that shares a key/value head.
    """

    def __init__(self, pairs, whole_group, queries):
        self.cores, self.core = nl.num_programs(), nl.program_id(0)
        self.pairs, self.whole_group = pairs, whole_group
        unequal = pairs % self.cores > 0
        divides_group = unequal and whole_group % self.cores == 0
        self.divides_tiles = unequal and not divides_group and queries > nl.tile_size.pmax
        self.both_load = divides_group or self.divides_tiles
        self.group = whole_group // self.cores if divides_group else whole_group
        self.first_of_group = self.core * self.group if divides_group else 0

    def query_head(self, kv_head, head):
        """Return the number of a query head among all, from its number among those of a key/value head here."""
        return kv_head * self.whole_group + self.first_of_group + head

    def owner(self, pair, keys, seen_by_core):
        """Return the core that takes a tile of queries of a pair, which sees so many keys.

        `seen_by_core` counts the keys that each core's tiles of the pair see.
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


def stores_blocks(prompts, index):
    """Return whether this core writes a head's new keys and values of one load to the caches."""
    share = prompts.share
    return not prompts.stored and (not share.both_load or index % share.cores == share.core)


def stores_last(prompts):
    """Return whether no cache is written before all are read.

    A table may name pages of the other core behind its last position.
    """
    shared = prompts.share.cores > 1 and prompts.cache.shares_pages
    return not prompts.stored and shared and prompts.prefix > 0


def wait_for_reads(cache):
    """Order the reads of both cores from the caches before their later writes to them."""
    for tensor in (cache.k_cache, cache.v_cache):
        nisa.core_barrier(data=tensor, cores=(0, 1))
