"""The engine: scheduling, sampling and outputs of many requests at once."""

from model.engine.engine import Engine, EngineLimits
from model.engine.groups import GroupScheduler, Schedulers
from model.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from model.engine.params import SamplingParams
from model.engine.request import Request
from model.engine.sampler import Logprob
from model.engine.scheduler import Batch, Chunk, Scheduler, SchedulerOptions
from model.engine.structured import StructuredOutputsParams

__all__ = [
    "Batch",
    "Chunk",
    "CompletionOutput",
    "Engine",
    "EngineLimits",
    "GroupScheduler",
    "Logprob",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerOptions",
    "Schedulers",
    "StructuredOutputsParams",
]
