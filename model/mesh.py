"""The mesh of ranks: who holds which shard of the model, which sequences and rows, which groups meet in a collective.

    rank = data index * tensor + tensor index

A group of tensor-parallel ranks holds the model once and computes some of the sequences; data-parallel groups hold the
same weights and compute other sequences. Sequence parallelism is no further axis: the ranks of a tensor-parallel group
cut the rows of its prompts among them. Expert and pipeline parallelism will be further axes of the same product.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from model.errors import ModelError
from model.layers.launch import Axis
from model.layers.shard import Shard


def check_sequence(cuts_sequence: bool, tensor: int) -> None:
    """ModelError for sequence parallelism on one tensor-parallel rank."""
    if cuts_sequence and tensor == 1:
        raise ModelError(
            "--sp cuts prompts over tensor-parallel ranks and there is 1; ask for more with --tp"
        )


@dataclass(frozen=True)
class Mesh:
    """Ranks along two axes: `data` groups of `tensor` ranks, which may cut the `sequence` of prompts among them."""

    tensor: int = 1
    data: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        assert self.tensor > 1 or not self.sequence, "one rank has nobody to cut a sequence with"

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

    @property
    def row_multiple(self) -> int:
        """What the rows of a group's prompts are a multiple of."""
        return self.tensor if self.sequence else 1

    def padded_length(self, tokens: int, sequences: int) -> int:
        """The length to which a group pads `sequences` prompts of up to `tokens` tokens, so that ranks divide rows."""
        multiple = self.row_multiple // gcd(self.row_multiple, sequences)
        return -(-tokens // multiple) * multiple

    def own_rows(self, rank: int, rows: int) -> slice:
        """The rows of the residual stream that a rank holds, of the `rows` of its group's prompts."""
        if not self.sequence:
            return slice(0, rows)
        assert rows % self.tensor == 0, f"{rows} rows over {self.tensor} ranks"
        count, first = rows // self.tensor, rank % self.tensor
        return slice(first * count, (first + 1) * count)
