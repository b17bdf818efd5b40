"""The mesh of ranks: who holds which shard of the model, which sequences and rows, which groups meet in a collective.

    rank = (stage * data + data index) * tensor + tensor index

A stage of the pipeline holds some of the layers. In it a group of tensor-parallel ranks holds these layers once and
computes some of the sequences; data-parallel groups hold the same weights and compute other sequences. Stages are the
outermost axis, because they exchange least: one matrix, over the links that are slowest. Sequence parallelism is no
further axis: the ranks of a tensor-parallel group cut the rows of its prompts among them. Nor is expert parallelism:
neighbouring data-parallel groups divide the routed experts, and send each other the rows that pass these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from model.config.parts import Experts, ModelConfig
from model.errors import ModelError
from model.layers.launch import Axis
from model.layers.shard import Shard


def check_sequence(cuts_sequence: bool, tensor: int) -> None:
    """ModelError for sequence parallelism on one tensor-parallel rank."""
    if cuts_sequence and tensor == 1:
        raise ModelError(
            "--sp cuts prompts over tensor-parallel ranks and there is 1; ask for more with --tp"
        )


def routed_experts(config: ModelConfig) -> set[int]:
    """The numbers of routed experts that layers of a model have."""
    return {block.mlp.count for block in config.blocks if isinstance(block.mlp, Experts)}


def check_expert_groups(config: ModelConfig, expert: int) -> None:
    """ModelError where `expert` groups cannot divide the routed experts of a model."""
    if expert == 1:
        return
    counts = routed_experts(config)
    if not counts:
        raise ModelError(f"--ep {expert} divides routed experts, and this model has none")
    for count in counts:
        if count % expert:
            raise ModelError(f"--ep {expert} does not divide the {count} experts of this model")


def check_experts(config: ModelConfig, expert: int, data: int) -> None:
    """ModelError where `expert` of `data` groups cannot divide the routed experts of a model."""
    check_expert_groups(config, expert)
    if data % expert:
        raise ModelError(
            f"--ep {expert} divides experts over as many groups of --dp, and {data} is no multiple of it"
        )


@dataclass(frozen=True)
class Mesh:
    """Ranks along three axes: `pipeline` stages of `data` groups of `tensor` ranks.

    The ranks of a group may cut the `sequence` of prompts among them. Each `expert` neighbouring groups hold the routed
    experts once, and each of them the other weights.
    """

    tensor: int = 1
    data: int = 1
    sequence: bool = False
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        assert self.tensor > 1 or not self.sequence, "one rank has nobody to cut a sequence with"
        assert self.data % self.expert == 0, f"{self.expert} do not divide {self.data} groups"

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.pipeline * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """The ranks of each stage."""
        return self.data * self.tensor

    def stage_of(self, rank: int) -> int:
        """The stage of a rank."""
        return rank // self.stage_ranks

    def shard(self, rank: int) -> Shard:
        """The shard of the model that a rank holds."""
        return Shard(rank % self.tensor, self.tensor, rank // self.tensor % self.expert, self.expert)

    def group_of(self, rank: int) -> int:
        """The data-parallel group of a rank: which of the parts of a batch it computes."""
        return rank // self.tensor % self.data

    def groups(self, axis: Axis) -> list[list[int]] | None:
        """The ranks that meet in a collective along an axis, group by group; None where each is alone."""
        if axis is Axis.expert:
            return self._expert_groups()
        assert axis is Axis.tensor, f"no collective runs along {axis}"
        if self.tensor == 1:
            return None
        return [list(range(first, first + self.tensor)) for first in range(0, self.ranks, self.tensor)]

    def _expert_groups(self) -> list[list[int]] | None:
        """Ranks that hold the same part of other experts."""
        if self.expert == 1:
            return None
        together = self.expert * self.tensor
        return [
            list(range(first + rank, first + together, self.tensor))
            for first in range(0, self.ranks, together)
            for rank in range(self.tensor)
        ]

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
