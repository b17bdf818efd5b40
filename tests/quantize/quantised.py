"""Numbers that a scheme gives the weights of a folder, computed in this process without files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from model.commands.quantize.command import read_texts
from model.families import compose, load_config
from model.loading.checkpoint import open_checkpoint
from model.quantize.linears import select_linears
from model.quantize.process import Settings, quantise
from model.quantize.rounding import Rounded
from model.quantize.schemes import SCHEMES
from nkw.commands import build_parser


def widen_all(model: Path, name: str, texts: Path) -> dict[str, np.ndarray]:
    """Return all weights of the quantised model in float32, by the rounding of the scheme, before they are stored."""
    words = ["quantize", str(model), "--scheme", name, "--calibration", str(texts), "--out", "unused"]
    config = load_config(model)
    checkpoint = open_checkpoint(model, config)
    weights = {key: np.asarray(weight).astype(np.float32) for key, weight in checkpoint.items()}

    def keep(key: str, weight: Rounded | np.ndarray) -> None:
        weights[key] = weight.widen() if isinstance(weight, Rounded) else weight

    network = compose(config)
    calibration, _ = read_texts(build_parser(words).parse_args(words), config)
    quantise(network, checkpoint, select_linears(network), Settings(SCHEMES[name]), keep, calibration)
    return weights
