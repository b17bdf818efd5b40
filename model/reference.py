"""A model in plain numpy, no kernel and no simulator: the measure for everything else here.

Arithmetic is float32 throughout. With bfloat16 activations its results are rounded to bfloat16 where a device stores
them between engines: every norm, q, k and v before and after their rotation, the exponentials of a softmax, attention's
output, the gated product, and both sums with the residual; over ranks also the partial products and their sum. Logits
stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model.config import ModelConfig
from model.families import compose
from model.layers.arithmetic import Arithmetic, Span
from model.layers.layer import States
from model.precision import StoredWeights, activation_dtype
from model.sampling import StepOutput


class ReferenceModel:
    """One sequence at a time, with a key/value cache; `dtype` is that of the activations: float32, bfloat16 or auto.

    Weights of two bytes are widened once, when it is made, if that takes at most `widened_bytes`, else at every use.
    Activations are rounded as on a device of `ranks` ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: str = "float32",
        widened_bytes: int = 2**30,
        ranks: int = 1,
    ) -> None:
        activations = activation_dtype(dtype, config, weights)
        self._decoder = compose(config)
        self._numpy = Arithmetic(StoredWeights(weights, activations), activations, widened_bytes, ranks)
        self._states: States = {}
        self._length = 0

    def prefill(self, ids: Sequence[int]) -> StepOutput:
        """Start a sequence: what follows `ids`."""
        self._states, self._length = {}, 0
        return self._step(ids)

    def decode(self, token: int, position: int) -> StepOutput:
        """Append one token at `position`, which is the number of tokens before it."""
        assert position == self._length, f"position {position} after {self._length} tokens"
        return self._step([token])

    def _step(self, ids: Sequence[int]) -> StepOutput:
        span = Span(self._length, len(ids))
        x = np.asarray(ids)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the sampler looks at the logits
            for layer in self._decoder.layers:
                x = layer.reference(x, span, self._states, self._numpy)
        self._length += len(ids)
        return StepOutput(x[-1])
