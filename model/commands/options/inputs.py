"""Options of inputs: model folders, configs, prompts, recordings, and lengths of texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from model.commands.options.readers import count, seed
from model.loading.shipped import PRETRAINED, find_config_path, find_model_path
from nkw.options import Rows


class StoreModel(argparse.Action):
    """Argparse action that stores a model given as a positional word or by --model, and refuses both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the model in `namespace.model`; without the positional word, keep the model of --model.

        Raises:
            SystemExit: Two models are given (status 2).
        """
        if values is None:
            return
        if namespace.model != parser.get_default("model"):
            parser.error(f"two models, {namespace.model} and {values}; a command takes one: give one of them")
        namespace.model = values


FIRST_PROMPT = "Once upon a time"

ROWS: Rows = {
    "model": dict(
        metavar="FOLDER", type=find_model_path, help="Hugging Face folder, or a model that comes along"
    ),
    "model=SERVED": dict(
        metavar="MODEL",
        nargs="?",
        type=find_model_path,
        action=StoreModel,
        help="the same as --model, as vllm serve takes it",
    ),
    "--model": dict(
        metavar="DIR",
        type=find_model_path,
        default=PRETRAINED,
        help="Hugging Face folder, or a model that comes along: stories (default), stories-moe, with experts, or "
        "stories-mask, which replaces masks",
    ),
    "config": dict(
        metavar="CONFIG",
        type=find_config_path,
        help="config.json, a folder that holds one, or the name or Hugging Face id of a published model, such as "
        "llama-3.1-70b",
    ),
    "--as": dict(
        metavar="FAMILY",
        dest="family",
        help="plan the config under this model_type, such as qwen3_moe, whatever its own: for a model that no family "
        "reads; what the family ignores is said",
    ),
    "--prompt": dict(
        metavar="TEXT", action="append", help=f"text to continue; may be repeated (default: {FIRST_PROMPT!r})"
    ),
    "--prompt-file": dict(metavar="FILE", help="one text to continue on each line; - is stdin"),
    "--chat": dict(
        action="store_true", help="each text is a user's message, put into the model's chat template"
    ),
    "--system": dict(metavar="TEXT", help="the system message before it, with --chat"),
    "--prompt=N": dict(
        metavar="N",
        type=count,
        help="tokens of a prompt (default: 896, or what the context leaves; of a Whisper 4, beside its window)",
    ),
    "--tokens": dict(
        metavar="T",
        type=count,
        help=f"with --layer, tokens of the prompt, {FIRST_PROMPT!r} over and over (default: 8)",
    ),
    "--layer": dict(
        metavar="N", type=seed, help="this layer alone; the first is 0 (default: the whole model)"
    ),
    "file": dict(metavar="FILE.wav", type=Path, help="a recording: 16 kHz, one channel, PCM"),
    "--language": dict(
        metavar="NAME", help="of the speech, such as en (default: that of generation_config.json)"
    ),
    "--timestamps": dict(
        action="store_true",
        help="write segments with the seconds in which they are said; a window begins where the last segment ended",
    ),
}
