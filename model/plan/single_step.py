"""Plan of a model whose forward passes all have the same size: its weights, and the kernels of one pass on one rank.

Such a model reads a fixed-size input and keeps no cache, unlike a language model. `nkw plan` calls `plan_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from model.config import Config
from model.families import compose
from model.layers.launch import Launch, WeightDtypes
from model.layers.shard import Shard
from model.mesh import Mesh
from model.plan.dry import DryTimes, Time
from model.runners.single_step import make_step


@dataclass(frozen=True)
class StepPlan:
    """Number of parameters, bytes of weights, and the kernel launches of one forward pass with their predicted times.

    `target` is the chip, and `lnc` the number of physical cores of the rank. `launches` has (launch, time, cores) in
    the order of execution; `cores` is the number of the rank's physical cores that the launch keeps busy.
    """

    target: str
    lnc: int
    parameters: int
    weight_bytes: int
    launches: tuple[tuple[Launch, Time, int], ...]

    @property
    def step_ns(self) -> float:
        """Predicted time of the pass in ns: the sum over its kernels, without starting and ending them."""
        return sum(time.program_ns for _, time, _ in self.launches)

    def format_lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the report that `nkw plan` prints.

        Args:
            name: name of the model for the first line.
        """
        yield f"{name}: {self.parameters:,} parameters, {self.weight_bytes:,} bytes"
        for launch, time, cores in self.launches:
            work = f"{launch.work.operations:,.0f} operations, {launch.work.bytes:,.0f} bytes"
            where = f", on one of the {self.lnc} physical cores" if cores < self.lnc else ""
            yield f"  {launch.title}: {time.program_ns / 1000:.1f} us for {work}{where}"
        core = "core" if self.lnc == 1 else "logical core"
        yield f"one step on a {core} of {self.target} (LNC {self.lnc}): {self.step_ns / 1000:.1f} us"

    def build_document(self, name: str) -> dict[str, Any]:
        """Return the plan as the JSON object that `nkw plan --json` prints; times are in ns."""
        return {
            "model": name,
            "target": self.target,
            "lnc": self.lnc,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "step_ns": self.step_ns,
            "launches": [
                {
                    "kernel": launch.title,
                    "ns": time.program_ns,
                    "cores": cores,
                    "operations": launch.work.operations,
                    "bytes": launch.work.bytes,
                }
                for launch, time, cores in self.launches
            ],
        }


def plan_step(config: Config, target: str, dtype: str, lnc: int = 1) -> StepPlan:
    """Plan one forward pass of a model on one rank of a chip; every kernel is timed by a dry run.

    Args:
        config: the model.
        target: name of the chip.
        dtype: "float32" keeps activations and weights in float32; other dtypes are planned as bfloat16.
        lnc: physical cores of the rank. A kernel whose work cannot be divided among them is launched on one core.

    Raises:
        ModelError: a kernel refuses its launch.
    """
    activations = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    network, dry = compose(config), DryTimes(target, Mesh(1), lnc)
    step = make_step(config, activations, WeightDtypes(activations))
    parameters = sum(prod(weight.shape(Shard(0, 1))) for weight in network.weights)
    launches = (launch for layer in network.all_layers for launch in layer.launches(step))
    times = tuple((launch, dry.time_launch(launch), dry.busy_cores) for launch in launches)
    return StepPlan(target, lnc, parameters, parameters * activations.itemsize, times)
