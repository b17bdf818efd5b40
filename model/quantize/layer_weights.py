"""Weights of the layer that is being quantised: the checkpoint's, with replacements, as the numpy references read them.

Widened copies are kept while the layer is computed, as far as they take little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from model.formats import Weight
from model.layers.arithmetic import widen
from model.quantize.rounding import Rounded

KEPT_BYTES = 2**30
"""Most bytes of float32 copies that are kept between two uses."""


class LayerWeights(Mapping[str, Weight]):
    """Weights by name: replacements in float32 or rounded, all others from the checkpoint.

    `replace` sets a replacement; `forget` drops all replacements and copies, at the end of a layer.
    """

    def __init__(self, checkpoint: Mapping[str, Weight]) -> None:
        self._checkpoint = checkpoint
        self._replaced: dict[str, np.ndarray | Rounded] = {}
        self._copies: dict[str, np.ndarray] = {}
        self._copied_bytes = 0

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the weight in float32. Raises KeyError for an unknown name."""
        if name in self._copies:
            return self._copies[name]
        weight = self._replaced[name] if name in self._replaced else self._checkpoint[name]
        wide = weight.widen() if isinstance(weight, Rounded) else widen(weight)
        if self._copied_bytes + wide.nbytes <= KEPT_BYTES:
            self._copies[name] = wide
            self._copied_bytes += wide.nbytes
        return wide

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)

    def replace(self, name: str, weight: np.ndarray | Rounded) -> None:
        """Use a weight, float32 or rounded, in place of the present one."""
        self._replaced[name] = weight
        copy = self._copies.pop(name, None)
        self._copied_bytes -= 0 if copy is None else copy.nbytes

    def forget(self) -> None:
        """Drop replacements and copies."""
        self._replaced.clear()
        self._copies.clear()
        self._copied_bytes = 0
