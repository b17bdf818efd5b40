"""A model as layers in their order: what generating, predicting, planning and the reference walk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.layers.head import Head
from model.layers.launch import Tensor, Weight
from model.layers.layer import Layer
from model.layers.shard import Shape

BlockLayers = tuple[Layer, ...]
"""The layers of one decoder layer: attention or what stands for it, and the MLP."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only model; `unread` are tensors that a checkpoint may hold beside those of the layers.

    A checkpoint of the layers without the head may lack `bare_prefix` in all its names.
    """

    embedding: Layer
    blocks: tuple[BlockLayers, ...]
    head: Head
    unread: tuple[str, ...] = ()
    bare_prefix: str = ""

    @property
    def sections(self) -> tuple[BlockLayers, ...]:
        """All layers in order: the embedding, the blocks, the head."""
        return ((self.embedding,), *self.blocks, (self.head,))

    @property
    def layers(self) -> Iterator[Layer]:
        """Every layer in order."""
        return (layer for section in self.sections for layer in section)

    @property
    def weights(self) -> Iterator[Weight]:
        """The weights of every layer, in order."""
        return (weight for layer in self.layers for weight in layer.weights)

    def tensor_shapes(self) -> dict[str, Shape]:
        """Every tensor of a checkpoint with its shape; as the checkpoint holds it."""
        tensors: Iterator[Tensor] = (each for weight in self.weights for each in weight.tensors)
        return {tensor.name: tensor.shape for tensor in tensors}
