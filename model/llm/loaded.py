"""Opened model folder: weights of ranks, the reference model in NumPy, and the devices of the backends.

`engine_args` and the commands that compute a model use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.config.quantization import adapt_to_chip
from model.errors import ModelError
from model.execution.bound_launch import Device
from model.execution.stages import list_stage_layers
from model.families import compose, load_config
from model.layers.cache_formats import (
    AUTO,
    CACHE_FORMATS,
    UNSCALED,
    CacheRounding,
    CacheScales,
    choose_cache_format,
)
from model.layers.precision import choose_activation_dtype
from model.layers.weight import WeightDtypes
from model.llm.cache_scales import choose_cache_scales
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.weights import (
    RankWeights,
    adapt_weights,
    choose_weight_dtypes,
    describe_all_ranks,
    shard_weights,
)
from model.mesh import Mesh
from model.runners.reference import ReferenceModel


@dataclass(frozen=True)
class LoadedModel:
    """Model folder with its config and its memory-mapped checkpoint.

    `dtype` is the dtype of activations: float32, bfloat16, or auto for the checkpoint's. `target` is the
    name of the chip whose formats weights and caches have; None for the formats of trn2.
    """

    folder: Path
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: str = "float32"
    target: str | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        dtype: str = "float32",
        config: ModelConfig | None = None,
        target: str | None = None,
    ) -> LoadedModel:
        """Open a folder, without reading its weights.

        Args:
            folder: the model folder.
            dtype: dtype of activations.
            config: the folder's config if it has been read; None to read it.
            target: name of the chip whose kernels read the weights; None for the formats of trn2.

        Raises:
            ModelError: files are missing or disagree.
        """
        config = config or load_config(folder)
        if target is not None:
            config = adapt_to_chip(config, target)
        return cls(folder, config, open_checkpoint(folder, config), dtype, target)

    def choose_cache_format(self, kv_cache_dtype: str, target: str | None = None) -> str:
        """Return the name of the format in which a chip stores caches of a format, see `choose_cache_format`.

        Args:
            kv_cache_dtype: name of the format.
            target: name of the chip; None for that of the model.
        """
        target = target or self.target
        if target is None or kv_cache_dtype == AUTO:  # avoids loading the simulator
            return kv_cache_dtype
        from model.device import chip

        return choose_cache_format(kv_cache_dtype, chip(target))

    @property
    def activations(self) -> np.dtype:
        """NumPy dtype of activations."""
        return choose_activation_dtype(self.dtype, self.config, self.checkpoint)

    @property
    def weight_dtypes(self) -> WeightDtypes:
        """Dtypes of weights on a device, from the checkpoint's header alone."""
        return choose_weight_dtypes(compose(self.config).weights, self.checkpoint, self.activations)

    def load_shards(self, mesh: Mesh, ranks: Iterable[int] | None = None) -> tuple[RankWeights, ...]:
        """Return the weights of ranks of a mesh, one entry for each distinct shard.

        Args:
            mesh: the mesh.
            ranks: the ranks; None for all. A single rank of several has the weights of its pipeline stage only.

        Raises:
            ModelError: the ranks cannot share the model, or the weights exceed the memory of this machine.
        """
        ranks = list(range(mesh.ranks) if ranks is None else ranks)
        distinct = list(dict.fromkeys(map(mesh.shard, ranks)))
        layers = (
            list_stage_layers(compose(self.config), mesh, ranks[0]) if len(ranks) == 1 < mesh.ranks else None
        )
        checkpoint = self.checkpoint
        return shard_weights(
            self.config, checkpoint, mesh.tensor, distinct, checkpoint.release, self.dtype, layers
        )

    def describe_shards(self, mesh: Mesh, target: str) -> tuple[RankWeights, ...]:
        """Return the weights of all ranks of a mesh as kernels of a chip read them, for dry runs: zeros without memory.

        Args:
            mesh: the mesh.
            target: name of the chip.
        """
        checkpoint = adapt_weights(self.checkpoint, target)
        dtypes = choose_weight_dtypes(compose(self.config).weights, checkpoint, self.activations)
        return describe_all_ranks(self.config, dtypes, self.activations, mesh.shards)

    def choose_cache_scales(self, kv_cache_dtype: str, calibration: str | Path | None) -> CacheScales:
        """Return the scales of caches of a format, from a calibration text or from the checkpoint.

        Raises:
            ModelError: the text cannot be used, or the checkpoint's scales are wrong.
        """
        path = None if calibration is None else Path(calibration)
        cache_format = self.choose_cache_format(kv_cache_dtype)
        return choose_cache_scales(self.folder, self.config, self.checkpoint, cache_format, path)

    def create_reference(
        self,
        ranks: int = 1,
        kv_cache_dtype: str = AUTO,
        cache_scales: CacheScales = UNSCALED,
        block_size: int = 0,
    ) -> ReferenceModel:
        """Return the model in NumPy.

        Args:
            ranks: activations are rounded as on a device of so many ranks.
            kv_cache_dtype: one of `CACHE_FORMATS`, in which it stores keys and values.
            cache_scales: their scales.
            block_size: positions of a page, for a format that packs pages.
        """
        caching = CacheRounding(
            CACHE_FORMATS[self.choose_cache_format(kv_cache_dtype)], cache_scales, block_size
        )
        return ReferenceModel(self.config, self.checkpoint, self.dtype, ranks=ranks, caching=caching)


def open_device(backend: str, target: str, ranks: int, **simulation: Any) -> Device:
    """Return a device of a backend.

    Args:
        backend: "simulate" or "neuron".
        target: name of the chip.
        ranks: number of ranks.
        simulation: keywords of `SimulatedDevice`; not used for neuron.

    Raises:
        ModelError: the backend is unknown, or the device cannot be opened.
    """
    if backend == "simulate":
        from model.device import SimulatedDevice

        return SimulatedDevice(target, ranks, **simulation)
    if backend == "neuron":
        from model.device.neuron import NeuronDevice

        return NeuronDevice(ranks, target)
    raise ModelError(f"backend is {backend!r}; it must be simulate or neuron")
