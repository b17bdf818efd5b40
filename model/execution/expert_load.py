"""The load of ranks that divide routed experts: how many choices of tokens are computed by each group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model.config import ModelConfig
from model.config.parts import Experts
from model.mesh import Mesh


@dataclass
class ExpertLoad:
    """Choices by data-parallel group of `data`, of which each `expert` neighbours divide `count` experts.

    Rows of padding choose experts as well, and are counted. `uneven` is the largest load of a group in a layer of a
    step, as a multiple of the mean of the groups that share its experts.
    """

    data: int
    expert: int
    count: int
    choices: list[int] = field(init=False)
    uneven: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        self.choices = [0] * self.data

    def note(self, ids: Sequence[np.ndarray]) -> None:
        """Count what the tokens of each group chose in a layer of a step."""
        own = self.count // self.expert
        for first in range(0, self.data, self.expert):
            chosen = np.concatenate([each.ravel() for each in ids[first : first + self.expert]])
            loads = np.bincount(chosen // own, minlength=self.expert)
            self.uneven = max(self.uneven, float(loads.max() / loads.mean()))
            for place, load in enumerate(loads.tolist()):
                self.choices[first + place] += load

    @classmethod
    def of(cls, config: ModelConfig, mesh: Mesh) -> ExpertLoad | None:
        """That of a model's run, before it began; None where ranks do not divide experts."""
        experts = [block.mlp.count for block in config.blocks if isinstance(block.mlp, Experts)]
        return cls(mesh.data, mesh.expert, experts[0]) if experts and mesh.expert > 1 else None

    @property
    def largest_to_mean(self) -> float:
        """The largest load of a group over the whole run, as a multiple of the mean."""
        return max(self.choices) * self.data / max(1, sum(self.choices))

    def text(self) -> str:
        """The load in one sentence."""
        numbers = ", ".join(f"{each:,}" for each in self.choices)
        return (
            f"experts on {self.data} groups computed {numbers} choices: the largest is {self.largest_to_mean:.2f} "
            f"times the mean, in one layer of a step up to {self.uneven:.2f} times"
        )
