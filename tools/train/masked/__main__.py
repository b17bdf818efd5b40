"""Train the masked-diffusion text model of model/pretrained/stories-mask on a CPU, within a budget of core-minutes.

    python -m tools.train.masked train --corpus DIR --folder DIR --state DIR --core-minutes 120
    python -m tools.train.masked bound --corpus DIR --folder DIR
    python -m tools.train.masked quality --corpus DIR --folder DIR

The corpus is that of `tools.train`. A run that is stopped continues from the state folder, whose log.csv has the step,
the core-seconds, the loss, the bound of some held-out texts, and the tokens. Needs torch 2.9 or newer (for
torch.optim.Muon), numpy, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.train.corpus import epoch, read
from tools.train.decoder import Dropout
from tools.train.masked.diffusion import MaskedDecoder, draw_masks, estimate_bound
from tools.train.masked.folder import (
    create_folder,
    load_weights,
    read_mask,
    read_sizes,
    save_weights,
    start_from_stories,
)
from tools.train.masked.quality import measure_quality
from tools.train.shapes.budget import Training

_LOGGED_TEXTS, _LOGGED_SAMPLES = 48, 4
"""Held-out texts whose bound the log has, and masks of each."""


def train(options: argparse.Namespace) -> None:
    """Fit the model to the texts of the corpus within a budget, and write its averaged weights to the folder."""
    create_folder(options.folder)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    texts, held_out = (read(options.corpus / f"{name}.txt", tokenizer) for name in ("train", "valid"))
    torch.manual_seed(options.seed)
    sizes, mask = read_sizes(options.folder), read_mask(options.folder)
    model = MaskedDecoder(sizes)
    if options.start_from_stories:
        start_from_stories(model)
    if options.compile:
        model.compute_states = torch.compile(model.compute_states, dynamic=False)
    training = Training(model, options.state, options.core_minutes, options.rate, matrices=True)
    generator = np.random.default_rng([options.seed, training.step])
    masks = torch.Generator().manual_seed(options.seed * 1_000_003 + training.step)
    dropout = Dropout(options.dropout, sizes, generator) if options.dropout else None
    batches: list[torch.Tensor] = []
    tokens = 0

    def compute_loss() -> torch.Tensor:
        nonlocal tokens
        if not batches:
            batches.extend(epoch(texts, options.batch, generator))
        ids, _ = batches.pop()
        weights = draw_masks(*ids.shape, masks)
        tokens += ids.numel()
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(
                ids.masked_fill(weights > 0, mask), ids, weights, dropout(*ids.shape) if dropout else None
            )
        return loss / ids.numel()

    def report() -> str:
        trained = training.use_average()
        model.eval()
        bound = estimate_bound(model, held_out[:_LOGGED_TEXTS], mask, _LOGGED_SAMPLES, seed=1)
        save_weights(model.state_dict(), options.folder)
        model.train()
        model.load_state_dict(trained)
        return f"{bound}, {tokens} tokens in this run"

    training.run(compute_loss, report, every=options.report_every)


def report_bound(options: argparse.Namespace) -> None:
    """Print the variational bound of the held-out texts."""
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    model = MaskedDecoder(read_sizes(options.folder)).eval()
    load_weights(model, options.folder)
    texts = read(options.corpus / "valid.txt", tokenizer)
    bound = estimate_bound(model, texts, read_mask(options.folder), options.samples, options.seed)
    print(
        f"variational bound {bound} nats a token ({len(texts)} texts cut at 256 tokens, {bound.tokens} tokens, "
        f"{options.samples} masks of each, seed {options.seed})"
    )


def report_quality(options: argparse.Namespace) -> None:
    """Print the quality of continuations by number of passes."""
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    texts = read(options.corpus / "valid.txt", tokenizer)[: options.texts]
    length = options.new_tokens
    passes = [
        length // divisor
        for divisor in (16, 8, 4, 2, 1)
        if length // divisor >= length // options.block_length
    ]
    qualities = measure_quality(
        options.folder, texts, length, options.block_length, passes, options.temperature, options.seed
    )
    print("writer            nats a token under stories  repeated 4-grams  tokens")
    for writer, quality in qualities.items():
        print(f"{writer:18}{quality.nats:26.3f}{quality.repeated:18.1%}{quality.tokens:8}")


def main() -> None:
    """Run a training, or report the variational bound of the model or the quality of its texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("part", choices=("train", "bound", "quality"))
    add("--corpus", type=Path, required=True, help="folder with train.txt and valid.txt")
    add("--folder", type=Path, required=True, help="the model folder")
    add("--state", type=Path, help="folder of the training's state and log")
    add("--core-minutes", type=float, default=120.0, help="processor time of the training, all runs together")
    add("--report-every", type=float, default=300.0, help="core-seconds between two lines of the log")
    add("--start-from-stories", action="store_true", help="begin with the weights of stories")
    add(
        "--compile",
        action="store_true",
        help="compile the blocks, which needs a C++ compiler and saves a sixth",
    )
    add("--batch", type=int, default=4096, help="tokens in a step, padding included")
    add("--rate", type=float, default=4e-3, help="peak learning rate")
    add("--dropout", type=float, default=0.0)
    add("--seed", type=int, default=1)
    add("--samples", type=int, default=8, help="masks of each text in the bound")
    add("--texts", type=int, default=24, help="held-out texts whose beginnings are continued")
    add("--new-tokens", type=int, default=96, help="tokens of a continuation")
    add("--block-length", type=int, default=96, help="masks of a block")
    add("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    if options.part == "train" and options.state is None:
        parser.error("--state is needed for a training")
    {"train": train, "bound": report_bound, "quality": report_quality}[options.part](options)


if __name__ == "__main__":
    main()
