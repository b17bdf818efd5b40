"""Opened components of a diffusion model: their configs, and weights that are mapped into memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from model.config.component import ComponentConfig
from model.config.fields import Fields
from model.config.folder import check_inside, check_model_folder, list_model_files
from model.config.quantization import adapt_to_chip, quantise_config
from model.errors import ModelError
from model.families.registry import FAMILIES, compose, read
from model.families.tasks import TEXT_ENCODER, Task
from model.formats.scaled import INT8
from model.layers.launch import WeightDtypes
from model.layers.precision import BFLOAT16, choose_activation_dtype
from model.layers.shard import Shard
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.weights import (
    RankWeights,
    adapt_weights,
    choose_weight_dtypes,
    describe_all_ranks,
    plan_weight_dtypes,
    shard_weights,
)
from model.mesh import Mesh
from model.network import Network


@dataclass(frozen=True)
class LoadedComponent:
    """Component with its memory-mapped checkpoint, which is None for plans.

    `dtype` is that of activations: float32, bfloat16 or auto.
    """

    folder: Path
    config: ComponentConfig
    checkpoint: Checkpoint | None
    dtype: str = "float32"

    @classmethod
    def open(
        cls, folder: Path, task: Task[ComponentConfig], dtype: str = "float32", is_planned: bool = False
    ) -> LoadedComponent:
        """Open a component's folder, without reading its weights.

        Args:
            folder: The subfolder of a diffusers folder.
            task: What the component is for.
            dtype: Dtype of activations.
            is_planned: Whether only dry runs follow, for which the folder needs no weights.

        Raises:
            ModelError: Files are missing, damaged or links out of the folder; the class is unknown or for another task;
                or a field is unknown, missing, has the wrong type, or describes what no layer computes.
        """
        config = read_component(folder, task)
        return cls(folder, config, None if is_planned else open_checkpoint(folder, config), dtype)

    def resize(self, config: ComponentConfig) -> LoadedComponent:
        """Return the component with a config for another size of inputs and the same weights."""
        return replace(self, config=config)

    def reopen(self, config: ComponentConfig) -> LoadedComponent:
        """Return the component with a config that reads other tensors of the same files, such as another half.

        Raises:
            ModelError: A tensor is missing or has the wrong shape or dtype.
        """
        checkpoint = None if self.checkpoint is None else open_checkpoint(self.folder, config)
        return replace(self, config=config, checkpoint=checkpoint)

    def quantise(self, scheme: str | None, target: str) -> LoadedComponent:
        """Return the component with the linear layers of its blocks quantised by a scheme, in the numbers of a chip.

        Other layers stay in the folder's dtype: embeddings, modulation, patches and the output. None leaves all weights
        as they are in the folder.

        Args:
            scheme: A name in `SCHEMES` or None, as `quantise_config` takes it.
            target: Name of the chip.

        Raises:
            ModelError: The scheme is unknown, its kernels do not compute a denoiser, or the weights are quantised.
        """
        config = adapt_to_chip(quantise_config(self.config, scheme), target)
        if config is self.config:
            return self
        for format in () if config.weight_format is None else config.weight_format.formats:
            if format.quantises_rows and format.row_dtype == INT8:
                raise ModelError(
                    f"quantization is {config.quant_method}, and products of rows of int8 take no gates of residuals, "
                    "as denoisers have them; quantise by fp8-dynamic, or by a scheme of weights alone: "
                    "fp8, int8 or int4",
                    "NKW-MODEL-OPTION",
                )
        return self.reopen(config)

    @property
    def network(self) -> Network:
        """Network of the component for the size in its config."""
        return compose(self.config)

    @property
    def parameters(self) -> int:
        """Number of parameters of the component."""
        return sum(map(prod, self.network.list_tensor_shapes().values()))

    def count_weight_bytes(self, target: str) -> int:
        """Return the bytes of all parameters: quantised ones as a chip's kernels read them, others in `activations`."""
        itemsize, dtypes, shard = self.activations.itemsize, self.choose_dtypes(target), Shard(0, 1)
        quantised = {
            weight.name: weight for weight in self.network.weights if weight.find_format(shard, dtypes)
        }
        nbytes = self.parameters * itemsize
        for weight in quantised.values():
            arrays = weight.describe(shard, dtypes).values()
            nbytes += sum(prod(shape) * dtype.itemsize for shape, dtype in arrays)
            nbytes -= prod(weight.shape(shard)) * itemsize
        return nbytes

    @property
    def activations(self) -> np.dtype:
        """NumPy dtype of activations; without a checkpoint, auto is the config's dtype, else bfloat16."""
        if self.checkpoint is None and self.dtype == "auto" and self.config.dtype is None:
            return BFLOAT16
        return choose_activation_dtype(self.dtype, self.config, self.checkpoint or {})

    def load_shards(self, mesh: Mesh) -> tuple[RankWeights, ...]:
        """Return the weights of ranks of a mesh, one entry for each distinct shard.

        Raises:
            ModelError: The ranks cannot share the component, or the weights exceed the memory of this machine.
        """
        assert self.checkpoint is not None, "a component that is planned only"
        release = self.checkpoint.release
        return shard_weights(self.config, self.checkpoint, mesh.tensor, mesh.shards, release, self.dtype)

    def describe_shards(self, mesh: Mesh, target: str) -> tuple[RankWeights, ...]:
        """Return the weights of all ranks as kernels of a chip read them, for dry runs: zeros without memory."""
        dtypes = self.choose_dtypes(target)
        return describe_all_ranks(self.config, dtypes, self.activations, mesh.shards)

    def choose_dtypes(self, target: str) -> WeightDtypes:
        """Return the dtypes and formats of the arrays of weights as kernels of a chip read them."""
        weights, activations = self.network.weights, self.activations
        if self.checkpoint is not None:
            return choose_weight_dtypes(weights, adapt_weights(self.checkpoint, target), activations)
        format = adapt_to_chip(self.config, target).weight_format
        if self.config.is_quantised_on_load:
            weights = self.network.block_weights
        return plan_weight_dtypes(weights, format, activations)


def read_component(folder: Path, task: Task[ComponentConfig]) -> ComponentConfig:
    """Return the config of a component from its folder's config.json; arguments and errors of `LoadedComponent.open`.

    diffusers names the class of a component in `_class_name`, transformers in `architectures`.
    """
    check_model_folder(folder)
    for file in list_model_files(folder):
        check_inside(file)
    fields = Fields(folder / "config.json")
    expected = "architectures" if task is TEXT_ENCODER else "_class_name"
    field = next((name for name in ("_class_name", "architectures") if name in fields), expected)
    names = fields.get(field, None)
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if name == "Transformer2DModel" and fields.get("norm_type", None) == "ada_norm_single":
        name = "PixArtTransformer2DModel"  # the class of configs from before PixArt had one of its own
    known = {row.architecture: key for key, row in FAMILIES.items() if row.task == task}
    if not isinstance(name, str) or name not in known:
        raise fields.error(field, f"{name!r:.60} is not known; known are {', '.join(known)}")
    config = read(known[name], fields)
    assert isinstance(config, ComponentConfig)
    if config.refusals:
        raise ModelError(config.refusals[0], "NKW-MODEL-CONFIG")
    return config
