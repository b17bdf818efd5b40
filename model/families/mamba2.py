"""Mamba-2: state-space layers of heads, each with one decay."""

from __future__ import annotations

from math import inf, isinf

from model.config.fields import Fields
from model.config.mixers import StateSpaceHeads
from model.config.parts import Block, ModelConfig
from model.config.reading import MOST_HEADS, common, layer_count, norms
from model.families.mamba import around, check_activation, output_projection
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution
from model.layers.shard import by_query_heads
from model.layers.state_space_heads import HeadTensors, ScannedHeads, input_cuts
from model.network import Network

_INFINITE = {"__float__": "Infinity"}


def mamba2(fields: Fields) -> ModelConfig:
    """One projection in, a short convolution, the scan of heads, a norm and a projection out, in every layer."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_heads", default=128, most=MOST_HEADS)
    groups, size = fields.count("n_groups", default=8), fields.count("head_dim", default=64)
    if heads % groups:
        raise fields.error("n_groups", f"{groups} does not divide num_heads, {heads}")
    if heads * size != fields.count("expand", default=2) * hidden:
        raise fields.error("head_dim", f"{heads} heads of {size} are not expand times hidden_size, {hidden}")
    least, most = _limits(fields)
    mixer = StateSpaceHeads(
        heads,
        size,
        groups,
        state=fields.count("state_size", default=128),
        convolution=fields.count("conv_kernel", default=4),
        bias=fields.flag("use_bias"),
        convolution_bias=fields.flag("use_conv_bias", default=True),
        least_step=least,
        most_step=most,
    )
    check_activation(fields)
    block = Block(mixer, None, norms(fields, "layer_norm_epsilon", 1e-5))
    return ModelConfig(**common(fields, limited=False), blocks=(block,) * layer_count(fields))


def _limits(fields: Fields) -> tuple[float, float | None]:
    """The least and the most of a time step; no most where that is infinite, as transformers 5 writes it or as JSON."""
    given = fields.get("time_step_limit", [0.0, _INFINITE])
    numbers = [inf if each == _INFINITE else each for each in given] if isinstance(given, list) else []
    if len(numbers) != 2 or any(type(each) not in (int, float) for each in numbers):
        raise fields.error("time_step_limit", f"{given!r:.60} is not a list of two numbers")
    least, most = map(float, numbers)
    if not 0 <= least <= most or isinf(least):
        raise fields.error("time_step_limit", f"{given!r:.60} is not two numbers from 0 on in order")
    return least, None if isinf(most) else most


def compose(config: ModelConfig) -> Network:
    """The layers, with the tensors of a checkpoint."""
    return around(config, tuple(_mixer(config, number) for number in range(len(config.blocks))))


def _mixer(config: ModelConfig, number: int) -> ScannedHeads:
    block, hidden = config.blocks[number], config.hidden_size
    mixer = block.mixer
    assert isinstance(mixer, StateSpaceHeads)
    name, layer = f"layers.{number}.mixer", f"backbone.layers.{number}"
    tensor = f"{layer}.mixer"
    sizes = (mixer.inner, mixer.inner, mixer.shared, mixer.shared, mixer.heads)
    bias = f"{tensor}.in_proj.bias" if mixer.bias else None
    inputs = tuple(
        Projection(f"{tensor}.in_proj.weight", size, hidden, bias, sum(sizes[:index]), sum(sizes))
        for index, size in enumerate(sizes)
    )
    return ScannedHeads(
        name,
        hidden,
        Norm(f"{name}.norm", f"{layer}.norm.weight", hidden, block.norms.eps),
        inputs,
        Convolution(
            f"{name}.convolution",
            f"{tensor}.conv1d",
            mixer.convolution,
            tuple(zip(sizes[1:4], input_cuts(mixer)[1:4])),
            mixer.convolution_bias,
        ),
        output_projection(tensor, hidden, mixer.inner, mixer.bias),
        mixer,
        HeadTensors(f"{tensor}.dt_bias", f"{tensor}.A_log", f"{tensor}.D"),
        Norm(
            f"{name}.inner_norm",
            f"{tensor}.norm.weight",
            mixer.inner,
            block.norms.eps,
            cut=by_query_heads(*mixer.divided),
        ),
    )
