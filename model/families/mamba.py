"""Mamba: state-space layers, whose state has the same size for sequences of any length."""

from __future__ import annotations

from collections.abc import Callable

from model.config.blocks import Block, ModelConfig
from model.config.fields import Fields
from model.config.mixers import StateSpace
from model.config.reading import read_common, read_layer_count, read_norms
from model.families.tokens import build_token_network
from model.layers.embedding import Embedding
from model.layers.head import Head
from model.layers.layer import Layer
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution
from model.layers.shard import COLUMN_PARALLEL
from model.layers.state_space import SelectiveStateSpace
from model.network import Network


def read_mamba(fields: Fields) -> ModelConfig:
    """Return the config of a Mamba, whose layers are equal and have no MLP; sequences have no limit of positions.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    hidden = fields.count("hidden_size")
    is_automatic = fields.get("time_step_rank", "auto") == "auto"
    mixer = StateSpace(
        inner=fields.count("intermediate_size", default=fields.count("expand", default=2) * hidden),
        state=fields.count("state_size", default=16),
        convolution=fields.count("conv_kernel", default=4),
        step_rank=-(-hidden // 16) if is_automatic else fields.count("time_step_rank"),
        bias=fields.flag("use_bias"),
        convolution_bias=fields.flag("use_conv_bias", default=True),
    )
    check_activation(fields)
    block = Block(mixer, None, read_norms(fields, "layer_norm_epsilon", 1e-5))
    return ModelConfig(
        **read_common(fields, tied=True, limited=False),
        blocks=(block,) * read_layer_count(fields),
    )


def check_activation(fields: Fields) -> None:
    """Add `hidden_act` to the refusals if it is another activation than silu, which follows the convolution."""
    function = fields.get("hidden_act", "silu")
    if function not in ("silu", "swish"):
        fields.unsupported("hidden_act", f"{function!r:.60}; a state-space layer is computed with silu")


def build_network(config: ModelConfig, build_mixer: Callable[[ModelConfig, int], Layer]) -> Network:
    """Return the network of a Mamba or Mamba-2 with their common tensor names.

    `build_mixer` returns the one layer of a block, from the config and the block's number.
    """
    hidden, vocabulary, eps = config.hidden_size, config.vocab_size, config.blocks[0].norms.eps
    table, head, tied = "backbone.embeddings.weight", "lm_head.weight", config.tie_word_embeddings
    last = Norm("head.norm", "backbone.norm_f.weight", hidden, eps)
    return build_token_network(
        Embedding("embedding", table, vocabulary, hidden, 1.0, None),
        tuple((build_mixer(config, number),) for number in range(len(config.blocks))),
        Head("head", table if tied else head, vocabulary, hidden, last, 1.0, None),
        unread=(head,) if tied else (),
        bare_prefix="backbone.",
    )


def compose(config: ModelConfig) -> Network:
    """Return the network of a Mamba, with the tensors of its checkpoint."""
    return build_network(config, _build_mixer)


def _build_mixer(config: ModelConfig, number: int) -> SelectiveStateSpace:
    block, hidden = config.blocks[number], config.hidden_size
    mixer = block.mixer
    assert isinstance(mixer, StateSpace)
    name, layer = f"layers.{number}.mixer", f"backbone.layers.{number}"
    tensor, inner = f"{layer}.mixer", mixer.inner
    bias = f"{tensor}.in_proj.bias" if mixer.bias else None
    return SelectiveStateSpace(
        name,
        hidden,
        Norm(f"{name}.norm", f"{layer}.norm.weight", hidden, block.norms.eps),
        Projection(f"{tensor}.in_proj.weight", 2 * inner, hidden, bias).split((inner, inner)),
        Convolution(
            f"{name}.convolution",
            f"{tensor}.conv1d",
            mixer.convolution,
            ((inner, COLUMN_PARALLEL),),
            mixer.convolution_bias,
        ),
        build_output_projection(tensor, hidden, inner, mixer.bias),
        mixer,
        Projection(f"{tensor}.x_proj.weight", mixer.step_rank + 2 * mixer.state, inner),
        Projection(f"{tensor}.dt_proj.weight", inner, mixer.step_rank, f"{tensor}.dt_proj.bias"),
        f"{tensor}.A_log",
        f"{tensor}.D",
    )


def build_output_projection(tensor: str, hidden: int, inner: int, bias: bool) -> Projection:
    """Return the output projection [hidden, inner] of a mixer whose tensors' names begin with `tensor`."""
    return Projection(f"{tensor}.out_proj.weight", hidden, inner, f"{tensor}.out_proj.bias" if bias else None)
