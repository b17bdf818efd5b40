"""Predicted times of a diffusion model: dry runs of the passes that a runner makes, component by component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.loading.component import LoadedComponent
from model.runners.component import Arrays, Component, KernelComponent, count_activation_bytes
from model.runners.image_mesh import create_mesh

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import DryDevice
    from model.device.prediction import Pass, Prediction
    from model.runners.rank_memory import RankMemory


@dataclass(frozen=True)
class ComponentTime:
    """Predicted time of a component: number of passes, images or texts of a pass, and one pass with its prediction.

    `activation_bytes` are the bytes of a pass on a rank, beside weights.
    """

    name: str
    passes: int
    batch: int
    prediction: Prediction
    model_pass: Pass
    activation_bytes: int

    @property
    def label(self) -> str:
        """Name of the component, and the images or texts of a pass."""
        batch = f", a pass of {self.batch}" if self.batch > 1 else ", a pass"
        return self.name.replace("_", " ") + batch

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
            "activation_bytes": self.activation_bytes,
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
        memory: HBM of a rank, into which every pass has to fit; None for no limit.
    """

    def __init__(
        self, device: DryDevice, target: str, groups: int = 1, memory: RankMemory | None = None
    ) -> None:
        self._device, self._target, self._groups = device, target, groups
        self._memory = memory
        self._timed: dict[tuple[str, int], TimedComponent] = {}

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return the component, timed for batches of one size.

        Raises:
            ModelError: A kernel refuses the batch, or its activations do not fit beside the weights.
        """
        if (name, batch) not in self._timed:
            self._timed[name, batch] = self._time(model, batch, name)
        return self._timed[name, batch]

    def _time(self, model: LoadedComponent, batch: int, name: str) -> TimedComponent:
        """Return the component after a dry run of one pass."""
        mesh = create_mesh(model.config, self._device.ranks, self._groups)
        activation_bytes = count_activation_bytes(model, -(-batch // self._groups), mesh.tensor)
        if self._memory is not None:
            self._memory.check_pass(name, batch, activation_bytes)
        shards = model.describe_shards(mesh, self._target)
        component = KernelComponent(
            model, self._device, batch, shards, self._device.layer_done, groups=self._groups
        )
        outputs = component.run(component.create_inputs())
        model_pass = self._device.take_pass()
        return TimedComponent(outputs, model_pass.prediction(), model_pass, activation_bytes)

    def list_times(self, passes: Mapping[tuple[str, int], int]) -> list[ComponentTime]:
        """Return the predicted times of components that have been created.

        Args:
            passes: Number of passes by the name of a component and the size of its batches.
        """
        return [
            ComponentTime(name, count, batch, timed.prediction, timed.model_pass, timed.activation_bytes)
            for (name, batch), count in passes.items()
            for timed in (self._timed[name, batch],)
        ]


@dataclass(frozen=True)
class TimedComponent:
    """Component with one pass and its prediction, whose outputs are always the same zeros."""

    outputs: Arrays
    prediction: Prediction
    model_pass: Pass
    activation_bytes: int

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Return zeros with the shapes of the outputs."""
        return self.outputs
