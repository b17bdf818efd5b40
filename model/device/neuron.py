"""Kernels on the NeuronCore of this machine, through AWS Neuron's own packages.

One core, one rank: the ranks of a collective are separate processes there. Arguments go to the core and results come
back with every launch, so this backend shows that the kernels compute the same on the chip, not how fast the chip is.
It was written to the vendor's documentation and has not run on a chip.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from model.device.binding import bind_neuron, neuron_package_installed, nki_dtype
from model.errors import ModelError

_REPOSITORY = "AWS Neuron's package repository"


class NeuronDevice:
    """The NeuronCore that torch_xla sees."""

    def __init__(self, ranks: int) -> None:
        missing = [] if neuron_package_installed() else ["nki"]
        missing += [name for name in ("torch", "torch_xla") if importlib.util.find_spec(name) is None]
        if missing:
            raise ModelError(
                f"the neuron backend needs {', '.join(missing)}, not installed here: on a Trainium or Inferentia "
                f"instance run pip install 'nki-workbench[neuron]' with {_REPOSITORY} configured"
            )
        if ranks != 1:
            raise ModelError(
                f"the neuron backend runs one rank in one process, not {ranks}; use --tp 1 and --dp 1"
            )
        bind_neuron()
        self.ranks = ranks
        self.own = range(ranks)

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument."""
        return nki_dtype(name)

    def replica_group(self, groups: list[list[int]] | None) -> None:
        """None: the one rank meets no other."""
        assert groups is None

    def run(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Launch a kernel on the core; numpy in, numpy out."""
        import nki_kernels

        core = importlib.import_module("torch_xla.core.xla_model").xla_device()
        (own,) = arguments
        result = getattr(nki_kernels, kernel)(*(_to_torch(each, core) for each in own))
        if isinstance(result, (tuple, list)):
            return [tuple(_to_numpy(each) for each in result)]
        return [_to_numpy(result)]

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of all ranks; there is one."""
        return list(arrays)


def _to_torch(value: Any, core: Any) -> Any:
    """An array as a tensor on the core; anything else unchanged."""
    import torch

    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:  # torch takes no ml_dtypes, so its bits go over
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).to(core)
    return torch.from_numpy(value).to(core)


def _to_numpy(tensor: Any) -> np.ndarray:
    """A tensor of the core as an array of this machine."""
    import torch

    local = tensor.cpu()
    if local.dtype == torch.bfloat16:
        return local.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return local.numpy()
