"""Predicted times of a diffusion model: dry runs of the passes that a runner makes, component by component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.loading.component import LoadedComponent
from model.mesh import Mesh
from model.runners.component import Arrays, Component, KernelComponent

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import DryDevice
    from model.device.prediction import Prediction


@dataclass(frozen=True)
class ComponentTime:
    """Predicted time of a component: number of passes, images or texts of a pass, and the prediction of one pass."""

    name: str
    passes: int
    batch: int
    prediction: Prediction

    @property
    def total_ns(self) -> float:
        """Time of all passes in ns, with engines and DMA queues in program order."""
        return self.passes * self.prediction.program_ns

    def build_document(self) -> dict[str, Any]:
        """Return the time as a JSON object; times are in ns."""
        return {
            "name": self.name,
            "passes": self.passes,
            "batch": self.batch,
            "pass_ns": self.prediction.program_ns,
            "dataflow_ns": self.prediction.dataflow_ns,
            "serial_ns": self.prediction.serial_ns,
            "total_ns": self.total_ns,
        }


class DryBackend:
    """Backend that times each component once and returns zeros.

    Args:
        device: The dry device.
        target: Name of its chip.
        groups: Data-parallel groups of its ranks, which share each batch.
    """

    def __init__(self, device: DryDevice, target: str, groups: int = 1) -> None:
        self._device, self._target, self._groups = device, target, groups
        self._timed: dict[tuple[str, int], TimedComponent] = {}

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return the component, timed for batches of one size."""
        if (name, batch) not in self._timed:
            self._timed[name, batch] = self._time(model, batch)
        return self._timed[name, batch]

    def _time(self, model: LoadedComponent, batch: int) -> TimedComponent:
        """Return the component after a dry run of one pass."""
        shards = model.describe_shards(Mesh(self._device.ranks // self._groups), self._target)
        component = KernelComponent(model, self._device, batch, shards, groups=self._groups)
        outputs = component.run(component.create_inputs())
        return TimedComponent(outputs, self._device.take_pass().prediction())

    def list_times(self, passes: Mapping[tuple[str, int], int]) -> list[ComponentTime]:
        """Return the predicted times of components that have been created.

        Args:
            passes: Number of passes by the name of a component and the size of its batches.
        """
        return [
            ComponentTime(name, count, batch, self._timed[name, batch].prediction)
            for (name, batch), count in passes.items()
        ]


@dataclass(frozen=True)
class TimedComponent:
    """Component with the prediction of one pass, whose outputs are always the same zeros."""

    outputs: Arrays
    prediction: Prediction

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return zeros with the shapes of the outputs."""
        return self.outputs
