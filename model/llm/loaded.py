"""Opened model folder: weights of ranks, reference model in plain numpy, and devices of the backends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.execution.bound_launch import Device
from model.execution.stages import layers_of_stage
from model.families import compose, load_config
from model.layers.precision import choose_activation_dtype
from model.layers.weight import WeightDtypes
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.weights import RankWeights, choose_weight_dtypes, shard_weights
from model.mesh import Mesh
from model.runners.reference import ReferenceModel


@dataclass(frozen=True)
class LoadedModel:
    """Model folder with its config and its mapped checkpoint. `dtype` is the dtype of activations, or auto."""

    folder: Path
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: str = "float32"

    @classmethod
    def open(cls, folder: Path, dtype: str = "float32", config: ModelConfig | None = None) -> LoadedModel:
        """Open a folder. Raises ModelError for files that disagree.

        Args:
            config: the folder's config where it has been read; None to read it.
        """
        config = config or load_config(folder)
        return cls(folder, config, open_checkpoint(folder, config), dtype)

    @property
    def activations(self) -> np.dtype:
        """Dtype of activations."""
        return choose_activation_dtype(self.dtype, self.config, self.checkpoint)

    @property
    def weight_dtypes(self) -> WeightDtypes:
        """Dtypes of weights on a device, without reading the checkpoint's tensors."""
        return choose_weight_dtypes(compose(self.config).weights, self.checkpoint, self.activations)

    def load_shards(self, mesh: Mesh, ranks: Iterable[int] | None = None) -> tuple[RankWeights, ...]:
        """Return the weights of ranks of a mesh, each distinct shard once.

        Args:
            ranks: the ranks; None for all. A single rank of several has the weights of its pipeline stage only.

        Raises:
            ModelError: the ranks cannot share the model, or the weights exceed the memory of this machine.
        """
        ranks = list(range(mesh.ranks) if ranks is None else ranks)
        distinct = list(dict.fromkeys(map(mesh.shard, ranks)))
        layers = (
            layers_of_stage(compose(self.config), mesh, ranks[0]) if len(ranks) == 1 < mesh.ranks else None
        )
        checkpoint = self.checkpoint
        return shard_weights(
            self.config, checkpoint, mesh.tensor, distinct, checkpoint.release, self.dtype, layers
        )

    def create_reference(self, ranks: int = 1) -> ReferenceModel:
        """Return the model in plain numpy, with the rounding of a device of `ranks` ranks."""
        return ReferenceModel(self.config, self.checkpoint, self.dtype, ranks=ranks)


def open_device(backend: str, target: str, ranks: int, **simulation: Any) -> Device:
    """Return the device of a backend. Raises ModelError for a backend that is neither simulate nor neuron.

    Args:
        simulation: options of a simulated device.
    """
    if backend == "simulate":
        from model.device import SimulatedDevice

        return SimulatedDevice(target, ranks, **simulation)
    if backend == "neuron":
        from model.device.neuron import NeuronDevice

        return NeuronDevice(ranks, target)
    raise ModelError(f"backend {backend!r}; an engine knows simulate and neuron")
