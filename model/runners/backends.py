"""Backends of pipelines: what creates the components of a diffusion model that compute, or that are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from model.config.component import ComponentConfig
from model.errors import ModelError, check_memory
from model.execution.bound_launch import Device
from model.loading.component import LoadedComponent
from model.runners.component import (
    Arrays,
    Component,
    KernelComponent,
    ReferenceComponent,
    count_activation_bytes,
)
from model.runners.image_mesh import create_mesh
from model.runners.pipelines.pipeline import Backend

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.runners.rank_memory import RankMemory


class ReferenceBackend:
    """Backend in NumPy; activations are rounded as on a device of `ranks` ranks."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return the component in NumPy, which takes batches of any size."""
        return ReferenceComponent(model, self._ranks)


class KernelBackend:
    """Backend with kernels on a device; a component is put on the device once for each size of batches.

    Args:
        device: The device.
        groups: Data-parallel groups of its ranks, which share each batch. With two, guidance has a pass on each.
        memory: HBM of a rank, into which every pass has to fit; None for no limit.
    """

    def __init__(self, device: Device, groups: int = 1, memory: RankMemory | None = None) -> None:
        self._device, self._groups, self._memory = device, groups, memory
        self._created: dict[tuple[str, int, ComponentConfig], KernelComponent] = {}

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return the component with kernels for batches of one size.

        Raises:
            ModelError: A kernel refuses the batch, or weights or activations exceed the memory of this machine or the
                HBM of a rank.
        """
        key = name, batch, model.config
        if key not in self._created:
            ranks, mesh = self._device.ranks, create_mesh(model.config, self._device.ranks, self._groups)
            rank_bytes = count_activation_bytes(model, -(-batch // self._groups), mesh.tensor)
            if self._memory is not None:
                self._memory.check_pass(name, batch, rank_bytes)
            check_memory(ranks * rank_bytes, f"the {name.replace('_', ' ')} of a batch of {batch}")
            self._created[key] = KernelComponent(model, self._device, batch, groups=self._groups)
        return self._created[key]


class CountingBackend:
    """Backend that counts the passes of components of another backend, and refuses outputs that are not finite.

    `passes` has the number of passes by the name of the component and the number of images or texts of a pass.
    """

    def __init__(self, backend: Backend) -> None:
        self.passes: Counter[tuple[str, int]] = Counter()
        self._backend = backend

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return the component of the other backend, whose passes are counted."""
        return _CountedComponent(self._backend.create(model, batch, name), self.passes, (name, batch))


@dataclass(frozen=True)
class _CountedComponent:
    """Component whose passes are counted in `passes` under `key`."""

    component: Component
    passes: Counter[tuple[str, int]]
    key: tuple[str, int]

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Count a pass, and return the outputs of the component.

        Raises:
            ModelError: An output is not finite.
        """
        self.passes[self.key] += 1
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the outputs are checked instead
            outputs = self.component.run(inputs)
        for array in outputs.values():
            if not np.isfinite(array).all():
                name = self.key[0].replace("_", " ")
                raise ModelError(
                    f"the {name} computes numbers that are not finite: weights of the checkpoint or latents are too "
                    "large or not finite; download the checkpoint again, or give a smaller --guidance",
                    "NKW-MODEL-WEIGHTS",
                )
        return outputs
