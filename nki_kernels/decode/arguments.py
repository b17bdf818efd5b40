"""The arguments of a decode step beside its tokens and its cache."""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.cache.scales import CacheScales, load_scales
from nki_kernels.decode.ranks import PositionRanks
from nki_kernels.norms.norm import Norm


@dataclass
class DecodeStep(nl.NKIObject):
    """Positions, rotation, norms of heads and changes of scores, by the names of `attention_decode`'s parameters.

    positions and angle_rows [T, 1] are the positions of new tokens in the cache and in the tables `cos` and `sin`.
    `scales` are those of the cache: checks of the other arguments come before their loads.
    """

    positions: object
    angle_rows: object
    scale: float
    cos: object = None
    sin: object = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: object = None
    softcap: object = None
    sinks: object = None
    scales: CacheScales | None = None

    def load_scales(self, k_scale, v_scale, cache):
        """Load the scales of the cache, if any; refuse what `load_scales` of `cache.scales` refuses."""
        self.scales = load_scales(k_scale, v_scale, cache)

    def select_share(self, share, sizes):
        """Return the step of a share of a launch with `sizes`."""
        return DecodeStep(
            share.select_rows(self.positions, sizes.sequences),
            share.select_rows(self.angle_rows, sizes.sequences),
            self.scale,
            self.cos,
            self.sin,
            self.q_norm,
            self.k_norm,
            self.window,
            self.softcap,
            share.select_columns(self.sinks, sizes.kv_heads),
            None if self.scales is None else self.scales.select_share(share, sizes.kv_heads),
        )


@dataclass
class RankArguments(nl.NKIObject):
    """The ranks that divide positions: their group or None, their number, and the index [1, 1] of this rank."""

    group: object = None
    count: int = 1
    index: object = None

    def check(self):
        """Refuse a group without the number of its ranks, or one that does not divide positions by shifts."""
        count, index = self.count, self.index
        if self.group is None:
            assert count == 1, f"{count} position_ranks, but no position_group"
            return
        assert count >= 1 and count & (count - 1) == 0, (
            f"position_ranks is {count}; a power of two divides positions"
        )
        assert index is not None and index.shape == (1, 1), (
            f"position_rank is [1, 1], not {index if index is None else index.shape}"
        )

    def load(self):
        """Return the ranks with the index of this one in SBUF, or None."""
        return PositionRanks(self.group, self.count, self.index) if self.count > 1 else None
