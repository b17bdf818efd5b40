"""The model runner of a static batch, whose prompts start together, on contiguous caches or in plain NumPy.

The engine schedules the batch with `SchedulerOptions(continuous=False)`. The first step computes all prompts, and each
later step computes one token of every sequence that has not ended. Commands that compute one batch of prompts use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np

from model.config import ModelConfig
from model.engine.engine import Engine, EngineLimits, Observer
from model.engine.padded_batch import BucketUse
from model.engine.request import Request
from model.engine.scheduler import Batch, Chunk, Scheduler, SchedulerOptions
from model.engine.speculation import NO_ROWS, Rows
from model.loading.tokenizer import Tokenizer
from model.runners.window import make_input_check
from model.sampling import StepOutput
from model.state import PagePool


class Backend(Protocol):
    """Model that computes sequences which start together, such as `KernelModel` or `ReferenceModel`."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Sequence[StepOutput]:
        """Start a sequence with each prompt, compute it, and return the output after each prompt's last token."""

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> Sequence[StepOutput]:
        """Append a token to each sequence, compute it, and return the output after each token.

        Args:
            tokens: The token of each sequence; None if it has ended, and then its output has no meaning.
            positions: The number of tokens before the appended one.
        """


class EncoderBackend(Backend, Protocol):
    """Backend of a speech model."""

    def encode(self, features: Sequence[np.ndarray]) -> None:
        """Run the encoder on one window of speech for each of the next prompts.

        Args:
            features: The log-mel spectrum of each window, [bands, columns] each.
        """


class StaticBatch:
    """Model runner that computes the engine's batches on a backend whose sequences start together.

    Args:
        backend: The backend.
        continuations: Number of continuations of every prompt. The backend has a sequence for each, so continuations
            share no cache.
        prompts_done: Called when the backend has computed the prompts.
    """

    def __init__(
        self, backend: Backend, continuations: int = 1, prompts_done: Callable[[], None] = lambda: None
    ) -> None:
        self.use = BucketUse()
        self._backend, self._continuations, self._prompts_done = backend, continuations, prompts_done
        self._rows: dict[Request, int] = {}
        self._free_rows: dict[tuple[int, ...], list[int]] = {}
        self._positions: list[int] = []

    def step(self, batch: Batch, rows: Rows = NO_ROWS) -> dict[Request, list[StepOutput]]:
        """Compute a batch and return the output of each request; it has logits, from which the host samples.

        Args:
            batch: The scheduled chunks: all prompts, or one token of each unfinished request.
            rows: Unused, because the device samples nothing.
        """
        chunks = list(batch.chunks.values())
        outputs = self._prefill(chunks) if chunks[0].num_computed_tokens == 0 else self._decode(chunks)
        return {chunk.request: [outputs[self._rows[chunk.request]]] for chunk in chunks}

    def _prefill(self, chunks: Sequence[Chunk]) -> Sequence[StepOutput]:
        prompts: list[Sequence[int]] = []
        for chunk in chunks:
            first, *further = range(len(prompts), len(prompts) + self._continuations)
            self._rows[chunk.request] = first
            self._free_rows.setdefault(tuple(chunk.tokens), []).extend(further)
            prompts += [chunk.tokens] * self._continuations
        self._positions = [len(prompt) for prompt in prompts]
        features = [chunk.request.inputs.features for chunk in chunks if chunk.request.inputs is not None]
        if features:
            cast(EncoderBackend, self._backend).encode(features)
        outputs = self._backend.prefill(prompts)
        self._prompts_done()
        return outputs

    def _decode(self, chunks: Sequence[Chunk]) -> Sequence[StepOutput]:
        tokens: list[int | None] = [None] * len(self._positions)
        for chunk in chunks:
            request = chunk.request
            if request not in self._rows:  # a further continuation of a prompt
                prompt = tuple(request.tokens[: request.prompt_tokens])
                self._rows[request] = self._free_rows[prompt].pop(0)
            row = self._rows[request]
            (tokens[row],), self._positions[row] = chunk.tokens, chunk.num_computed_tokens
        return self._backend.decode(tokens, self._positions)


def create_static_engine(
    model: StaticBatch,
    tokenizer: Tokenizer,
    config: ModelConfig,
    prompt_lengths: Sequence[int],
    max_new_tokens: int,
    continuations: int = 1,
    observer: Observer | None = None,
) -> Engine:
    """Return the engine of one static batch of prompts.

    It has no clock, so that all processes of a tensor-parallel model schedule alike. Each sequence takes one page,
    which only counts sequences, because the backend has the caches.

    Args:
        model: The runner of the batch.
        tokenizer: The model's tokenizer.
        config: The model.
        prompt_lengths: The number of tokens of each prompt.
        max_new_tokens: The largest number of new tokens of a sequence.
        continuations: The number of sequences of each prompt.
        observer: Gets every sampled token.
    """
    sequences = continuations * len(prompt_lengths)
    longest = min(max(prompt_lengths) + max_new_tokens, config.context)
    options = SchedulerOptions(
        max_num_seqs=sequences,
        max_num_batched_tokens=max(sequences, sum(prompt_lengths), longest),
        chunked_prefill=False,
        prefix_caching=False,
        continuous=False,
    )
    limits = EngineLimits(
        config.eos_token_ids, config.vocab_size, config.context, check_inputs=make_input_check(config)
    )
    scheduler = Scheduler(PagePool(sequences, longest), options)
    return Engine(model, scheduler, tokenizer, limits, lambda: 0.0, isolates=False, observer=observer)
