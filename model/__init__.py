"""Language models read from Hugging Face folders, run by NKI kernels or by plain numpy.

`LLM` and `SamplingParams` are imported when they are asked for; importing this package alone imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.engine import RequestOutput, SamplingParams
    from model.llm import LLM

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """A name of the engine."""
    if name == "LLM":
        from model.llm import LLM

        return LLM
    if name in __all__:
        import model.engine

        return getattr(model.engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
