"""`LLM`, vLLM's interface in Python: a model folder becomes an engine that computes requests."""

from model.llm.engine_args import EngineArgs
from model.llm.llm import LLM

__all__ = ["LLM", "EngineArgs"]
