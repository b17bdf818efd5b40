"""Layer for weights that plans count and no kernel computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from model.errors import ModelError
from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import StepShape
from model.layers.layer import Stateless, States
from model.layers.weight import Weight


@dataclass(frozen=True)
class Uncomputed(Stateless):
    """Weights of a component of a model, which `name` describes; `load_config` refuses such a model."""

    name: str
    weights: Sequence[Weight]

    def launches(self, step: StepShape) -> NoReturn:
        """Raise ModelError for every step, because no kernel computes with these weights."""
        raise ModelError(
            f"no kernel computes {self.name}; the model can be planned with `nkw plan`, but not run"
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> NoReturn:
        """Raise ModelError for every input, because the reference does not compute with these weights either."""
        raise ModelError(
            f"no layer computes {self.name}; the model can be planned with `nkw plan`, but not run"
        )
