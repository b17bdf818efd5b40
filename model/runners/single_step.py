"""Networks whose every step has one size, as a task's runner module says: what plans and bundles need of them."""

from __future__ import annotations

import importlib

import numpy as np

from model.config import Config
from model.families import task_of
from model.layers.launch import StepShape, WeightDtypes
from model.network import Network


def make_step(config: Config, activations: np.dtype, weights: WeightDtypes) -> StepShape:
    """Return the one step of a model, by the function `make_step` of the runner module of its task."""
    step: StepShape = importlib.import_module(task_of(config).runner).make_step(config, activations, weights)
    return step


def draw_inputs(network: Network, step: StepShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the inputs of a step from a normal distribution, with the shapes that the launches read; [1, ...] each."""
    generator = np.random.default_rng(seed)
    values = (value for layer in network.layers for launch in layer.launches(step) for value in launch.values)
    shapes = {value.name: value.shape for value in values if value.name in network.inputs}
    return {name: generator.standard_normal((1, *shape), dtype=np.float32) for name, shape in shapes.items()}
