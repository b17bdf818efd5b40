"""Many requests at once: which of them compute which tokens in the next step."""

from model.engine.request import Request
from model.engine.scheduler import Batch, Chunk, Scheduler, SchedulerOptions

__all__ = ["Batch", "Chunk", "Request", "Scheduler", "SchedulerOptions"]
