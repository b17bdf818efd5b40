"""The arguments and sizes of a launch of attention_prefill, and the tiles that all of its steps share.

`attention_prefill` and `attention_mixed` make a `Prompts` from their arguments; the other files of the folder take it,
or the `PrefillLaunch` that contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.cores import CoreShare
from nki_kernels.prefill.load_ahead import LoadAhead
from nki_kernels.prefill.masks import Masks
from nki_kernels.prefill.position_bias import PositionBias
from nki_kernels.prefill.slopes import Slopes
from nki_kernels.prefill.tuning import Tuning
from nki_kernels.tiles import PARTITIONS, blocks, filled


@dataclass
class PromptStep(nl.NKIObject):
    """Arguments of a launch other than its tokens and its cache, by the names of `attention_prefill`'s parameters."""

    scale: float
    prefix: int
    positions: object = None
    window: object = None
    softcap: object = None
    sinks: object = None
    causal: bool = True
    slopes: object = None
    key_lengths: object = None
    position_bias: object = None
    bounded: bool = False


@dataclass
class Stream(nl.NKIObject):
    """Rows that are projected together, such as those of images, or of texts: `q`, `k`, `v` and `o` @ HBM.

    Each sequence has `queries` queries and `new_keys` keys of them. Its keys lie in SBUF from key `first_key` on, a
    multiple of 128, counted from the first new one.
    """

    q: nl.NkiTensor
    k: object
    v: object
    o: nl.NkiTensor
    queries: int
    new_keys: int
    first_key: int


class Prompts(nl.NKIObject):
    """Tensors and sizes of a launch of attention_prefill.

    `tokens` are q, k and v @ HBM, the results go to `o` @ HBM, `share` is what this core takes, and `scales` those of
    the cache, see `load_scales`. `stored`: the cache holds the new keys and values already, as k and v are None.
    `writes`: the launch writes them to a cache. Each sequence has `queries` queries and `keys` keys in SBUF: `cached`
    positions, padded to `cached_keys`, a multiple of 128; with pages of 4 bits, of `page` positions each (else 0),
    `rounded_keys` new ones as full pages store them; from key `prefix` on, `new_keys` new ones. D is divided into
    `depth_tiles` tiles, with `heights` elements each, at most `tile_depth`. `depth_ranges` are (first tile, end,
    height) of tiles of one height.

    `streams` has the `Stream` of these rows. In joint attention a second one follows, of `text`: its o and its tokens.
    `queries` and `new_keys` are those of the first; `gap` keys pad the first to whole blocks. A sequence has
    `query_tiles` tiles of queries in all streams.
    """

    def __init__(self, o, tokens, cache, step, scales, text=None):
        q, k, v = tokens
        self.k, self.v, self.cache, self.step = k, v, cache, step
        self.stored = k is None
        self.writes = k is not None and cache.k_cache is not None
        self.dtype = q.dtype
        self.sequences, self.kv_heads = cache.sequences, cache.kv_heads
        self.depth, self.value_depth = cache.depth, cache.value_depth
        self.positions, self.cached, self.scales = step.positions, step.prefix, scales
        self.queries = q.shape[0] // self.sequences
        self.new_keys = self.queries if self.stored else k.shape[0] // self.sequences
        self.page = cache.newest_positions
        self.cached_keys = blocks(self.cached) * PARTITIONS
        # Later pages of the prompt read the rounded keys of its earlier ones, so one page needs none.
        several = self.page > 0 and self.new_keys > self.page
        self.rounded_keys = blocks(self.new_keys) * PARTITIONS if several else 0
        self.prefix = self.cached_keys + self.rounded_keys
        self.keys = self.prefix + self.new_keys
        self.streams = [Stream(q, k, v, o, self.queries, self.new_keys, 0)]
        self.gap = 0
        if text is not None:
            o, (q, k, v) = text
            first_key = blocks(self.new_keys) * PARTITIONS
            self.gap = first_key - self.new_keys
            stream = Stream(q, k, v, o, q.shape[0] // self.sequences, k.shape[0] // self.sequences, first_key)
            self.streams.append(stream)
            self.keys = first_key + stream.new_keys
        self.query_tiles = 0
        for stream in self.streams:
            self.query_tiles += blocks(stream.queries)
        group = q.shape[1] // (self.kv_heads * self.depth)
        self.share = CoreShare(self.sequences * self.kv_heads, group, self.query_tiles)
        self.depth_tiles = blocks(self.depth)
        # D is divided evenly, since tiles of equal height share a DMA transpose.
        self.tile_depth = blocks(self.depth, self.depth_tiles)
        last = self.depth - (self.depth_tiles - 1) * self.tile_depth
        self.heights = [self.tile_depth] * (self.depth_tiles - 1) + [last]
        self.depth_ranges = [(0, self.depth_tiles, self.tile_depth)]
        if last < self.tile_depth:
            self.depth_ranges = [
                (0, self.depth_tiles - 1, self.tile_depth),
                (self.depth_tiles - 1, self.depth_tiles, last),
            ]


class PrefillLaunch(nl.NKIObject):
    """Records and tiles that the steps of all spans share.

    They are the prompts, the tuning, how early operands are loaded, the masks, and the slopes and biases, or None. exp
    multiplies scores by `exp_scale`. `sinks` are the `Sink` records of rows of heads, made when needed, by a name of
    the rows.
    `minus_one` and `minus_scale` are columns [128, 1] float32 @ SBUF of -1 and of -`exp_scale`.
    """

    def __init__(self, prompts):
        step = prompts.step
        self.prompts = prompts
        self.masks = Masks(prompts.dtype, step.causal, step.window)
        wide = nisa.get_nc_version() > nisa.nc_version.gen2
        self.tuning = Tuning(prompts.dtype, wide, prompts.depth_tiles, step, prompts.query_tiles)
        self.ahead = LoadAhead(prompts, self.tuning)
        self.exp_scale = step.scale if step.softcap is None else step.softcap
        self.slopes = None if step.slopes is None else Slopes(prompts)
        self.biases = None if step.position_bias is None else PositionBias(prompts)
        self.sinks = {}
        self.minus_one = filled((PARTITIONS, 1), -1.0)
        self.minus_scale = filled((PARTITIONS, 1), -self.exp_scale)
