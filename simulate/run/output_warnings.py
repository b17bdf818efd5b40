"""Warnings of the command `run` about outputs that are not finite; the command `check` finds the instruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from simulate.memory import NkiTensor, Storage
from simulate.numerics.quiet import quiet
from simulate.run.launch import Launch, LaunchRequest, Observer
from simulate.run.machine import Mode, NeuronCore


class OutputWarnings(Observer):
    """Observer that collects a warning text for outputs with NaN or +infinity, if all arguments were finite.

    Each kernel, by name, gets one warning at most. A negative infinity may be a mask that a kernel returns on
    purpose. Replays have no tensors to look at. `texts` has the warnings.
    """

    def __init__(self, script: str) -> None:
        self.texts: list[str] = []
        self._script = script
        self._kernels: set[str] = set()
        self._has_finite_arguments = False

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """Note whether all array arguments are finite, before the kernel may write to them; False in a dry launch."""
        self._has_finite_arguments = request.mode is not Mode.dry and all(
            np.isfinite(_read_values(NkiTensor.from_storage(storage.shape, storage.dtype, storage))).all()
            for storages in inputs
            for storage in storages
        )

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Append a warning for the launch's first output with NaN or +infinity, unless its kernel has one."""
        if not self._has_finite_arguments or launch.mode is Mode.replay or launch.kernel in self._kernels:
            return
        for tensor in _yield_tensors(returned):
            values = _read_values(tensor)
            nan, infinite = int(np.isnan(values).sum()), int(np.isposinf(values).sum())
            if nan or infinite:
                self._kernels.add(launch.kernel)
                self.texts.append(
                    f"warning: {tensor.storage.name or 'an output'} {tensor.shape} {tensor.dtype} of "
                    f"{launch.kernel} contains {nan} NaN and {infinite} infinite elements, and all arguments are "
                    f"finite; nkw check {self._script} names the instruction, such as an exp that overflows"
                )
                return


@quiet
def _read_values(tensor: NkiTensor) -> np.ndarray:
    """Return the elements of a tensor as float32; an empty array for dtypes without NaN, such as integers."""
    dtype = tensor.dtype
    if not dtype.is_float or dtype.is_packed or dtype == "float8_e8m0fnu":
        return np.empty(0, np.float32)
    return np.asarray(tensor.array, np.float32)


def _yield_tensors(value: Any) -> Iterator[NkiTensor]:
    """Yield the tensors in nested tuples and lists, such as what the kernels of all ranks returned."""
    if isinstance(value, NkiTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _yield_tensors(element)
