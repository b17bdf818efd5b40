"""Language models read from Hugging Face folders, run by NKI kernels or by plain numpy.

Its names are imported when they are asked for; importing this package alone imports nothing.
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
    """A name of the engine."""
    if name in ("LLM", "EngineArgs"):
        import model.llm

        return getattr(model.llm, name)
    if name in __all__:
        import model.engine

        return getattr(model.engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
