"""Language models of Hugging Face folders, run by NKI kernels or by plain numpy.

The names of this package are imported at their first use; `import model` imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.engine import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
    from model.llm import LLM, EngineArgs

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    """Return the object `name` of `__all__`, importing its module. Raises AttributeError for another name."""
    if name in ("LLM", "EngineArgs"):
        import model.llm

        return getattr(model.llm, name)
    if name in __all__:
        import model.engine

        return getattr(model.engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
