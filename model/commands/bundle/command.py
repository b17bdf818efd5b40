"""`nkw bundle` for a model: the simulated model computes a layer, or a generation, and its launches are kept."""

from __future__ import annotations

import argparse
import os
from collections.abc import Container, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from model.commands.bundle.drawn import DrawnWeights, one_layer
from model.commands.bundle.recipe import operands_of, weight_files
from model.commands.bundle.single_step import bundle_section
from model.commands.generate.prompts import encode_prompt
from model.commands.options.inputs import FIRST_PROMPT
from model.config import ModelConfig
from model.config.folder import model_files
from model.device.bundling import (
    BundlingDevice,
    GenerationDevice,
    Prompt,
    Weights,
    check_folder,
    check_recipes,
)
from model.errors import ModelError
from model.families import TEXT, compose, load_config, single_step_tasks
from model.layers.head import HEAD_RESULTS, TOKENS, VALUES
from model.layers.launch import Phase
from model.loading.checkpoint import INDEX, SINGLE, Checkpoint, open_checkpoint
from model.loading.tokenizer import Tokenizer
from model.loading.weights import RankWeights, shard_weights
from model.runners.bucket_length import bucket_length, positions_needed
from model.runners.contiguous import KernelModel
from model.sampling import StepOutput
from nkw.files import Outputs, json_document
from nkw.terminal import show, working

_TOKENS = 8
"""Of the prompt of a layer, and of a generation, where no option says otherwise."""
MOST_BYTES = 8_000_000
"""Of the weights of a layer that travel; those of a larger one are taken from the model's folder."""


def bundle_command(options: argparse.Namespace) -> int:
    """Write the bundle; everything that can be refused before the model runs is refused before."""
    if options.tp > 1:
        raise ModelError("a bundle holds launches of one rank; leave --tp out")
    _check_options(options)
    check_folder(options.out)
    config = load_config(options.model, TEXT, *single_step_tasks())
    if not isinstance(config, ModelConfig):
        bundle_section(options, config)
    elif options.layer is not None:
        _bundle_layer(options, config)
    else:
        _bundle_generation(options, config)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise ModelError for options that do not go together."""
    of_layer = {"--tokens": options.tokens}
    of_model = {"--prompt": options.prompt, "--max-new-tokens": options.max_new_tokens}
    wrong = of_layer if options.layer is None else of_model
    for name, value in wrong.items():
        if value is not None:
            raise ModelError(f"{name} goes {'with' if wrong is of_layer else 'without'} --layer")


def _outputs(options: argparse.Namespace, files: Sequence[Path]) -> Outputs:
    return Outputs(lambda: [*model_files(options.model), *files])


def _bundle_layer(options: argparse.Namespace, config: ModelConfig) -> None:
    """The launches of one layer, in a prompt and in the token behind it.

    Its weights are drawn where the folder has none.
    """
    tokens, layer = options.tokens or _TOKENS, options.layer
    _check_sizes(layer, tokens, config)
    weights: Checkpoint | DrawnWeights
    if any(os.path.lexists(options.model / name) for name in (SINGLE, INDEX)):
        encoded = Tokenizer(options.model, config.vocab_size).encode(FIRST_PROMPT)
        weights = open_checkpoint(options.model, config)
        if not encoded:
            raise ModelError("the prompt has no tokens")
    else:
        config, layer = one_layer(config, layer), 0
        weights = DrawnWeights(config)
        encoded = list(range(min(tokens, config.vocab_size)))
    ids = list(islice(cycle(encoded), tokens))
    files = weights.files if isinstance(weights, Checkpoint) else []
    with json_document(options.json, _outputs(options, files), "bundle") as contents:
        ranks = shard_weights(config, weights, 1, after_layer=weights.release, dtype=options.dtype)
        own = {each.name for part in compose(config).blocks[layer] for each in part.weights}
        named = {name: array for name, array in ranks[0].arrays.items() if name in own}
        if files and sum(each.nbytes for each in named.values()) <= MOST_BYTES:
            named = {}
        device = BundlingDevice(options.target, layer, named)
        positions = bucket_length(len(ids) + 1, config.context)
        with working(lambda: f"{device.phase}, {device.launches} launches of layer {options.layer}"):
            references = stay_behind(config, weights, ranks[0], named) if named else None
            model = KernelModel(config, ranks, device, positions, progress=device.layer_done)
            device.phase = Phase.prefill.value
            (step,) = model.prefill([ids])
            device.phase = Phase.decode.value
            model.decode([step.likeliest], [len(ids)])
        written = device.write(options.out, references)
        show(written.report())
        contents.update(written.document())


def stay_behind(
    config: ModelConfig, weights: Checkpoint | DrawnWeights, rank: RankWeights, wanted: Container[str]
) -> Weights:
    """The wanted weights of a rank by reference, their recipes tried."""
    operands = operands_of(config, weights, rank, wanted)
    if isinstance(weights, Checkpoint):
        found, paths = Weights(weight_files(weights), (), operands), weights.files
    else:
        found, paths = Weights((), weights.tensors, operands), []
    check_recipes(paths, found)
    return found


def _check_sizes(layer: int, tokens: int, config: ModelConfig) -> None:
    """Raise ModelError for a layer that the model does not have, or a prompt that leaves no room for a token."""
    layers = len(config.blocks)
    if layer >= layers:
        raise ModelError(f"--layer {layer}: this model has layers 0 to {layers - 1}")
    if tokens >= config.context:
        raise ModelError(
            f"--tokens {tokens}: this model takes {config.context} positions, and a token follows the prompt"
        )


def _bundle_generation(options: argparse.Namespace, config: ModelConfig) -> None:
    """All launches of the prompts and of the tokens that greedy choice appends to each."""
    tokenizer = Tokenizer(options.model, config.vocab_size)
    texts, most = options.prompt or [FIRST_PROMPT], options.max_new_tokens or _TOKENS
    prompts = [Prompt(text, tuple(encode_prompt(text, tokenizer, config))) for text in texts]
    weights = open_checkpoint(options.model, config)
    with json_document(options.json, _outputs(options, weights.files), "bundle") as contents:
        (rank,) = shard_weights(config, weights, 1, after_layer=weights.release, dtype=options.dtype)
        device = GenerationDevice(options.target, rank.arrays)
        longest = max(positions_needed(len(each.ids), most, config) for each in prompts)
        positions = bucket_length(longest, config.context)
        with working(lambda: f"{device.launches} launches"):
            references = stay_behind(config, weights, rank, rank.arrays)
            model = KernelModel(config, [rank], device, positions, progress=device.layer_done)
            for number, prompt in enumerate(prompts):
                for token, step in _steps(model, device, number, prompt, most, config):
                    margin = _margin(step)
                    places = HEAD_RESULTS.index(VALUES), HEAD_RESULTS.index(TOKENS)
                    device.end_step(*places, token, tokenizer.decode([token]), margin)
        written = device.write(options.out, references, tuple(prompts))
        show(written.report())
        contents.update(written.document())


def _steps(
    model: KernelModel, device: GenerationDevice, number: int, prompt: Prompt, most: int, config: ModelConfig
) -> Iterator[tuple[int, StepOutput]]:
    """The tokens that follow a prompt, and the steps that choose them."""
    ids = list(prompt.ids)
    for place in range(most):
        device.begin_step(number, place)
        (step,) = model.decode([ids[-1]], [len(ids) - 1]) if place else model.prefill([ids])
        ids.append(step.likeliest)
        yield ids[-1], step
        if ids[-1] in config.eos_token_ids or len(ids) >= config.context:
            return


def _margin(step: StepOutput) -> float:
    """How far the second largest logit is below the largest."""
    assert step.logits is not None
    second, first = np.partition(step.logits.astype(np.float64), -2)[-2:]
    return float(first - second)
