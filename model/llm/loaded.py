"""A model folder, opened: what every command makes of it, from the weights of ranks to the model in plain numpy."""

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
from model.layers.precision import activation_dtype
from model.layers.weight import WeightDtypes
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.weights import RankWeights, shard_weights, weight_dtypes
from model.mesh import Mesh
from model.runners.reference import ReferenceModel


@dataclass(frozen=True)
class LoadedModel:
    """A folder with its config and its mapped checkpoint; `dtype` is that of the activations, or auto."""

    folder: Path
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: str = "float32"

    @classmethod
    def open(cls, folder: Path, dtype: str = "float32", config: ModelConfig | None = None) -> LoadedModel:
        """Open a folder, whose `config` may be known. Raises ModelError for files that do not fit together."""
        config = config or load_config(folder)
        return cls(folder, config, open_checkpoint(folder, config), dtype)

    @property
    def activations(self) -> np.dtype:
        """The dtype of activations."""
        return activation_dtype(self.dtype, self.config, self.checkpoint)

    @property
    def weight_dtypes(self) -> WeightDtypes:
        """The dtypes of weights on a device; nothing of the checkpoint is read but its own dtypes."""
        return weight_dtypes(compose(self.config).weights, self.checkpoint, self.activations)

    def shards(self, mesh: Mesh, ranks: Iterable[int] | None = None) -> tuple[RankWeights, ...]:
        """The weights of some ranks of a mesh, of all by default, each distinct shard once.

        A rank alone has those of its pipeline stage. Raises ModelError where ranks cannot share the model.
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

    def reference(self, ranks: int = 1) -> ReferenceModel:
        """The model in plain numpy, which rounds as on a device of so many ranks."""
        return ReferenceModel(self.config, self.checkpoint, self.dtype, ranks=ranks)


def open_device(backend: str, target: str, ranks: int, **simulation: Any) -> Device:
    """The device of a backend, simulate or neuron; `simulation` are options of a simulated one.

    Raises ModelError for another backend.
    """
    if backend == "simulate":
        from model.device import SimulatedDevice

        return SimulatedDevice(target, ranks, **simulation)
    if backend == "neuron":
        from model.device.neuron import NeuronDevice

        return NeuronDevice(ranks)
    raise ModelError(f"backend {backend!r}; an engine knows simulate and neuron")
