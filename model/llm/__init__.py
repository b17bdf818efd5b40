"""`LLM`: vLLM's interface in Python to an engine with the model of a folder.

The names of this package are imported at their first use, so that the help of commands imports no NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.llm.engine_args import EngineArgs
    from model.llm.llm import LLM

__all__ = ["LLM", "EngineArgs"]
_MODULES = {"LLM": "model.llm.llm", "EngineArgs": "model.llm.engine_args"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use and return it; AttributeError for any other name."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
