"""Pipelines of diffusers: how the components of a class of pipelines become images.

`PIPELINES` has one entry for each class of pipelines; `open_pipeline` opens a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model.config.folder import PIPELINE_INDEX
from model.errors import ModelError
from model.loading.pipeline import PipelineFolder
from model.runners.pipelines.dit import open_dit
from model.runners.pipelines.flux import open_flux
from model.runners.pipelines.pipeline import ImagePipeline
from model.runners.pipelines.pixart import open_pixart
from model.runners.pipelines.sd3 import open_sd3

PIPELINES: dict[str, Callable[[PipelineFolder, str], ImagePipeline]] = {
    "DiTPipeline": open_dit,
    "FluxPipeline": open_flux,
    "PixArtAlphaPipeline": open_pixart,
    "PixArtSigmaPipeline": open_pixart,
    "StableDiffusion3Pipeline": open_sd3,
}
"""Function that opens a folder with a dtype of activations, by the class in model_index.json."""


def open_pipeline(folder: Path | str, dtype: str = "float32", is_planned: bool = False) -> ImagePipeline:
    """Open a folder of a diffusion model; weights are mapped, not read.

    Args:
        folder: A folder in the layout of diffusers.
        dtype: Dtype of activations: float32, bfloat16 or auto.
        is_planned: Whether only dry runs follow, for which the folder needs neither weights nor tokenizers.

    Raises:
        ModelError: A file is missing or damaged, or the folder describes what no layer computes.
    """
    opened = PipelineFolder.open(Path(folder), is_planned)
    if opened.class_name not in PIPELINES:
        raise ModelError(
            f"{opened.path / PIPELINE_INDEX}: _class_name: {opened.class_name:.60} is not known; known are "
            f"{', '.join(PIPELINES)}",
            "NKW-MODEL-PIPELINE",
        )
    return PIPELINES[opened.class_name](opened, dtype)
