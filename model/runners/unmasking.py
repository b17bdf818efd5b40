"""Text by unmasking: a model predicts all masked tokens of a block at once, and each pass keeps the surest ones.

The text is a prompt and `new_tokens` masks. Blocks of masks are filled from left to right. A pass predicts every masked
token of the block from the whole text; the tokens that are not kept stay masked (LLaDA's generate). After the last pass
of a block no mask is left in it, because the mask itself is never chosen.

Each sequence draws from Philox with its own seed, anew for each pass. So a batch gives each sequence the tokens that it
gets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import numpy as np

from model.errors import ModelError


class Remasking(Enum):
    """Strategy that selects the predicted tokens that a pass keeps."""

    low_confidence = "the tokens with the largest softmax probability are kept"
    random = "tokens at random positions are kept"


class MaskPredictor(Protocol):
    """Model that predicts the tokens of a block of masks."""

    def predict(self, ids: np.ndarray, block: range, reuses: bool) -> np.ndarray:
        """Return the logits of the positions of a block, float32 [sequences, block, vocabulary].

        Args:
            ids: Token ids of whole texts, [sequences, length].
            block: Positions of the block.
            reuses: Whether keys and values before the block are those of the last pass without reuse. Rows before the
                block are not computed then.
        """


@dataclass(frozen=True)
class UnmaskingOptions:
    """Options of the unmasking of a text.

    passes        passes of a text, the same number for each block
    block_length  masks of a block
    guidance      scale s of guidance without supervision: logits are u + (s + 1) * (c - u), where u are the logits of
                  the text with a masked prompt, and c its own; 0 computes c alone
    temperature   factor of the Gumbel noise that is added to logits; 0 takes the likeliest token
    reuses        whether passes after the first of a block reuse keys and values before the block
    """

    new_tokens: int
    passes: int
    block_length: int
    strategy: Remasking = Remasking.low_confidence
    temperature: float = 0.0
    guidance: float = 0.0
    reuses: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.new_tokens // self.block_length

    def check(self, prompt: Sequence[int], mask_token_id: int, context: int) -> None:
        """Check the numbers of a text that begins with `prompt`.

        Raises:
            ModelError: The blocks do not divide the new tokens or the passes, there are more passes than new tokens, or
                the prompt has a mask, no token, or no room in the context.
        """
        if self.new_tokens % self.block_length:
            raise ModelError(
                f"blocks of {self.block_length} masks do not divide {self.new_tokens} new tokens; take a divisor of "
                f"{self.new_tokens}"
            )
        if self.passes > self.new_tokens:
            raise ModelError(
                f"{self.passes} passes for {self.new_tokens} new tokens; a pass keeps at least one token: take at most "
                f"{self.new_tokens} passes"
            )
        if self.passes % self.blocks:
            raise ModelError(
                f"{self.passes} passes for {self.blocks} blocks of {self.block_length} masks; all blocks take as many: "
                f"take a multiple of {self.blocks}"
            )
        if not len(prompt):
            raise ModelError("the prompt has no tokens; a text begins with at least one that is not masked")
        if mask_token_id in prompt:
            raise ModelError(
                f"the prompt has the mask, token {mask_token_id}, which stands for an unknown token; leave it out"
            )
        if len(prompt) + self.new_tokens > context:
            raise ModelError(
                f"{len(prompt)} tokens of the prompt and {self.new_tokens} masks; the model takes {context} together"
            )


@dataclass(frozen=True)
class PassRecord:
    """A pass over all sequences.

    start  first position that the pass computes; above 0 where keys and values are reused
    kept   tokens that the pass keeps, in each sequence
    """

    start: int
    kept: int


@dataclass(frozen=True, eq=False)
class UnmaskedTexts:
    """Texts without masks, [sequences, length], the passes, and how many choices equal the reference's.

    `compared` and `equal` count kept tokens; both are 0 without a reference.
    """

    ids: np.ndarray
    passes: tuple[PassRecord, ...]
    compared: int = 0
    equal: int = 0


def divide_evenly(tokens: int, passes: int) -> list[int]:
    """Return how many of `tokens` masks each pass of a block keeps; the first passes keep one more if need be."""
    least, remainder = divmod(tokens, passes)
    return [least + (index < remainder) for index in range(passes)]


def list_passes(prompt: int, options: UnmaskingOptions) -> list[tuple[range, PassRecord]]:
    """Return the passes of a text in order, each with the positions of its block; `prompt` is the prompt's length."""
    kept = divide_evenly(options.block_length, options.passes // options.blocks)
    return [
        (
            range(start, start + options.block_length),
            PassRecord(start if options.reuses and index else 0, count),
        )
        for start in range(prompt, prompt + options.new_tokens, options.block_length)
        for index, count in enumerate(kept)
    ]


def unmask(
    predictor: MaskPredictor,
    prompts: Sequence[Sequence[int]],
    mask_token_id: int,
    options: UnmaskingOptions,
    seeds: Sequence[int],
    reference: MaskPredictor | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> UnmaskedTexts:
    """Return the prompts with their masks filled.

    Args:
        predictor: The model.
        prompts: Token ids of prompts of one length, which `UnmaskingOptions.check` has accepted.
        mask_token_id: The mask.
        options: The options.
        seeds: Seed of each sequence.
        reference: Another predictor, whose choices for the same texts are compared; None compares nothing.
        progress: Called with the number of finished passes after each.

    Raises:
        ModelError: Logits are not finite.
    """
    masks = np.full((len(prompts), options.new_tokens), mask_token_id)
    ids = np.concatenate([np.array(prompts), masks], axis=1)
    passes = list_passes(len(prompts[0]), options)
    compared = equal = 0
    for number, (block, record) in enumerate(passes):
        run = partial(_run_pass, ids, block, record, mask_token_id, options, seeds, number)
        texts = run(predictor)
        if reference is not None:
            changed = texts != ids
            compared += int(changed.sum())
            equal += int((changed & (texts == run(reference))).sum())
        ids = texts
        progress(number + 1)
    return UnmaskedTexts(ids, tuple(record for _, record in passes), compared, equal)


def _run_pass(
    ids: np.ndarray,
    block: range,
    record: PassRecord,
    mask_token_id: int,
    options: UnmaskingOptions,
    seeds: Sequence[int],
    number: int,
    predictor: MaskPredictor,
) -> np.ndarray:
    """Return the texts after a pass of a predictor, in which `record.kept` more masks of the block are replaced.

    Args:
        ids: The texts, [sequences, length].
        block: Positions of the block.
        record: The pass.
        mask_token_id: The mask.
        options: The options.
        seeds: Seed of each sequence.
        number: Number of the pass, which decides its random numbers.
        predictor: The model.
    """
    logits = _predict(predictor, ids, block, record.start > 0, mask_token_id, options)
    ids = ids.copy()
    for text, rows, seed in zip(ids, logits, seeds):
        tokens, confidence = choose_tokens(rows, mask_token_id, options, _create_generator(seed, number))
        masked = text[block.start : block.stop] == mask_token_id
        positions = np.argsort(np.where(masked, -confidence, np.inf), kind="stable")[: record.kept]
        text[block.start + positions] = tokens[positions]
    return ids


def _create_generator(seed: int, pass_number: int) -> np.random.Generator:
    """Return the random numbers of one pass of a sequence; they do not depend on those of other passes."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, pass_number]))


def _predict(
    predictor: MaskPredictor,
    ids: np.ndarray,
    block: range,
    reuses: bool,
    mask_token_id: int,
    options: UnmaskingOptions,
) -> np.ndarray:
    """Return the logits of a block, float64 [sequences, block, vocabulary], with guidance if there is any.

    Raises:
        ModelError: A logit is not finite.
    """
    texts = ids
    if options.guidance:
        without_prompt = ids.copy()
        without_prompt[:, : ids.shape[1] - options.new_tokens] = mask_token_id
        texts = np.concatenate([ids, without_prompt])
    logits = predictor.predict(texts, block, reuses).astype(np.float64)
    if not np.isfinite(logits).all():
        raise ModelError("the logits of a pass are not finite; the weights or the arithmetic overflow")
    if options.guidance:
        conditional, unconditional = np.split(logits, 2)
        logits = unconditional + (options.guidance + 1) * (conditional - unconditional)
    return logits


def choose_tokens(
    logits: np.ndarray, mask_token_id: int, options: UnmaskingOptions, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return a token for each row of logits, and the confidence by which tokens are kept, [rows] each.

    With `low_confidence` that is the token's softmax probability without noise, among all tokens but the mask. Ties of
    confidence keep the lower position, ties of logits the lower token.

    Args:
        logits: [rows, vocabulary] float64.
        mask_token_id: The mask, which is never chosen.
        options: The options.
        generator: Random numbers.
    """
    logits = logits.copy()
    logits[:, mask_token_id] = -np.inf
    noisy = logits
    if options.temperature:
        with np.errstate(divide="ignore"):  # a random number of 0 excludes its token
            noisy = logits - options.temperature * np.log(-np.log(generator.random(logits.shape)))
    tokens = noisy.argmax(axis=1)
    if options.strategy is Remasking.random:
        return tokens, generator.random(len(logits))
    shifted = logits - logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(shifted, tokens[:, None], axis=1)[:, 0]
    return tokens, np.exp(chosen) / np.exp(shifted).sum(axis=1)
