"""What no kernel computes: weights of a checkpoint that plans count."""

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
    """The weights of a part of a model, `what` in words. Nothing launches it: `load_config` refuses the model before.

    Raises ModelError for launches and for the reference.
    """

    what: str
    weights: Sequence[Weight]

    def launches(self, step: StepShape) -> NoReturn:
        """Refuse: no kernel computes this part."""
        raise ModelError(f"no kernel computes {self.what}")

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> NoReturn:
        """Refuse: the reference does not compute this part either."""
        raise ModelError(f"no layer computes {self.what}")
