"""Mamba-2: state-space layers whose heads have one decay each."""

from __future__ import annotations

from math import inf, isinf

from model.config.blocks import Block, ModelConfig
from model.config.fields import Fields
from model.config.mixers import StateSpaceHeads
from model.config.reading import MOST_HEADS, read_common, read_layer_count, read_norms
from model.families.mamba import build_network, build_output_projection, check_activation
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution
from model.layers.shard import by_query_heads
from model.layers.state_space_heads import ScannedHeads, choose_input_cuts
from model.network import Network

_INFINITE = {"__float__": "Infinity"}


def read_mamba2(fields: Fields) -> ModelConfig:
    """Return the config of a Mamba-2, whose layers are equal and have no MLP; sequences have no limit of positions.

    Raises:
        ModelError: A field is missing or has the wrong type, n_groups does not divide the heads, or the heads do not
            make up expand * hidden_size.
    """
    hidden = fields.count("hidden_size")
    heads = fields.count("num_heads", default=128, most=MOST_HEADS)
    groups, size = fields.count("n_groups", default=8), fields.count("head_dim", default=64)
    if heads % groups:
        raise fields.error("n_groups", f"{groups} does not divide num_heads, {heads}")
    if heads * size != fields.count("expand", default=2) * hidden:
        raise fields.error("head_dim", f"{heads} heads of {size} are not expand times hidden_size, {hidden}")
    min_step, max_step = _read_step_limits(fields)
    mixer = StateSpaceHeads(
        heads,
        size,
        groups,
        state=fields.count("state_size", default=128),
        convolution=fields.count("conv_kernel", default=4),
        bias=fields.flag("use_bias"),
        convolution_bias=fields.flag("use_conv_bias", default=True),
        least_step=min_step,
        most_step=max_step,
    )
    check_activation(fields)
    block = Block(mixer, None, read_norms(fields, "layer_norm_epsilon", 1e-5))
    return ModelConfig(**read_common(fields, limited=False), blocks=(block,) * read_layer_count(fields))


def _read_step_limits(fields: Fields) -> tuple[float, float | None]:
    """Return (smallest, largest) time step in `time_step_limit`; the largest is None if it is infinite.

    Infinity is the JSON extension `Infinity` or the object that transformers 5 writes.

    Raises:
        ModelError: `time_step_limit` is not a list of two numbers in order, the first finite and at least 0.
    """
    limits = fields.get("time_step_limit", [0.0, _INFINITE])
    numbers = [inf if limit == _INFINITE else limit for limit in limits] if isinstance(limits, list) else []
    if len(numbers) != 2 or any(type(number) not in (int, float) for number in numbers):
        raise fields.error("time_step_limit", f"{limits!r:.60} is not a list of two numbers")
    smallest, largest = map(float, numbers)
    if not 0 <= smallest <= largest or isinf(smallest):
        raise fields.error("time_step_limit", f"{limits!r:.60} is not two numbers from 0 on in order")
    return smallest, None if isinf(largest) else largest


def compose(config: ModelConfig) -> Network:
    """Return the network of a Mamba-2, with the tensors of its checkpoint."""
    return build_network(config, _build_mixer)


def _build_mixer(config: ModelConfig, number: int) -> ScannedHeads:
    block, hidden = config.blocks[number], config.hidden_size
    mixer = block.mixer
    assert isinstance(mixer, StateSpaceHeads)
    name, layer = f"layers.{number}.mixer", f"backbone.layers.{number}"
    tensor = f"{layer}.mixer"
    sizes = (mixer.inner, mixer.inner, mixer.shared, mixer.shared, mixer.heads)
    bias = f"{tensor}.in_proj.bias" if mixer.bias else None
    return ScannedHeads(
        name,
        hidden,
        Norm(f"{name}.norm", f"{layer}.norm.weight", hidden, block.norms.eps),
        Projection(f"{tensor}.in_proj.weight", sum(sizes), hidden, bias).split(sizes),
        Convolution(
            f"{name}.convolution",
            f"{tensor}.conv1d",
            mixer.convolution,
            tuple(zip(sizes[1:4], choose_input_cuts(mixer)[1:4])),
            mixer.convolution_bias,
        ),
        build_output_projection(tensor, hidden, mixer.inner, mixer.bias),
        mixer,
        (f"{tensor}.dt_bias", f"{tensor}.A_log", f"{tensor}.D"),
        Norm(
            f"{name}.inner_norm",
            f"{tensor}.norm.weight",
            mixer.inner,
            block.norms.eps,
            cut=by_query_heads(*mixer.divided),
        ),
    )
