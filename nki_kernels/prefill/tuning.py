"""Sizes and distances of the pipeline of attention_prefill.

`prefill.order` schedules steps by them, and `prefill.spans` and `prefill.load_ahead` size what they allocate.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl


class Tuning(nl.NKIObject):
    """Sizes and distances of the pipeline, in keys, chosen by trying others; gen2, which is not `wide`, has slower DMA.

    `dtype` is that of q, `depth_tiles` the number of tiles of 128 elements that D takes, and `query_tiles` that of the
    tiles of queries of a sequence. A *span* is a range of keys whose scores lie in SBUF at one time. Keys of several
    tiles of D take longer than values, so products wait longer for their weights. Such a product takes more of PSUM,
    and each key more time, so that it waits for fewer keys.

    span                   keys whose scores lie in SBUF at one time: as many as fit beside 8192 keys and values, and
                           with slopes beside the distances of the keys
    scores                 keys of one PSUM tile of scores: two banks, so that three tiles fit beside the rest
    exponents, recomputed  keys of one exp from SBUF and from PSUM; bounded scores have PSUM to themselves
    recomputed_share       the share of keys whose scores are computed again; spans up to `short` take a larger one, as
                           loads and stores are a larger share of their DMAs, but if `wide` a smaller one of keys of
                           several tiles of D, each of which is a product more; those up to `shortest` none
    few                    up to so many keys the engine `divider` divides the product, else GpSimd what Scalar copied;
                           of all with all the Scalar engine, as the Vector engine would wait for its own reciprocal
    exponents_after        from the last score of a span to its first exp: until the shift is known; `exponents_first`
                           in the beginning, and one key later for every `ramp` keys
    recompute_after        from there on to the scores that are computed again, and `by_key_after` to their exp
    multiply_after         from an exp to its products: until the transposes have arrived
    finish_after           from the last product to its copy, `store_after` to the store
    cache_after            between the writes of 1024 keys and values to a cache, at most
    values_after           between the cleanings of 1024 values, which products wait for later than scores for keys
    queries_ahead          tiles of queries that are loaded before they are needed, if they fit
    heads_ahead            tiles of queries before its first one at which a head is loaded, and `cleaned_ahead` at which
                           its keys are cleaned, for which the Vector engine waits until they have arrived; not causal
                           heads of few tiles follow each other so soon that they are cleaned earlier
    early_heads            most heads that are loaded before their first tile of queries, if they fit: short ones take
                           less time than a load
    """

    def __init__(self, dtype, wide, depth_tiles, step, query_tiles):
        narrow = dtype == nl.bfloat16
        deep = narrow and wide and depth_tiles > 1
        self.span = 8192 if narrow and wide else 4096
        self.scores = 1024
        self.exponents = 1280 if deep else (1536 if narrow else 1024)
        self.recomputed = 1024 if wide else 512
        self.recomputed_share = (2, 9) if wide else (1, 3)
        self.recomputed_share_of_short = (1, 8) if wide and depth_tiles > 1 else (1, 3)
        changed = step.softcap is not None or step.slopes is not None or step.position_bias is not None
        if not narrow or changed:
            self.recomputed_share = (0, 1)
            self.recomputed_share_of_short = (0, 1)
        if step.slopes is not None:
            self.span = 3072
        self.short = 2048
        self.shortest = 1024 if step.causal else 1023
        self.few = 256 if step.causal else 1024
        self.divider = nisa.engine.vector if step.causal else nisa.engine.scalar
        self.exponents_first = 400
        self.exponents_after = 3000 if narrow else 1500
        self.ramp = 32
        self.recompute_after = 4500
        self.by_key_after = 5500
        self.multiply_after = 14000 if deep else (12000 if narrow else 6000)
        self.finish_after = 2000 // depth_tiles**2
        self.store_after = (16384 if deep else 4096) // depth_tiles
        self.cache_after = 16384
        self.values_after = 3072 if deep else 2048
        self.queries_ahead = 6 if step.causal else 12
        self.heads_ahead = 12 if deep else 8
        self.cleaned_ahead = 4 if step.causal else (3 if query_tiles <= 4 else 2)
        self.early_heads = 6
        if step.bounded:
            self.recomputed = 1536
            self.few, self.divider = 12288, nisa.engine.vector  # all keys of a launch
            self.multiply_after, self.finish_after, self.store_after = 3072, 0, 2048
