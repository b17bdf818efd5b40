"""Mesh of ranks: shards, sequences and rows of each rank, and the groups of collectives.

    rank = (stage * data + data index) * tensor + tensor index

A pipeline stage holds some of the layers. A group of tensor-parallel ranks holds the layers of its stage once and
computes some of the sequences. Data-parallel groups hold the same weights and compute further sequences. Stages are the
outermost axis, because they exchange least: one matrix, over the slowest links. Sequence parallelism needs no axis: the
ranks of a tensor-parallel group divide the rows of its prompts. Expert parallelism needs no axis: neighbouring
data-parallel groups divide the routed experts, and exchange the rows of their tokens. Ulysses needs no axis:
neighbouring data-parallel groups divide the rows of the same sequences, and exchange heads around attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from model.config.blocks import Experts, ModelConfig
from model.errors import ModelError
from model.layers.launch import Axis
from model.layers.shard import Shard


def check_sequence(cuts_sequence: bool, tensor: int) -> None:
    """Raise ModelError if sequence parallelism is asked for (`cuts_sequence`) and there is 1 tensor-parallel rank."""
    if cuts_sequence and tensor == 1:
        raise ModelError(
            "--sp cuts prompts over tensor-parallel ranks and there is 1; ask for more with --tp"
        )


def collect_expert_counts(config: ModelConfig) -> set[int]:
    """Return the numbers of routed experts that the layers have, each once; empty for a model without them."""
    return {block.mlp.count for block in config.blocks if isinstance(block.mlp, Experts)}


def check_expert_groups(config: ModelConfig, expert: int) -> None:
    """Raise ModelError if `expert` groups cannot divide the routed experts of a model evenly.

    One group always can. More need a model with routed experts, and must divide their number in every layer.
    """
    if expert == 1:
        return
    counts = collect_expert_counts(config)
    if not counts:
        raise ModelError(f"--ep {expert} divides routed experts, and this model has none; leave it out")
    for count in counts:
        if count % expert:
            raise ModelError(
                f"--ep {expert} does not divide the {count} experts of this model; take a divisor of {count}"
            )


def check_experts(config: ModelConfig, expert: int, data: int) -> None:
    """Raise ModelError if `expert` groups cannot divide the routed experts evenly, or do not divide `data` groups.

    `data` is the number of data-parallel groups.
    """
    check_expert_groups(config, expert)
    if data % expert:
        raise ModelError(
            f"--ep {expert} divides experts over as many groups of --dp, and {data} is no multiple of it; "
            f"give a --dp that is a multiple of {expert}"
        )


@dataclass(frozen=True)
class Mesh:
    """Ranks along three axes: `pipeline` stages of `data` groups of `tensor` ranks.

    sequence  the ranks of a group divide the rows of its prompts
    expert    neighbouring groups that hold the routed experts once together; each holds all further weights
    ulysses   neighbouring groups that divide the rows of the same sequences; each holds all weights
    """

    tensor: int = 1
    data: int = 1
    sequence: bool = False
    pipeline: int = 1
    expert: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        """Raise AssertionError for a divided sequence on one rank, or if `expert` or `ulysses` do not divide `data`."""
        assert self.tensor > 1 or not self.sequence, "a single rank cannot divide a sequence"
        assert self.expert == 1 or self.ulysses == 1, "groups divide either experts or rows"
        for count in (self.expert, self.ulysses):
            assert self.data % count == 0, f"{count} do not divide {self.data} groups"

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole mesh."""
        return self.pipeline * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.data * self.tensor

    def find_stage(self, rank: int) -> int:
        """Return the index of the pipeline stage to which a rank of the mesh belongs."""
        return rank // self.stage_ranks

    def shard(self, rank: int) -> Shard:
        """Return the shard of its stage's weights that a rank of the mesh holds, and the rank among Ulysses ranks."""
        group = rank // self.tensor
        experts, rows = (group % self.expert, self.expert), (group % self.ulysses, self.ulysses)
        return Shard(rank % self.tensor, self.tensor, *experts, *rows)

    @property
    def shards(self) -> list[Shard]:
        """Shards of the ranks of a pipeline stage, each once, in the order of ranks."""
        return list(dict.fromkeys(map(self.shard, range(self.stage_ranks))))

    def find_group(self, rank: int) -> int:
        """Return the index of a rank's data-parallel group among the groups of its pipeline stage."""
        return rank // self.tensor % self.data

    def list_groups(self, axis: Axis) -> list[list[int]] | None:
        """Return the ranks of each group of a collective along an axis but `pipeline`, for all stages.

        None if groups have a single rank. A group along the axis `expert` or `ulysses` has the ranks that hold the same
        tensor-parallel shard, of different experts or rows.
        """
        sizes = {Axis.tensor: self.tensor, Axis.expert: self.expert, Axis.ulysses: self.ulysses}
        sizes[Axis.flattened] = self.tensor * self.ulysses
        assert axis in sizes, f"no collective runs along {axis}"
        size = sizes[axis]
        if size == 1:
            return None
        if axis in (Axis.tensor, Axis.flattened):
            return [list(range(first, first + size)) for first in range(0, self.ranks, size)]
        span = size * self.tensor
        return [
            list(range(first + rank, first + span, self.tensor))
            for first in range(0, self.ranks, span)
            for rank in range(self.tensor)
        ]

    def count_group_sequences(self, sequences: int) -> int:
        """Return the most of `sequences` sequences that a data-parallel group computes; the last may have fewer.

        Groups of Ulysses ranks compute the same sequences.
        """
        return -(-sequences // (self.data // self.ulysses))

    @property
    def row_multiple(self) -> int:
        """Number of which the rows of a group's prompts must be a multiple: 1 without sequence parallelism."""
        return self.tensor if self.sequence else 1

    def pad_length(self, tokens: int, sequences: int) -> int:
        """Return the smallest length, at least `tokens`, to which a group pads each of its `sequences` prompts.

        The ranks of the group can then divide the rows of all prompts evenly (`row_multiple`).
        """
        multiple = self.row_multiple // gcd(self.row_multiple, sequences)
        return -(-tokens // multiple) * multiple

    def slice_local_rows(self, rank: int, rows: int) -> slice:
        """Return the slice of the `rows` rows of its group's prompts whose hidden states a rank holds.

        It is all rows without sequence parallelism. With it, the ranks of a group must divide the rows.
        """
        if not self.sequence:
            return slice(0, rows)
        assert rows % self.tensor == 0, f"{rows} rows over {self.tensor} ranks"
        count, first = rows // self.tensor, rank % self.tensor
        return slice(first * count, (first + 1) * count)
