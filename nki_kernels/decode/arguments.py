"""Arguments of a decode step other than its tokens and its cache, as records that the decode kernels pass on.

`attention_decode`, `attention_block_decode`, `attention_mixed` and `decoder_layer_decode` build these records from
their parameters. A `Share` is what one physical core computes of a launch: a range of sequences and of kv heads, see
`decode.share`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.cache.scales import CacheScales, load_scales
from nki_kernels.decode.ranks import PositionRanks
from nki_kernels.norms.norm import Norm


@dataclass
class DecodeStep(nl.NKIObject):
    """Positions, rotary tables, head norms and score options of a step, named like `attention_decode`'s parameters.

    `positions` and `angle_rows` are [T, 1] int32 in HBM: each new token's position in the cache, and its row in the
    tables `cos` and `sin`. `scales` is None until `load_scales` is called, which happens after all checks of
    arguments.
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
        """Load the scales of an 8-bit cache into SBUF and keep them in `self.scales`, or None without scales.

        Args:
            k_scale: [1, Hk] float32 in HBM, or None.
            v_scale: the same for values.
            cache: the cache whose dtype and number of kv heads the scales must fit.

        Raises:
            AssertionError: only one scale is given, a scale has another shape, or the caches' dtypes do not go with
                scales. Caches with scales are both int8 or both float8_e4m3; int8 is refused without scales.
        """
        self.scales = load_scales(k_scale, v_scale, cache)

    def select_share(self, share, sizes):
        """Return a new step for one core's `share`, with views of its rows and columns; `self` stays unchanged.

        `positions` and `angle_rows` are cut to the share's sequences, `sinks` and `scales` to its kv heads. All other
        fields are the same objects.

        Args:
            sizes: the `Sizes` of the whole launch, from which the share is cut.
        """
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
    """Ranks that divide the positions of the caches among themselves, as the kernel's arguments give them.

    Their replica group (None: no ranks divide positions), their number, and the index of this rank, [1, 1] int32 in
    HBM.
    """

    group: object = None
    count: int = 1
    index: object = None

    def check(self):
        """Raise AssertionError if the fields do not fit together.

        With a group, `count` must be a power of two and `index` must be [1, 1]. Without a group `count` must be 1.
        """
        count, index = self.count, self.index
        if self.group is None:
            assert count == 1, (
                f"{count} position_ranks, but no position_group; pass the group of these ranks, or 1"
            )
            return
        assert count >= 1 and count & (count - 1) == 0, (
            f"position_ranks is {count}; a power of two divides positions, so choose 1, 2, 4 …"
        )
        assert index is not None and index.shape == (1, 1), (
            f"position_rank is [1, 1], not {index if index is None else index.shape}"
        )

    def load(self):
        """Return `PositionRanks` with this rank's index loaded into SBUF, or None if `count` is 1."""
        return PositionRanks(self.group, self.count, self.index) if self.count > 1 else None
