"""Which heads a tensor-parallel rank holds: the one definition for weights, caches, launches and plans.

Query heads come in groups, each with one key/value head. A rank holds whole heads, and every rank as many as the
first. Where the model has no heads left for a rank, it holds padding: zero weights and biases give zero values, and
meet zero rows of the output projection, so padding adds nothing.

- As many ranks as key/value heads, or fewer: a rank holds whole groups.
- More: each key/value head is held by neighbouring ranks, which divide the query heads of its group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadLayout:
    """`heads` query heads in `kv_heads` groups, divided over `ranks` ranks: at most as many as query heads."""

    heads: int
    kv_heads: int
    ranks: int

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.heads} heads in {self.kv_heads} groups"
        assert 0 < self.ranks <= self.heads, f"{self.heads} heads over {self.ranks} ranks"

    @property
    def copies(self) -> int:
        """The ranks that hold the same key/value head."""
        return max(1, self.ranks // self.kv_heads)

    @property
    def heads_of_rank(self) -> int:
        """Query heads of every rank, padding included."""
        group = self.heads // self.kv_heads
        return self.kv_heads_of_rank * -(-group // self.copies)

    @property
    def kv_heads_of_rank(self) -> int:
        """Key/value heads of every rank, padding included."""
        return -(-self.kv_heads // self.ranks)

    def queries(self, rank: int) -> range:
        """The query heads that a rank holds, padding not included."""
        group = self.heads // self.kv_heads
        kv = self.keys(rank)
        if self.copies == 1 or not kv:
            return range(kv.start * group, kv.stop * group)
        place = min(group, rank % self.copies * self.heads_of_rank)
        end = min(group, place + self.heads_of_rank)
        return range(kv.start * group + place, kv.start * group + end)

    def keys(self, rank: int) -> range:
        """The key/value heads that a rank holds, padding not included."""
        held = self.kv_heads_of_rank
        first = rank // self.copies * held
        return range(min(self.kv_heads, first), min(self.kv_heads, first + held))

    @property
    def padding(self) -> int:
        """Query heads of all ranks that are padding."""
        return self.ranks * self.heads_of_rank - self.heads
