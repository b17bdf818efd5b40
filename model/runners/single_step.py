"""The steps of networks whose steps all have one size, for plans and bundles."""

from __future__ import annotations

import importlib

import numpy as np

from model.config import Config
from model.families import find_task
from model.layers.launch import StepShape, WeightDtypes
from model.network import Network


def make_step(config: Config, activations: np.dtype, weights: WeightDtypes) -> StepShape:
    """Return the step of a model, which the function `make_step` in the runner module of its task describes."""
    step: StepShape = importlib.import_module(find_task(config).runner).make_step(
        config, activations, weights
    )
    return step


def draw_inputs(network: Network, step: StepShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the inputs of a step from a normal distribution, with the shapes that the launches read; [1, ...] each."""
    generator = np.random.default_rng(seed)
    launches = (launch for layer in network.layers for launch in layer.launches(step))
    shapes = {value.name: value.shape for launch in launches for value in launch.values}
    return {
        name: generator.standard_normal((1, *shape), dtype=np.float32)
        for name, shape in shapes.items()
        if name in network.inputs
    }
