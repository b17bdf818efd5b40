"""A model as layers in their order: what generating, predicting, planning and the reference walk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from model.layers.head import Head
from model.layers.launch import Phase, StepShape
from model.layers.layer import Layer
from model.layers.shard import Shape
from model.layers.weight import Tensor, Weight, Zeros

BlockLayers = tuple[Layer, ...]
"""The layers of one decoder layer: attention or what stands for it, and the MLP."""


@dataclass(frozen=True)
class EncoderLayers:
    """The layers that a window of speech passes once, before its tokens: `positions` of each sequence.

    The last section leaves behind what the decoder's layers attend to.
    """

    positions: int
    sections: tuple[BlockLayers, ...]

    @property
    def layers(self) -> Iterator[Layer]:
        """Every layer in order."""
        return (layer for section in self.sections for layer in section)

    def step(self, step: StepShape) -> StepShape:
        """The step of the encoder for the sequences of a decoder's step."""
        return replace(
            step,
            phase=Phase.prefill,
            tokens=self.positions * step.sequences,
            cache_length=self.positions,
            context=self.positions,
            padded=False,
            pages=0,
            window_pages=(),
            block_size=0,
            prefix=0,
            slots=0,
            draws=None,
        )


@dataclass(frozen=True)
class Decoder:
    """A decoder, and its encoder where it has one; `unread` are tensors that a checkpoint may hold beside theirs.

    So are all whose names begin with one of `unread_prefixes`.
    A checkpoint of the layers without the head may lack `bare_prefix` in all its names. `stacks` are tensors of it that
    hold several of the layers, one behind the other.
    """

    embedding: Layer
    blocks: tuple[BlockLayers, ...]
    head: Head
    unread: tuple[str, ...] = ()
    unread_prefixes: tuple[str, ...] = ()
    bare_prefix: str = ""
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    encoder: EncoderLayers | None = None

    @property
    def exact(self) -> frozenset[str]:
        """The tensors that are float32 whatever dtype the others have."""
        return frozenset(each.name for weight in self.weights for each in weight.tensors if each.exact)

    def leaves_out(self, name: str) -> bool:
        """Whether no layer reads this tensor, although a checkpoint may hold it."""
        return name in self.unread or name.startswith(self.unread_prefixes)

    @property
    def sections(self) -> tuple[BlockLayers, ...]:
        """All layers in order: the embedding, the blocks, the head."""
        return ((self.embedding,), *self.blocks, (self.head,))

    @property
    def layers(self) -> Iterator[Layer]:
        """Every layer of the decoder in order."""
        return (layer for section in self.sections for layer in section)

    @property
    def mixes(self) -> bool:
        """Whether every layer takes steps in which sequences decode beside prompts."""
        return all(getattr(layer, "mixes", False) for layer in self.layers)

    @property
    def all_layers(self) -> Iterator[Layer]:
        """Every layer in order, those of an encoder first."""
        return chain(self.encoder.layers if self.encoder else (), self.layers)

    @property
    def weights(self) -> Iterator[Weight]:
        """The weights of every layer, in order."""
        return (weight for layer in self.all_layers for weight in layer.weights)

    def layer_tensor_shapes(self) -> dict[str, Shape]:
        """Every tensor of the layers with its shape, each by itself."""
        tensors: Iterator[Tensor] = (each for weight in self.weights for each in weight.tensors)
        return {tensor.name: tensor.shape for tensor in tensors if not isinstance(tensor, Zeros)}

    def tensor_shapes(self) -> dict[str, Shape]:
        """Every tensor of a checkpoint with its shape; as the checkpoint holds it."""
        shapes = self.layer_tensor_shapes()
        for stack, parts in self.stacks.items():
            first, *_ = (shapes.pop(part) for part in parts)
            shapes[stack] = (len(parts), *first)
        return shapes


def part_of(stack: str, number: int) -> str:
    """The name of a tensor that stands in a stack."""
    return f"{stack}[{number}]"
