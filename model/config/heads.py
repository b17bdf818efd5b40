"""Heads of tensor-parallel ranks: the single definition for weights, caches, launches and plans.

Each group of query heads shares one key/value head. A rank holds whole heads, and all ranks hold the same number.
Ranks beyond the last head hold padding: zero weights and biases give zero values, and meet zero rows of the output
projection, so padding adds nothing. There may be more ranks than query heads.

- With at most as many ranks as key/value heads, a rank holds whole groups.
- With more ranks, neighbouring ranks hold the same key/value head and divide the query heads of its group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadLayout:
    """Division of `heads` query heads in `kv_heads` groups over `ranks` ranks."""

    heads: int
    kv_heads: int
    ranks: int

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.heads} heads in {self.kv_heads} groups"
        assert self.ranks > 0, f"{self.heads} heads over {self.ranks} ranks"

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same key/value head: ranks // kv_heads, at least 1."""
        return max(1, self.ranks // self.kv_heads)

    @property
    def heads_of_rank(self) -> int:
        """Number of query heads of a rank, padding included."""
        group = self.heads // self.kv_heads
        return self.kv_heads_of_rank * -(-group // self.copies)

    @property
    def kv_heads_of_rank(self) -> int:
        """Number of key/value heads of a rank, padding included."""
        return -(-self.kv_heads // self.ranks)

    def queries(self, rank: int) -> range:
        """Return the indices, among all query heads, of those that a rank holds; empty if it holds only padding."""
        group = self.heads // self.kv_heads
        kv = self.keys(rank)
        if self.copies == 1 or not kv:
            return range(kv.start * group, kv.stop * group)
        first = min(group, rank % self.copies * self.heads_of_rank)
        end = min(group, first + self.heads_of_rank)
        return range(kv.start * group + first, kv.start * group + end)

    def keys(self, rank: int) -> range:
        """Return the indices, among all key/value heads, of those that a rank holds; empty if it holds only padding."""
        first = rank // self.copies * self.kv_heads_of_rank
        return range(min(self.kv_heads, first), min(self.kv_heads, first + self.kv_heads_of_rank))

    @property
    def padding(self) -> int:
        """Number of padding query heads, summed over all ranks."""
        return self.ranks * self.heads_of_rank - self.heads
