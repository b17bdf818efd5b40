"""`nkw bundle` for a model: records the launches of a layer or of a generation on the simulator.

A bundle is a folder that carries kernel launches to a chip: operands, expected results, predicted times and a program
that compares them. Weights are stored in it, or taken there from the checkpoint by recipes (`recipe.py`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Container
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from model.commands.bundle.random_weights import DrawnWeights, keep_layer
from model.commands.bundle.recipe import build_operands, list_weight_files
from model.commands.bundle.single_step import bundle_section, report_bundle
from model.commands.generate.prompts import encode_prompt
from model.commands.greedy import generate_greedily
from model.commands.options.inputs import FIRST_PROMPT
from model.config import ModelConfig
from model.config.folder import list_model_files
from model.device import choose_lnc
from model.device.bundling import (
    BundlingDevice,
    GenerationDevice,
    Prompt,
    Weights,
    check_folder,
    check_recipes,
)
from model.engine.sampler import require_logits
from model.errors import ModelError
from model.families import TEXT, compose, list_single_step_tasks, load_config
from model.layers.head import HEAD_RESULTS, TOKENS, VALUES
from model.layers.launch import Phase
from model.llm.loaded import LoadedModel
from model.loading.checkpoint import INDEX, SINGLE
from model.loading.tokenizer import Tokenizer
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.bucket_length import bucket_length, count_positions_needed
from model.runners.contiguous import KernelModel
from model.sampling import StepOutput
from nkw.files import Outputs, json_document
from nkw.terminal import working

_TOKENS = 8
"""Default number of tokens of the prompt of a layer, and of a generation."""
MOST_BYTES = 8_000_000
"""Most bytes of weights in the bundle of a layer; an instance reads larger weights from the model's folder."""


def bundle_command(options: argparse.Namespace) -> int:
    """Write the bundle that the options ask for, and return the exit status 0.

    Raises:
        ModelError: Options or files are refused, before the model runs.
        InvalidArgument: The document of --json cannot be written.
    """
    if options.tp > 1:
        raise ModelError("a bundle holds launches of one rank; leave --tp out")
    _check_options(options)
    lnc = choose_lnc(options.target, options.lnc)
    check_folder(options.out)
    config = load_config(options.model, TEXT, *list_single_step_tasks())
    if not isinstance(config, ModelConfig):
        bundle_section(options, config, lnc)
    elif options.layer is not None:
        _bundle_layer(options, config, lnc)
    else:
        if lnc > 1:
            raise ModelError(
                f"{lnc} physical cores of a rank: the launches of a generation run in one process, and some of their "
                "kernels have one core; give --lnc 1, or --layer"
            )
        _bundle_generation(options, config)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Check that the options --tokens, --prompt and --max-new-tokens go together with --layer.

    Raises:
        ModelError: --tokens is given without --layer, or --prompt or --max-new-tokens with it.
    """
    excluded = ("tokens",) if options.layer is None else ("prompt", "max_new_tokens")
    for name in excluded:
        if getattr(options, name) is not None:
            preposition = "with" if options.layer is None else "without"
            raise ModelError(
                f"--{name.replace('_', '-')} goes {preposition} --layer; leave one of the two out"
            )


def _open_document(options: argparse.Namespace, model: LoadedModel) -> AbstractContextManager[dict[str, Any]]:
    """Return the context that yields the document of --json.

    Raises:
        InvalidArgument: The document would replace a file of the model, or cannot be written.
    """
    outputs = Outputs(lambda: [*list_model_files(options.model), *model.checkpoint.files])
    return json_document(options.json, outputs, "bundle")


def _bundle_layer(options: argparse.Namespace, config: ModelConfig, lnc: int) -> None:
    """Write a bundle of the launches of one layer, in a prompt and in the first decode step.

    Weights are drawn at random if the folder has no checkpoint. Drawn weights, and weights of more than `MOST_BYTES`,
    are bundled as recipes; others are stored in the bundle.

    Args:
        options: The parsed options.
        config: The model.
        lnc: Number of physical cores of the rank.

    Raises:
        ModelError: The layer or the prompt does not fit the model, or a weight cannot be bundled.
    """
    tokens, layer = options.tokens or _TOKENS, options.layer
    _check_sizes(layer, tokens, config)
    if any(os.path.lexists(options.model / name) for name in (SINGLE, INDEX)):
        prompt_ids = Tokenizer(options.model, config.vocab_size).encode(FIRST_PROMPT)
        model = LoadedModel.open(options.model, options.dtype, config, options.target)
        if not prompt_ids:
            raise ModelError("the prompt has no tokens")
    else:
        config, layer = keep_layer(config, layer), 0
        model = LoadedModel(options.model, config, DrawnWeights(config), options.dtype)
        prompt_ids = list(range(min(tokens, config.vocab_size)))
    ids = list(islice(cycle(prompt_ids), tokens))
    with _open_document(options, model) as contents:
        (rank,) = model.load_shards(Mesh())
        names = {
            name
            for sublayer in compose(config).blocks[layer]
            for weight in sublayer.weights
            for name in weight.describe(rank.shard, rank.dtypes)
        }
        arrays = {name: array for name, array in rank.arrays.items() if name in names}
        if model.checkpoint.files and sum(array.nbytes for array in arrays.values()) <= MOST_BYTES:
            arrays = {}
        device = BundlingDevice(options.target, layer, arrays, lnc)
        positions = bucket_length(len(ids) + 1, config.context)
        with working(lambda: f"{device.phase}, {device.launches} launches of layer {options.layer}"):
            references = reference_weights(model, rank, arrays) if arrays else None
            kernels = KernelModel(config, [rank], device, positions, progress=device.layer_done, lnc=lnc)
            device.phase = Phase.prefill.value
            (step,) = kernels.prefill([ids])
            device.phase = Phase.decode.value
            kernels.decode([step.likeliest], [len(ids)])
        report_bundle(device.write(options.out, references), contents)


def reference_weights(model: LoadedModel, rank: RankWeights, names: Container[str]) -> Weights:
    """Return the arrays in `names` as recipes, after each recipe was compared with the loaded array.

    Args:
        model: The loaded model.
        rank: Weights of the rank.
        names: Names of the rank's arrays.

    Raises:
        ModelError: A weight has no recipe, or its recipe does not give the loaded array.
    """
    checkpoint = model.checkpoint
    drawn = checkpoint.tensors.values() if isinstance(checkpoint, DrawnWeights) else ()
    operands = build_operands(model.config, checkpoint, rank, names)
    references = Weights(list_weight_files(checkpoint), tuple(drawn), operands)
    check_recipes(checkpoint.files, references)
    return references


def _check_sizes(layer: int, tokens: int, config: ModelConfig) -> None:
    """Check that the model has a layer, and that a prompt of `tokens` tokens leaves room for one more.

    Raises:
        ModelError: The layer is missing, or the prompt fills the context.
    """
    layers = len(config.blocks)
    if layer >= layers:
        raise ModelError(f"--layer {layer}: this model has layers 0 to {layers - 1}")
    if tokens >= config.context:
        raise ModelError(
            f"--tokens {tokens}: this model takes {config.context} positions, and a token follows the prompt"
        )


def _bundle_generation(options: argparse.Namespace, config: ModelConfig) -> None:
    """Write a bundle of all launches of prompts, and of the decode steps that greedy sampling makes after each.

    Raises:
        ModelError: A prompt is refused, or a weight cannot be bundled.
    """
    tokenizer = Tokenizer(options.model, config.vocab_size)
    texts, most = options.prompt or [FIRST_PROMPT], options.max_new_tokens or _TOKENS
    prompts = [Prompt(text, tuple(encode_prompt(text, tokenizer, config))) for text in texts]
    model = LoadedModel.open(options.model, options.dtype, config, options.target)
    with _open_document(options, model) as contents:
        (rank,) = model.load_shards(Mesh())
        device = GenerationDevice(options.target, rank.arrays)
        longest = max(count_positions_needed(len(prompt.ids), most, config) for prompt in prompts)
        positions = bucket_length(longest, config.context)
        values, tokens = HEAD_RESULTS.index(VALUES), HEAD_RESULTS.index(TOKENS)
        with working(lambda: f"{device.launches} launches"):
            references = reference_weights(model, rank, rank.arrays)
            kernels = KernelModel(config, [rank], device, positions, progress=device.layer_done)
            for number, prompt in enumerate(prompts):
                for step in generate_greedily(
                    kernels, config, prompt.ids, most, partial(device.begin_step, number)
                ):
                    token = step.likeliest
                    device.end_step(values, tokens, token, tokenizer.decode([token]), _compute_margin(step))
        report_bundle(device.write(options.out, references, tuple(prompts)), contents)


def _compute_margin(step: StepOutput) -> float:
    """Return the difference between the largest and the second largest logit of a step."""
    second, first = np.partition(require_logits(step.logits).astype(np.float64), -2)[-2:]
    return float(first - second)
