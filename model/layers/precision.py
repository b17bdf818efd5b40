"""The dtype of activations and cache: what `--dtype` names, and how weights are stored for it.

float32 is the default. With bfloat16 whatever a kernel leaves in HBM is bfloat16: the residual stream, queries, keys
and values, the cache, what attention and the gated product hand on. Sums of products, the statistics of norms and
softmax, rotations and the logits stay float32, as the engines compute them.
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


def activation_dtype(asked: str, config: Config, weights: Mapping[str, Weight]) -> np.dtype:
    """The dtype that `asked` names: float32, bfloat16, or auto for the checkpoint's.

    The checkpoint's is what its config names, else that of its weights, as in transformers. A float16 one is run in
    float32, which holds its weights exactly: the kernels have no float16 activations. ModelError for another name.
    """
    if asked == "auto":
        asked = config.dtype or weights[next(iter(weights))].dtype.name
        return _NAMES.get(asked, FLOAT32)
    if asked not in _NAMES:
        raise ModelError(f"dtype {asked!r} is not supported; known are auto, {', '.join(_NAMES)}")
    return _NAMES[asked]


def held_dtype(stored: np.dtype, activations: np.dtype, exact: bool = False) -> np.dtype:
    """Return the dtype in which HBM holds a weight that a checkpoint stores in a dtype.

    Beside float32 activations that is the checkpoint's dtype, beside bfloat16 ones bfloat16. An `exact` weight is
    float32 beside any.
    """
    if exact:
        return FLOAT32
    return stored if activations == FLOAT32 else activations


def as_held(weight: Weight, activations: np.dtype, exact: bool = False) -> Weight:
    """Return a weight in the dtype of `held_dtype`; a quantised one stays in its stored tensors until it is widened."""
    return weight.astype(held_dtype(weight.dtype, activations, exact), copy=False)
