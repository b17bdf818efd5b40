"""Dtype of activations and caches, the option `--dtype`, and the dtype of weights in HBM.

float32 is the default. With bfloat16, all results of kernels in HBM are bfloat16: hidden states, queries, keys and
values, the cache, outputs of attention, and gated products. Logits are float32. Inside kernels, sums of products, the
statistics of norms and softmax, and rotations are float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from model.config.record import Config
from model.errors import ModelError
from model.formats import Weight

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NAMES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def choose_activation_dtype(name: str, config: Config, weights: Mapping[str, Weight]) -> np.dtype:
    """Return the dtype of activations, float32 or bfloat16, for the option `--dtype`.

    Args:
        name: "float32", "bfloat16", or "auto" for the dtype of the config, else of the first weight. A float16
            checkpoint runs in float32, which represents its weights exactly: kernels have no float16 activations.
        config: The model.
        weights: The weights of the checkpoint by name.

    Raises:
        ModelError: The name is not "auto", "float32" or "bfloat16".
    """
    if name == "auto":
        return _NAMES.get(config.dtype or weights[next(iter(weights))].dtype.name, FLOAT32)
    if name not in _NAMES:
        raise ModelError(f"dtype {name!r} is not supported; known are auto, {', '.join(_NAMES)}")
    return _NAMES[name]


def choose_weight_dtype(stored: np.dtype, activations: np.dtype, exact: bool = False) -> np.dtype:
    """Return the dtype in HBM of a weight that a checkpoint stores in the dtype `stored`.

    With float32 activations weights have the checkpoint's dtype, with bfloat16 activations bfloat16. An `exact` weight
    is always float32.
    """
    if exact:
        return FLOAT32
    return stored if activations == FLOAT32 else activations


def cast_weight(weight: Weight, activations: np.dtype, exact: bool = False) -> Weight:
    """Return the weight in the dtype that `choose_weight_dtype` returns for it; not a copy if it has that dtype.

    A quantised weight stays quantised: the cast follows when it is widened.
    """
    return weight.astype(choose_weight_dtype(weight.dtype, activations, exact), copy=False)
