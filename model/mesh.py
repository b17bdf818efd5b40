"""The mesh of ranks: who holds which shard of the model, which sequences, and which groups meet in a collective.

    rank = data index * tensor + tensor index

A group of tensor-parallel ranks holds the model once and computes some of the sequences; data-parallel groups hold the
same weights and compute other sequences. Expert and pipeline parallelism will be further axes of the same product.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.layers.launch import Axis
from model.layers.shard import Shard


@dataclass(frozen=True)
class Mesh:
    """Ranks along two axes: `data` groups of `tensor` ranks."""

    tensor: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.data * self.tensor

    def shard(self, rank: int) -> Shard:
        """The shard of the model that a rank holds."""
        return Shard(rank % self.tensor, self.tensor)

    def group_of(self, rank: int) -> int:
        """The data-parallel group of a rank: which of the parts of a batch it computes."""
        return rank // self.tensor

    def groups(self, axis: Axis) -> list[list[int]] | None:
        """The ranks that meet in a collective along an axis, group by group; None where each is alone."""
        assert axis is Axis.tensor, f"no collective runs along {axis}"
        if self.tensor == 1:
            return None
        return [list(range(first, first + self.tensor)) for first in range(0, self.ranks, self.tensor)]

    def sequences_of_group(self, sequences: int) -> int:
        """The most sequences of a batch that one group computes; the last groups may have fewer."""
        return -(-sequences // self.data)
