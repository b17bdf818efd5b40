"""Train a small image model of coloured shapes on a CPU, within budgets of core-minutes.

    python -m tools.train.shapes autoencoder --folder DIR --state DIR --core-minutes 32
    python -m tools.train.shapes text --folder DIR
    python -m tools.train.shapes denoiser --folder DIR --state DIR --core-minutes 200
    python -m tools.train.shapes evaluate --folder DIR

A run that is stopped continues from the state folder; the text encoder takes a minute and keeps none. The autoencoder
sees new pictures in every batch, the denoiser 65,536 pictures that are encoded once. Needs torch 2.9, diffusers
and transformers.
"""

import argparse
from pathlib import Path

from diffusers import AutoencoderKL, PixArtTransformer2DModel
from torch import nn
from transformers import T5EncoderModel

from tools.shapes.captions import list_held_out_captions
from tools.train.shapes.autoencoder import train_autoencoder
from tools.train.shapes.denoiser import describe_verdicts, judge_captions, train_denoiser
from tools.train.shapes.folder import create_folder, load_tokenizer
from tools.train.shapes.text import train_text_encoder


def evaluate(folder: Path) -> None:
    """Print, for several numbers of steps, how many pictures of held-out captions are right."""
    components = {"transformer": PixArtTransformer2DModel, "text_encoder": T5EncoderModel}
    module = nn.ModuleDict(
        {name: component.from_pretrained(folder / name).float() for name, component in components.items()}
    )
    autoencoder = AutoencoderKL.from_pretrained(folder / "vae").float()
    for steps in (50, 20, 8, 4):
        verdicts = judge_captions(
            module, autoencoder, load_tokenizer(folder), list_held_out_captions(), steps=steps
        )
        print(steps, describe_verdicts(verdicts), flush=True)


def main() -> None:
    """Run the training of a component of the model, or evaluate a trained folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("part", choices=("autoencoder", "text", "denoiser", "evaluate"))
    parser.add_argument("--folder", type=Path, required=True, help="the model folder")
    parser.add_argument("--state", type=Path, help="folder of the training's state and log")
    parser.add_argument(
        "--core-minutes", type=float, default=60.0, help="processor time of the training, all runs together"
    )
    options = parser.parse_args()
    if options.part == "evaluate":
        evaluate(options.folder)
        return
    if options.part == "text":
        create_folder(options.folder)
        train_text_encoder(options.folder)
        return
    if options.state is None:
        parser.error("--state is needed for a training")
    create_folder(options.folder)
    train = train_autoencoder if options.part == "autoencoder" else train_denoiser
    train(options.folder, options.state, options.core_minutes)


if __name__ == "__main__":
    main()
