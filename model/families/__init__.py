"""Which model families are known: the architecture named by config.json, and the module that implements it.

A family module offers `tensor_shapes(config)`, what its checkpoint holds, and `KernelModel`, its forward pass over
the kernels. Adding a family is its module, its reference and one row here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

ARCHITECTURES: dict[str, str] = {"LlamaForCausalLM": "model.families.llama"}


def family(architecture: str) -> ModuleType:
    """The module of an architecture that `ARCHITECTURES` lists."""
    return importlib.import_module(ARCHITECTURES[architecture])
