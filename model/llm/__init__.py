"""`LLM`: vLLM's interface in Python to an engine with the model of a folder."""

from model.llm.engine_args import EngineArgs
from model.llm.llm import LLM

__all__ = ["LLM", "EngineArgs"]
