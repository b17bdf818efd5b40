"""Quantisation of plain weights when they are loaded, for the option `--quantization`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from model.config import Config
from model.formats import Format, QuantisedWeight, Weight
from model.loading.weights import list_kernel_parameters
from model.network import Network


class PackedTensors(Mapping[str, np.ndarray]):
    """Stored tensors of a plain weight [out, in] by name, computed by `Format.pack` when one is first read."""

    def __init__(self, format: Format, plain: np.ndarray) -> None:
        """Keep the plain weight [out, in], mapped from a file, without reading it."""
        self._format, self._plain = format, plain
        self._packed: dict[str, np.ndarray] | None = None

    def release(self) -> None:
        """Release the memory of the packed tensors; they are computed again when one is read."""
        self._packed = None

    def __getitem__(self, name: str) -> np.ndarray:
        if self._packed is None:
            self._packed = self._format.pack(self._plain.astype(np.float32))
        return self._packed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._format.describe_tensors(self._plain.shape))

    def __len__(self) -> int:
        return len(self._format.describe_tensors(self._plain.shape))


def quantise_plain_weights(
    weights: Mapping[str, Weight], network: Network, config: Config
) -> dict[str, Weight]:
    """Return weights by name; weights that kernels read in `config.weight_format` are quantised to this format.

    These are weights of the decoder layers. The embedding, the head and all other weights stay as they are. Numbers are
    rounded to the nearest number of the format when they are read.
    """
    assert config.weight_format is not None, "quantised on loading without a format"
    (format,) = config.weight_format.formats
    quantised = dict(weights)
    for weight in network.block_weights:
        if weight.find_planned_format(format, list_kernel_parameters) is None:
            continue
        for tensor in weight.tensors:
            plain = quantised[tensor.name]
            if isinstance(plain, np.ndarray):
                packed = PackedTensors(format, plain)
                quantised[tensor.name] = QuantisedWeight.from_tensors(
                    format, packed, plain.shape, plain.dtype
                )
    return quantised
