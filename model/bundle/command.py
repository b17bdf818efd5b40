"""`nkw bundle` for a layer of a model: the simulated model takes a prompt and one token, and its launches are kept."""

from __future__ import annotations

import argparse
from itertools import cycle, islice

from model.arguments import FIRST_PROMPT
from model.cache import bucket_length
from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.device.bundling import BundlingDevice, check_folder
from model.errors import ModelError
from model.families import load_config
from model.folder import model_files
from model.kernel_model import KernelModel
from model.layers.launch import Phase
from model.tokenizer import Tokenizer
from model.weights import shard_weights
from simulate.files import Outputs, json_document
from simulate.terminal import show, working


def bundle_command(options: argparse.Namespace) -> int:
    """Write the bundle; everything that can be refused before the model runs is refused before."""
    if options.tp > 1:
        raise ModelError("a bundle holds launches of one rank; leave --tp out")
    check_folder(options.out)
    config = load_config(options.model)
    _check_sizes(options, config)
    encoded = Tokenizer(options.model, config.vocab_size).encode(FIRST_PROMPT)
    if not encoded:
        raise ModelError("the prompt has no tokens")
    ids = list(islice(cycle(encoded), options.tokens))
    weights = open_checkpoint(options.model, config)
    outputs = Outputs(lambda: [*model_files(options.model), *weights.files])
    with json_document(options.json, outputs, "bundle") as contents:
        ranks = shard_weights(config, weights, 1, taken=weights.let_go, dtype=options.dtype)
        device = BundlingDevice(options.target, options.layer)
        positions = bucket_length(len(ids) + 1, config.context)
        with working(lambda: f"{device.phase}, {device.launches} launches of layer {options.layer}"):
            model = KernelModel(config, ranks, device, positions, progress=device.layer_done)
            device.phase = Phase.prefill.value
            (step,) = model.prefill([ids])
            device.phase = Phase.decode.value
            model.decode([step.likeliest], [len(ids)])
        written = device.write(options.out)
        show(written.report())
        contents.update(written.document())
    return 0


def _check_sizes(options: argparse.Namespace, config: ModelConfig) -> None:
    """Raise ModelError for a layer that the model does not have, or a prompt that leaves no room for a token."""
    layers = len(config.blocks)
    if options.layer >= layers:
        raise ModelError(f"--layer {options.layer}: this model has layers 0 to {layers - 1}")
    if options.tokens >= config.context:
        raise ModelError(
            f"--tokens {options.tokens}: this model takes {config.context} positions, and a token follows the prompt"
        )
