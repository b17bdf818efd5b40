"""Gemma 3n: alternating updates of several hidden states, sparse gates, and layers that share keys and values.

The family is planned only.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.blocks import Block, Mlp, ModelConfig, PerLayerInput, Streams
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm
from model.config.reading import (
    alternate_windows,
    read_activation,
    read_attention,
    read_biases,
    read_layer_count,
    read_norms,
    read_window,
    read_windows,
)
from model.families import dense
from model.families.gemma import build_config
from model.families.gemma4 import PER_LAYER_NAMES, share_caches
from model.layers.shard import WHOLE, Shape
from model.layers.uncomputed import Uncomputed
from model.layers.weight import Tensor, Weight
from model.network import Network

_UPDATES = "alternating updates of several hidden states"


def compose(config: ModelConfig) -> Network:
    """Return the network, in which the embedding and the alternating updates are `Uncomputed`: counted, not run."""
    network, hidden = dense.compose(config, PER_LAYER_NAMES), config.hidden_size
    (first,), *blocks, last = network.sections
    streams = config.blocks[0].streams
    assert streams is not None
    projections = (
        _build_weight(f"model.altup_{name}.{number}.weight", (hidden, hidden), "projections")
        for name in ("projections", "unembed_projections")
        for number in range(streams.count - 1)
    )
    embedding = (replace(weight, component=weight.component or first.component) for weight in first.weights)
    updated = (
        (*layers, _build_updates(f"{PER_LAYER_NAMES.layer}.{number}", streams, hidden))
        for number, layers in enumerate(blocks)
    )
    return replace(network, sections=((Uncomputed(_UPDATES, (*embedding, *projections)),), *updated, last))


def _build_updates(tensor: str, streams: Streams, hidden: int) -> Uncomputed:
    """Return a block's uncomputed weights: those that predict and correct hidden states, and of LAuReL's product.

    `tensor` is the prefix of the block's tensors, and `hidden` the hidden size.
    """
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
            *(_build_weight(f"{tensor}.{name}.weight", shape, "") for name, shape in matrices.items()),
            *(_build_weight(f"{tensor}.{name}", (hidden,), "norms") for name in vectors),
        ),
    )


def _build_weight(tensor: str, shape: Shape, component: str) -> Weight:
    """Return a weight that is one whole checkpoint tensor on every rank; plans count it under `component`."""
    return Weight(tensor, (Tensor(tensor, shape, WHOLE),), component=component)


def read_gemma3n_text(fields: Fields) -> ModelConfig:
    """Return the config of a Gemma 3n decoder: a window in all but every fifth layer, or by `layer_types`.

    Rotary positions are not read, since the family is planned only.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    count, window = read_layer_count(fields), read_window(fields, 512)
    base: GroupedAttention = read_attention(
        fields,
        default_head_dim=256,
        positions=None,
        scale=1.0,
        head_norm=HeadNorm.head,
        value_norm=True,
        **read_biases(fields),
    )
    layer_windows = read_windows(fields, alternate_windows(5, count, window), window)
    mixers = share_caches(fields, [replace(base, window=window) for window in layer_windows], default=15)
    gate = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    per_layer_input = PerLayerInput(
        fields.count("vocab_size_per_layer_input", default=262_144),
        fields.count("hidden_size_per_layer_input", default=256),
        gate,
    )
    streams = Streams(fields.count("altup_num_inputs", default=4), fields.count("laurel_rank", default=64))
    blocks = (
        Block(
            mixer,
            Mlp(width, gate, sparse=sparsity > 0),
            read_norms(fields, after=True),
            per_layer_input,
            streams=streams,
        )
        for mixer, width, sparsity in zip(
            mixers, _read_widths(fields, count), _read_sparsities(fields, count)
        )
    )
    return build_config(fields, blocks, 30.0)


def _read_widths(fields: Fields, count: int) -> list[int]:
    """Return the width of the MLP of each of `count` layers; `intermediate_size` is one number or a list of them.

    Raises:
        ModelError: The field is neither, or the list has another length.
    """
    widths = fields.get("intermediate_size", None)
    if not isinstance(widths, list):
        return [fields.count("intermediate_size")] * count
    if len(widths) != count or not all(type(width) is int and 0 < width < 2**31 for width in widths):
        raise fields.error("intermediate_size", f"not a list of {count} positive whole numbers")
    return widths


def _read_sparsities(fields: Fields, count: int) -> list[float]:
    """Return the share of gates that each of `count` layers sets to zero, by `activation_sparsity_pattern`.

    The field is one number or a list. Without it, the first ten layers of a model with more than ten have 0.95.

    Raises:
        ModelError: The list has another length, or a share is not in the range from 0 to below 1.
    """
    default = [0.95] * 10 + [0.0] * (count - 10) if count > 10 else 0.0
    pattern = fields.get("activation_sparsity_pattern", default)
    shares = pattern if isinstance(pattern, list) else [pattern] * count
    if len(shares) != count or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        raise fields.error("activation_sparsity_pattern", f"not a list of {count} numbers from 0 to 1")
    return shares
