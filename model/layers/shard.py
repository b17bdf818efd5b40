"""How a weight takes its own shard of a tensor-parallel model.

Checkpoints hold a projection as [out, in]; kernels contract over the partitions and want [in, out]. Every function
here takes the whole [out, in] weight, cuts out what one rank needs, and returns it transposed and contiguous in the
checkpoint's dtype. That happens once, at load.

- Column parallel (gate, up; query by whole heads): a rank holds some of the outputs. No exchange follows.
- Row parallel (output and down projection): a rank holds some of the inputs; partial sums are all-reduced.
- Key and value heads: with more ranks than heads each head is held by several neighbouring ranks.
- Vocabulary parallel (the head): every rank holds as many tokens as the first, except the last, which holds what is
  left. A padded token would need masking, since a logit of 0 can win; a smaller shard needs nothing.

An MLP width that the ranks do not divide is padded with zeros: silu(0) * 0 is 0 and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.config import LlamaConfig
from model.errors import ModelError

_ROWS_AT_ONCE = 64
"""A cache line of bfloat16 holds 32 and one of float32 16; between 16 and 256 rows measured alike, 4 times numpy's."""


@dataclass(frozen=True)
class Shard:
    """Which of how many tensor-parallel ranks."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}"

    def span(self, size: int) -> slice:
        """This rank's part of `size` things that the ranks divide evenly."""
        assert size % self.ranks == 0, f"{size} over {self.ranks} ranks"
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)


def check_ranks(config: LlamaConfig, ranks: int) -> None:
    """Whether `ranks` ranks can share this model; ModelError says what does not divide."""
    if ranks < 1:
        raise ModelError(f"tensor parallelism over {ranks} ranks; at least 1 is needed")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks:
        raise ModelError(f"{ranks} ranks do not divide num_attention_heads, {heads}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ModelError(f"{ranks} ranks and num_key_value_heads, {kv_heads}: neither divides the other")
    if vocabulary_span(config.vocab_size, Shard(ranks - 1, ranks)).start >= config.vocab_size:
        raise ModelError(
            f"a vocabulary of {config.vocab_size} leaves the last of {ranks} ranks without a token"
        )


def local_key_value_heads(config: LlamaConfig, ranks: int) -> int:
    """Key/value heads held by one rank."""
    return max(1, config.num_key_value_heads // ranks)


def column_parallel(weight: np.ndarray, shard: Shard) -> np.ndarray:
    """[out, in] -> [in, out / ranks]; outputs padded with zeros to a multiple of the ranks."""
    part = -(-weight.shape[0] // shard.ranks)
    rows = weight[shard.rank * part : (shard.rank + 1) * part]
    return _transposed(_padded(rows, part))


def row_parallel(weight: np.ndarray, shard: Shard) -> np.ndarray:
    """[out, in] -> [in / ranks, out]; inputs padded with zeros to a multiple of the ranks."""
    part = -(-weight.shape[1] // shard.ranks)
    columns = weight[:, shard.rank * part : (shard.rank + 1) * part]
    return _padded(_transposed(columns), part)


def query_heads(weight: np.ndarray, shard: Shard) -> np.ndarray:
    """[heads * head_dim, in] -> [in, heads / ranks * head_dim]."""
    return _transposed(weight[shard.span(weight.shape[0])])


def key_value_heads(weight: np.ndarray, heads: int, shard: Shard) -> np.ndarray:
    """[heads * head_dim, in] -> [in, local heads * head_dim]; a head is repeated on neighbouring ranks if need be."""
    if shard.ranks <= heads:
        return _transposed(weight[shard.span(weight.shape[0])])
    head_dim = weight.shape[0] // heads
    head = shard.rank * heads // shard.ranks
    return _transposed(weight[head * head_dim : (head + 1) * head_dim])


def vocabulary_span(vocabulary: int, shard: Shard) -> slice:
    """The token ids whose logits a rank computes."""
    part = -(-vocabulary // shard.ranks)
    return slice(shard.rank * part, min(vocabulary, (shard.rank + 1) * part))


def vocabulary_parallel(weight: np.ndarray, shard: Shard) -> np.ndarray:
    """[vocabulary, in] -> [in, local vocabulary]."""
    return _transposed(weight[vocabulary_span(weight.shape[0], shard)])


def _transposed(weight: np.ndarray) -> np.ndarray:
    """[out, in] -> [in, out], contiguous; some rows at a time, because numpy's own order misses the caches."""
    result = np.empty(weight.shape[::-1], weight.dtype)
    words, columns = (array.view(f"u{array.itemsize}") for array in (weight, result))
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        columns[:, first : first + _ROWS_AT_ONCE] = words[first : first + _ROWS_AT_ONCE].T
    return result


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows of zeros added below, up to `count`."""
    if len(rows) == count:
        return rows
    padded = np.zeros((count, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
