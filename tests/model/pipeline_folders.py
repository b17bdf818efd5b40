"""Helpers for tests of pipelines: shapes of a folder's tensors, images of a folder, and their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.fields import Fields
from model.errors import ModelError
from model.families.registry import FAMILIES, compose, read
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.denoise import Guidance, ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from tests.model import explain_oracles


def list_shapes(configs: Mapping[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors of each component that our networks read.

    Args:
        configs: config.json of the components by name.
        folder: Where files may be written.
    """
    keys = {row.architecture: key for key, row in FAMILIES.items()}
    shapes = {}
    for name, config in configs.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        key = keys[config.get("_class_name") or config["architectures"][0]]
        shapes[name] = compose(read(key, Fields(path))).list_tensor_shapes()
    return shapes


def write_pipelines(parent: Path) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each family of denoisers, and return their paths."""
    folders: dict[str, Path] = {}
    for name, (module, case_name) in explain_oracles.CASES.items():
        case = module.CASES[case_name]
        folders[name] = module.write_pipeline(parent / name, case, list_shapes(case.configs, parent))
    return folders


def draw_images(
    folder: Path,
    requests: Sequence[ImageRequest],
    steps: int,
    guidance: float,
    noise: np.ndarray,
    dtype: str = "float32",
    ranks: int = 0,
    mode: Guidance = Guidance.batched,
) -> np.ndarray:
    """Return images from given noise: by the numpy model for 0 ranks, else by kernels of trn2."""
    from model.device import SimulatedDevice

    backend = KernelBackend(SimulatedDevice("trn2", ranks)) if ranks else ReferenceBackend()
    runner = ImageRunner(open_pipeline(folder, dtype).resize(*noise.shape[2:]), backend)
    return runner.draw(requests, Sampling(steps, guidance, mode), noise).images


def check_images(images: np.ndarray, recorded: np.ndarray) -> None:
    """Check that images of float32 differ from recorded ones by rounding only."""
    errors = np.abs(images.astype(int) - recorded)
    # Sums in another order move a number by some 2^-20 of the largest one, which rounds 1 byte in 1,000 otherwise.
    assert errors.max() <= 1 and (errors > 0).mean() < 0.01


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; ... removes one."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: entry for name, entry in content.items() if entry is not ...}))


def check_refusal(
    folder: Path, file: str, fields: dict[str, Any], message: str, is_planned: bool = False
) -> None:
    """Check that a folder opens, and is refused in one line with a message once fields of a file are changed."""
    open_pipeline(folder, is_planned=is_planned)
    edit(folder / file, **fields)
    with pytest.raises(ModelError) as caught:
        open_pipeline(folder, is_planned=is_planned)
    assert message in str(caught.value) and "\n" not in str(caught.value)
