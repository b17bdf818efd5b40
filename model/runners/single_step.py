"""Steps of networks whose forward passes all have the same size, for plans and bundles.

Such a network reads a fixed-size input and keeps no cache.
"""

from __future__ import annotations

import importlib

import numpy as np

from model.config import Config
from model.families import find_task
from model.layers.launch import INT32, StepShape, WeightDtypes
from model.network import Network


def make_step(config: Config, activations: np.dtype, weights: WeightDtypes) -> StepShape:
    """Return the one size of step of a model, from the function `make_step` in the runner module of the model's task.

    Args:
        config: The model.
        activations: Dtype of activations.
        weights: Dtypes of weights.
    """
    step: StepShape = importlib.import_module(find_task(config).runner).make_step(
        config, activations, weights
    )
    return step


def draw_inputs(network: Network, step: StepShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random inputs of a step by name, [1, ...] each: normal numbers in float32, or integers up to `Input.most`.

    Args:
        network: The network, whose launches decide the shapes.
        step: The step.
        seed: Seed of the random numbers.
    """
    generator = np.random.default_rng(seed)
    launches = (launch for layer in network.layers for launch in layer.launches(step))
    shapes = {value.name: (1, *value.shape) for launch in launches for value in launch.values}
    return {
        name: generator.integers(1, network.inputs[name].most + 1, shape, np.int32)
        if network.inputs[name].dtype == INT32
        else generator.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
        if name in network.inputs
    }
