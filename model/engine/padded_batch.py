"""Padded batches: chunks of requests that are launched together as one step, rounded up to bucket sizes.

`buckets` makes them, and model runners launch them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from model.engine.scheduler import Chunk
from model.execution.expert_load import ExpertLoad
from model.layers.launch import StepShape

if TYPE_CHECKING:
    from model.engine.buckets import Buckets


@dataclass(frozen=True)
class PaddedBatch:
    """Chunks that are launched together as one step of rounded sizes.

    `groups` has the chunks of each data-parallel group, perhaps none. `decoding` has the chunks that decode in the
    launches of prompts; its step is `step.decoding`.
    """

    step: StepShape
    groups: tuple[tuple[Chunk, ...], ...]
    decoding: PaddedBatch | None = None

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Chunks of all groups, without those of `decoding`."""
        return self.groups[0] if len(self.groups) == 1 else tuple(chain.from_iterable(self.groups))

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens of all chunks, those of `decoding` included, without padding."""
        tokens = sum(chunk.num_scheduled_tokens for chunk in self.chunks)
        return tokens + (0 if self.decoding is None else self.decoding.num_scheduled_tokens)

    @property
    def padding(self) -> int:
        """Number of padding rows: rows of all groups that belong to no token of a request."""
        return len(self.groups) * self.step.tokens - self.num_scheduled_tokens


@dataclass
class BucketUse:
    """Counts of launched steps by shape, of tokens of requests, and of padding rows.

    `experts` counts the expert selections of data-parallel groups that divide the experts; None without such groups.
    """

    buckets: Buckets | None = None
    experts: ExpertLoad | None = None
    steps: Counter[StepShape] = field(default_factory=Counter)
    tokens: int = 0
    padding: int = 0

    def add(self, batch: PaddedBatch) -> None:
        """Count one launched padded batch."""
        self.steps[batch.step] += 1
        self.padding += batch.padding
        self.tokens += batch.num_scheduled_tokens
