"""How the physical cores of a logical core divide the work of attention_prefill.

Each core takes whole key/value heads of whole sequences where their number is even, else half of the query heads that
share one, else every other tile of queries. In the last two cases both cores load the keys and values of all heads,
and write half of them each to the caches. No core waits for the other one, except where cached positions are read.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


def divide_heads(case):
    """Which part of the work is this core's; `group` becomes the query heads that it takes of each key/value head."""
    case.cores = nl.num_programs()
    case.core = nl.program_id(0)
    case.whole_group = case.group
    case.first_of_group = 0
    case.both_load = case.sequences * case.kv_heads % case.cores > 0
    case.divides_tiles = False
    if not case.both_load:
        return
    if case.group % case.cores == 0:
        case.group = case.group // case.cores
        case.first_of_group = case.core * case.group
    elif case.q.shape[0] // case.sequences > nl.tile_size.pmax:
        case.divides_tiles = True
    else:
        case.both_load = False


def query_head(case, queries, head):
    """The number of a query head among all, from its number among those of the queries."""
    return queries.head * case.whole_group + case.first_of_group + head


def owner(case, queries, given, keys):
    """The core that takes some queries; `given` counts the keys that each core's queries of their head see."""
    pair = queries.sequence * case.kv_heads + queries.head
    if case.divides_tiles:
        least = 0
        for core in range(case.cores):
            if given[core] < given[least]:
                least = core
        given[least] = given[least] + keys
        return least
    if case.both_load:
        return case.core
    return pair * case.cores // (case.sequences * case.kv_heads)


def stores_part(case, number):
    """Whether this core writes a part of a head's new keys and values to the caches."""
    return not case.stored and (not case.both_load or number % case.cores == case.core)


def stores_last(case):
    """Whether no cache is written before all are read: a table may name pages of the other core behind its own."""
    return not case.stored and case.cores > 1 and case.prefix > 0 and case.cache.shares_pages


def wait_for_reads(case):
    """No core writes to the caches before both have read them."""
    for cache in (case.cache.k_cache, case.cache.v_cache):
        nisa.core_barrier(data=cache, cores=(0, 1))
