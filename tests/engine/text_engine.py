"""An engine on the model of paged_text: its scores follow from the text, so no kernel runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from model.engine import Batch, Engine, EngineLimits, Request, RequestOutput, Scheduler, SchedulerOptions
from model.engine.kv_cache import KVCache
from model.engine.padded_batch import BucketUse
from model.engine.speculation import NO_ROWS, Rows
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer
from model.sampling import StepOutput
from model.state import PagePool
from tests.engine.paged_text import VOCABULARY, PagedText

OPTIONS = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=16)
LONGEST = 64
END = 0


def scores(history: Sequence[int]) -> np.ndarray:
    """Return the logits behind a text: the last two tokens decide them."""
    draw = np.random.default_rng(crc32(bytes(history[-2:])))
    return draw.normal(0, 2, VOCABULARY).astype(np.float32)


class TextSteps:
    """The model of an engine; `computed` counts the tokens of all its steps."""

    def __init__(self, cache: KVCache) -> None:
        self._text = PagedText(cache)
        self.use = BucketUse()
        self.computed = 0

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        """Return the scores behind every request that chooses, and behind each of its drafts."""
        self._text.step(batch)
        self.computed += batch.tokens
        return {
            request: [
                StepOutput(scores([*request.tokens, *chunk.drafts[:right]]))
                for right in range(len(chunk.drafts) + 1)
            ]
            for request, chunk in batch.chunks.items()
            if chunk.samples
        }


class Always:
    """Proposes the same tokens for every request."""

    def __init__(self, *drafts: int) -> None:
        self._drafts = drafts

    def propose(self, batch: Batch) -> Mapping[Request, Sequence[int]]:
        """Return as many of the draft tokens as each chunk has slots."""
        return {
            request: self._drafts[: chunk.draft_slots]
            for request, chunk in batch.chunks.items()
            if chunk.draft_slots
        }


def text_engine(
    options: SchedulerOptions = OPTIONS, pages: int = 24, block: int = 4, proposer: Always | None = None
) -> Engine:
    """Return an engine whose sequences have up to 64 of 50 tokens."""
    scheduler = Scheduler([PagePool(pages, block)], options)
    steps, limits = TextSteps(scheduler.cache), EngineLimits((END,), VOCABULARY, LONGEST)
    times = iter(range(10**9))
    return Engine(steps, scheduler, Tokenizer(PRETRAINED, 4096), limits, lambda: float(next(times)), proposer)


def run(engine: Engine) -> None:
    """Run steps until every request has ended."""
    while engine.busy:
        engine.step()


def tokens_of(output: RequestOutput) -> list[list[int]]:
    """Return the tokens of each continuation."""
    return [output.token_ids for output in output.outputs]
