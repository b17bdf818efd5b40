"""Conversion between arrays of the host and torch tensors.

NeuronCores take 32- and 16-bit floats, bfloat16, 8-bit floats, uint8, int32 and uint32. 64-bit integers are converted
to 32 bits on trn1 without a warning, so they are refused here:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-features/data-types.html
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from model.errors import ModelError

_PLAIN = ("float32", "float16", "int32", "uint32", "uint8")
_AS_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, "bfloat16"),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, "float8_e4m3fn"),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, "float8_e5m2"),
}
"""Dtypes of ml_dtypes, which torch does not take: the dtype that carries their bits, and torch's name of the dtype."""


def to_torch(array: np.ndarray) -> Any:
    """Return a host tensor with the array's elements and dtype, which may share the array's memory.

    Raises:
        ModelError: NeuronCores do not take the dtype.
    """
    import torch

    array = np.ascontiguousarray(array)
    if not array.flags.writeable:  # torch warns of memory that it may not write to
        array = array.copy()
    if array.dtype in _AS_BITS:
        bits, name = _AS_BITS[array.dtype]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    if array.dtype.name not in _PLAIN:
        dtypes = [*_PLAIN, *(name for _, name in _AS_BITS.values())]
        raise ModelError(
            f"an array of {array.dtype}: NeuronCores take {', '.join(dtypes)}; convert it to one"
        )
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a host tensor's elements as an array of the same dtype, which shares the tensor's memory."""
    import torch

    for dtype, (bits, name) in _AS_BITS.items():
        if tensor.dtype == getattr(torch, name):
            carrier = torch.int16 if bits is np.int16 else torch.uint8
            return tensor.view(carrier).numpy().view(dtype)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]
