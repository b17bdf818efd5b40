"""The dtype of activations and cache: what `--dtype` names, and how weights are stored for it.

float32 is the default. With bfloat16 whatever a kernel leaves in HBM is bfloat16: the residual stream, queries, keys
and values, the cache, what attention and the gated product hand on. Sums of products, the statistics of norms and
softmax, rotations and the logits stay float32, as the engines compute them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import ml_dtypes
import numpy as np

from model.config.parts import ModelConfig
from model.errors import ModelError
from model.fp8 import Scaled, sliced

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NAMES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


def activation_dtype(asked: str, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> np.dtype:
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


class StoredWeights(Mapping[str, np.ndarray]):
    """Weights in the dtype in which HBM holds them, each converted when it is read.

    Beside float32 activations they keep the checkpoint's dtype, beside bfloat16 ones they are rounded to bfloat16. The
    tensors `exact` are float32 beside any.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray], activations: np.dtype, exact: Collection[str] = ()
    ) -> None:
        self._weights = weights
        self._activations = activations
        self._exact = frozenset(exact)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.sliced(name))

    def sliced(self, name: str) -> np.ndarray | Scaled:
        """A tensor of which a cut widens only what it takes, where it is quantised by scales."""
        weight = sliced(self._weights, name)
        if name in self._exact:
            return weight.astype(FLOAT32, copy=False)
        return weight if self._activations == FLOAT32 else weight.astype(self._activations, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
