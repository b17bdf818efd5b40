"""Hidden states and caches of several sequences, which a network computes layer by layer.

Caches of a layer are dropped after the last layer that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from model.formats import Weight
from model.layers.arithmetic import Arithmetic, Span
from model.layers.layer import Layer, States
from model.network import Network

LastReaders = Mapping[str, int]
"""Index of the last layer that reads or writes a state, by the state's name."""


class _TracedStates(States):
    """States that remember the last layer that used each name; `layer` is the index of the present layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = 0, dict[str, int]()

    def __getitem__(self, name: str) -> np.ndarray:
        self.last[name] = self.layer
        return super().__getitem__(name)

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self.last[name] = self.layer
        super().__setitem__(name, array)


def find_last_readers(network: Network, weights: Mapping[str, Weight], ids: Sequence[int]) -> LastReaders:
    """Return the last readers of the states of a network, found by computing a few tokens with all layers."""
    states, x = _TracedStates(), np.asarray(ids)
    numpy = Arithmetic(weights, np.dtype(np.float32), 0, exact=network.exact)
    for index, layer in enumerate(network.layers):
        states.layer = index
        x = layer.reference(x, Span(0, len(ids)), states, numpy)
    return states.last


class Sequences:
    """Sequences in one variant of a model: `outputs` are the results of the last computed layer, in order.

    Args:
        sequences: Token ids of each sequence.
        last_readers: Result of `find_last_readers`.
        create_states: Function that returns new states.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        last_readers: LastReaders,
        create_states: Callable[[], States] = dict,
    ) -> None:
        self.outputs = [np.asarray(ids) for ids in sequences]
        self._last_readers = last_readers
        self._states = [create_states() for _ in sequences]

    def peek(self, layer: Layer, index: int, numpy: Arithmetic) -> np.ndarray:
        """Return the result of a layer for the sequence `index`, and keep outputs and states as they are."""
        states = self._states[index].copy()
        return layer.reference(self.outputs[index], Span(0, len(self.outputs[index])), states, numpy)

    def advance(self, index: int, layer: Layer, layer_index: int, numpy: Arithmetic) -> np.ndarray:
        """Compute a layer for the sequence `index`, and return its result, which is the new output."""
        x, states = self.outputs[index], self._states[index]
        self.outputs[index] = layer.reference(x, Span(0, len(x)), states, numpy)
        for name in [name for name in states if self._last_readers.get(name, layer_index) <= layer_index]:
            del states[name]
        return self.outputs[index]

    def __len__(self) -> int:
        return len(self.outputs)
