"""Gemma 3n: alternating updates of several hidden states, sparse gates, and layers that share keys and values.

It is planned only.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm
from model.config.parts import Block, Mlp, ModelConfig, PerLayerInput, Streams
from model.config.reading import (
    activation,
    attention,
    biases,
    common,
    full_in_every,
    layer_count,
    norms,
    window_of,
    windows,
)
from model.families import dense
from model.families.gemma import cap
from model.families.gemma4 import NAMED_INPUTS, with_owners
from model.layers.shard import WHOLE, Shape
from model.layers.uncomputed import Uncomputed
from model.layers.weight import Tensor, Weight
from model.network import Network

_UPDATES = "alternating updates of several hidden states"


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's Gemma 3n; the updates beside them are weights only."""
    network, hidden = dense.compose(config, NAMED_INPUTS), config.hidden_size
    (first,), *blocks, last = network.sections
    streams = config.blocks[0].streams
    assert streams is not None
    turns = (
        _weight(f"model.altup_{name}.{number}.weight", (hidden, hidden), "projections")
        for name in ("projections", "unembed_projections")
        for number in range(streams.count - 1)
    )
    embedding = (replace(weight, component=weight.component or first.component) for weight in first.weights)
    beside = (
        (*layers, _updates(f"{NAMED_INPUTS.layer}.{number}", streams, hidden))
        for number, layers in enumerate(blocks)
    )
    return replace(network, sections=((Uncomputed(_UPDATES, (*embedding, *turns)),), *beside, last))


def _updates(tensor: str, streams: Streams, hidden: int) -> Uncomputed:
    """What a block predicts and corrects its hidden states with, and the product beside its attention."""
    count, rank = streams.count, streams.rank
    matrices = {
        "altup.correction_coefs": (count, count),
        "altup.prediction_coefs": (count**2, count),
        "altup.modality_router": (count, hidden),
        "laurel.linear_left": (rank, hidden),
        "laurel.linear_right": (hidden, rank),
    }
    vectors = ("altup.correct_output_scale", "altup.router_norm.weight", "laurel.post_laurel_norm.weight")
    return Uncomputed(
        _UPDATES,
        (
            *(_weight(f"{tensor}.{name}.weight", shape, "") for name, shape in matrices.items()),
            *(_weight(f"{tensor}.{name}", (hidden,), "norms") for name in vectors),
        ),
    )


def _weight(tensor: str, shape: Shape, component: str) -> Weight:
    """A whole tensor on every rank."""
    return Weight(tensor, (Tensor(tensor, shape, WHOLE),), component=component)


def gemma3n_text(fields: Fields) -> ModelConfig:
    """Every fifth layer sees all positions unless `layer_types` says another; positions are not read."""
    count, window = layer_count(fields), window_of(fields, 512)
    base: GroupedAttention = attention(
        fields,
        default_head_dim=256,
        positions=None,
        scale=1.0,
        head_norm=HeadNorm.head,
        value_norm=True,
        **biases(fields),
    )
    seen = windows(fields, full_in_every(5, count, window), window)
    mixers = with_owners(fields, [replace(base, window=own) for own in seen], default=15)
    gate = activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    added = PerLayerInput(
        fields.count("vocab_size_per_layer_input", default=262_144),
        fields.count("hidden_size_per_layer_input", default=256),
        gate,
    )
    streams = Streams(fields.count("altup_num_inputs", default=4), fields.count("laurel_rank", default=64))
    blocks = (
        Block(mixer, Mlp(width, gate, sparse=sparse), norms(fields, after=True), added, streams=streams)
        for mixer, width, sparse in zip(mixers, _widths(fields, count), _sparse(fields, count))
    )
    given = common(fields, tied=True)
    return ModelConfig(
        **given,
        blocks=tuple(blocks),
        embedding_scale=given["hidden_size"] ** 0.5,
        logit_softcap=cap(fields, "final_logit_softcapping", 30.0),
    )


def _widths(fields: Fields, count: int) -> list[int]:
    """The width of every MLP: one number for all, or one for each."""
    given = fields.get("intermediate_size", None)
    if not isinstance(given, list):
        return [fields.count("intermediate_size")] * count
    if len(given) != count or not all(type(each) is int and 0 < each < 2**31 for each in given):
        raise fields.error("intermediate_size", f"not a list of {count} positive whole numbers")
    return given


def _sparse(fields: Fields, count: int) -> list[bool]:
    """Whether only the largest gates of a layer pass; without the field those of the first ten of more layers."""
    given = fields.get(
        "activation_sparsity_pattern", [0.95] * 10 + [0.0] * (count - 10) if count > 10 else 0.0
    )
    shares = given if isinstance(given, list) else [given] * count
    if len(shares) != count or not all(type(each) in (int, float) and 0 <= each < 1 for each in shares):
        raise fields.error("activation_sparsity_pattern", f"not a list of {count} numbers from 0 to 1")
    return [each > 0 for each in shares]
