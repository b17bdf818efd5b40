"""Mamba: state-space layers, whose state has one size however long the sequence is."""

from __future__ import annotations

from collections.abc import Sequence

from model.config.fields import Fields
from model.config.mixers import StateSpace
from model.config.parts import Block, ModelConfig
from model.config.reading import common, layer_count, norms
from model.families.tokens import token_network
from model.layers.embedding import Embedding
from model.layers.head import Head
from model.layers.layer import Layer
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution
from model.layers.shard import COLUMN_PARALLEL
from model.layers.state_space import ScanTensors, SelectiveStateSpace
from model.network import Network


def mamba(fields: Fields) -> ModelConfig:
    """A projection in, a short convolution, the selective scan and a projection out, in every layer."""
    hidden = fields.count("hidden_size")
    automatic = fields.get("time_step_rank", "auto") == "auto"
    mixer = StateSpace(
        inner=fields.count("intermediate_size", default=fields.count("expand", default=2) * hidden),
        state=fields.count("state_size", default=16),
        convolution=fields.count("conv_kernel", default=4),
        step_rank=-(-hidden // 16) if automatic else fields.count("time_step_rank"),
        bias=fields.flag("use_bias"),
        convolution_bias=fields.flag("use_conv_bias", default=True),
    )
    check_activation(fields)
    block = Block(mixer, None, norms(fields, "layer_norm_epsilon", 1e-5))
    return ModelConfig(
        **common(fields, tied=True, limited=False),
        blocks=(block,) * layer_count(fields),
    )


def check_activation(fields: Fields) -> None:
    """Note a config whose convolution is activated by another function than silu."""
    named = fields.get("hidden_act", "silu")
    if named not in ("silu", "swish"):
        fields.unsupported("hidden_act", f"{named!r:.60}; a state-space layer is computed with silu")


def around(config: ModelConfig, blocks: Sequence[Layer]) -> Network:
    """The layers with what stands around them."""
    hidden, vocabulary, eps = config.hidden_size, config.vocab_size, config.blocks[0].norms.eps
    table, head, tied = "backbone.embeddings.weight", "lm_head.weight", config.tie_word_embeddings
    last = Norm("head.norm", "backbone.norm_f.weight", hidden, eps)
    return token_network(
        Embedding("embedding", table, vocabulary, hidden, 1.0, None),
        tuple((each,) for each in blocks),
        Head("head", table if tied else head, vocabulary, hidden, last, 1.0, None),
        unread=(head,) if tied else (),
        bare_prefix="backbone.",
    )


def compose(config: ModelConfig) -> Network:
    """The layers, with the tensors of a checkpoint."""
    return around(config, tuple(_mixer(config, number) for number in range(len(config.blocks))))


def _mixer(config: ModelConfig, number: int) -> SelectiveStateSpace:
    block, hidden = config.blocks[number], config.hidden_size
    mixer = block.mixer
    assert isinstance(mixer, StateSpace)
    name, layer = f"layers.{number}.mixer", f"backbone.layers.{number}"
    tensor = f"{layer}.mixer"
    halves = tuple(
        Projection(
            f"{tensor}.in_proj.weight",
            mixer.inner,
            hidden,
            f"{tensor}.in_proj.bias" if mixer.bias else None,
            first,
            2 * mixer.inner,
        )
        for first in (0, mixer.inner)
    )
    return SelectiveStateSpace(
        name,
        hidden,
        Norm(f"{name}.norm", f"{layer}.norm.weight", hidden, block.norms.eps),
        halves,
        Convolution(
            f"{name}.convolution",
            f"{tensor}.conv1d",
            mixer.convolution,
            ((mixer.inner, COLUMN_PARALLEL),),
            mixer.convolution_bias,
        ),
        output_projection(tensor, hidden, mixer.inner, mixer.bias),
        mixer,
        Projection(f"{tensor}.x_proj.weight", mixer.step_rank + 2 * mixer.state, mixer.inner),
        Projection(f"{tensor}.dt_proj.weight", mixer.inner, mixer.step_rank, f"{tensor}.dt_proj.bias"),
        ScanTensors(f"{tensor}.A_log", f"{tensor}.D"),
    )


def output_projection(tensor: str, hidden: int, inner: int, bias: bool) -> Projection:
    """Return the output projection of a mixer whose tensors' names begin with `tensor`."""
    return Projection(f"{tensor}.out_proj.weight", hidden, inner, f"{tensor}.out_proj.bias" if bias else None)
