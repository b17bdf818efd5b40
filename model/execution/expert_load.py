"""Load of ranks under expert parallelism: how many expert selections each group of ranks computes.

A router selects some experts for each token; each group holds some of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model.config import ModelConfig
from model.config.blocks import Experts
from model.mesh import Mesh


@dataclass
class ExpertLoad:
    """Counts of expert selections by data-parallel group.

    There are `data` groups. Each `expert` neighbouring groups divide the model's `count` experts. Padding rows select
    experts as well, and are counted. `choices` has the count of each group. `uneven` is the largest load of a group in
    one layer of one step, as a multiple of the mean over the groups that share its experts.
    """

    data: int
    expert: int
    count: int
    choices: list[int] = field(init=False)
    uneven: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        self.choices = [0] * self.data

    def add(self, expert_ids: Sequence[np.ndarray]) -> None:
        """Count the selections of one layer in a step.

        Args:
            expert_ids: For each data-parallel group, the ids of the experts that its tokens selected.
        """
        for first in range(0, self.data, self.expert):
            selected = np.concatenate([ids.ravel() for ids in expert_ids[first : first + self.expert]])
            loads = np.bincount(selected // (self.count // self.expert), minlength=self.expert)
            self.uneven = max(self.uneven, float(loads.max() / loads.mean()))
            for group, load in enumerate(loads.tolist(), first):
                self.choices[group] += load

    @classmethod
    def for_model(cls, config: ModelConfig, mesh: Mesh) -> ExpertLoad | None:
        """Return empty counts for a model on a mesh.

        Returns None for a model without routed experts, or a mesh without expert parallelism.
        """
        experts = [block.mlp.count for block in config.blocks if isinstance(block.mlp, Experts)]
        return cls(mesh.data, mesh.expert, experts[0]) if experts and mesh.expert > 1 else None

    @property
    def largest_to_mean(self) -> float:
        """Largest count of a group over all steps, as a multiple of the mean of all groups."""
        return max(self.choices) * self.data / max(1, sum(self.choices))

    def text(self) -> str:
        """Return a sentence about the load of the groups."""
        numbers = ", ".join(f"{count:,}" for count in self.choices)
        return (
            f"experts on {self.data} groups computed {numbers} choices: the largest is {self.largest_to_mean:.2f} "
            f"times the mean, in one layer of a step up to {self.uneven:.2f} times"
        )
