"""Prompts without caches: nothing is read from HBM before them, and their keys and values are not stored."""

from __future__ import annotations

import nki.language as nl

from nki_kernels.tiles import expect_dims


class NoCache(nl.NKIObject):
    """Sizes of the heads of a launch without caches, where attention_prefill otherwise has those of its caches.

    `capacity` is the number of keys of a sequence.
    """

    shares_pages = False
    newest_positions = 0

    def __init__(self, sequences, kv_heads, sizes, capacity):
        self.k_cache, self.v_cache = None, None
        self.sequences, self.kv_heads = sequences, kv_heads
        self.depth, self.value_depth = sizes
        self.capacity = capacity

    def check_prompts(self, rows):
        """Do nothing, because there is no cache that `rows` new tokens have to fit in."""


def create_no_cache(k, v, kv_heads, sequences, prefix, cached):
    """Return the `NoCache` of a launch whose keys are k [T, Hk * D] and values v [T, Hk * Dv].

    Args:
        sequences: number of sequences; None for 1.
        cached: arguments that only a launch with caches takes, by the names that the message has; all must be None.

    Raises:
        AssertionError: k, v or kv_heads is None, the heads do not divide the columns, there is a prefix, or `cached`
            has an argument.
    """
    assert prefix == 0, f"prefix is {prefix}; without caches there is none, so pass 0"
    for name in cached:
        assert cached[name] is None, f"{name} belongs to caches; omit it, or pass k_cache and v_cache"
    assert k is not None and v is not None and kv_heads is not None, (
        "without caches k, v and num_kv_heads are needed; pass them, or k_cache and v_cache"
    )
    for tensor, form in ((k, "k [T, Hk * D]"), (v, "v [T, Hk * Dv]")):
        expect_dims(2, tensor, form)
        assert tensor.shape[1] % kv_heads == 0, (
            f"{form[0]} has {tensor.shape[1]} columns, which do not divide into {kv_heads} heads"
        )
    count = 1 if sequences is None else sequences
    sizes = k.shape[1] // kv_heads, v.shape[1] // kv_heads
    return NoCache(count, kv_heads, sizes, k.shape[0] // count)
