"""Images as the bytes of PNG files, with the settings that made them as texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from model.errors import ModelError
from model.runners.denoise import Sampling
from model.runners.pipelines.pipeline import ImagePipeline


def check_pillow() -> None:
    """Raise ModelError if the library that writes PNG files is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ModelError(
            "images are written with Pillow, which is missing: pip install 'nki-workbench[images]'",
            "NKW-IMAGE-EXTRA",
        ) from None


def encode_png(image: np.ndarray, settings: Mapping[str, str]) -> bytes:
    """Return an image, uint8 [rows, columns, 3], as a PNG file with settings as texts."""
    from PIL import Image, PngImagePlugin

    texts = PngImagePlugin.PngInfo()
    for name, text in settings.items():
        texts.add_itxt(name, text)
    content = BytesIO()
    Image.fromarray(image).save(content, "PNG", pnginfo=texts)
    return content.getvalue()


def list_settings(
    pipeline: ImagePipeline,
    sampling: Sampling,
    negative_prompt: str,
    model: str,
    dtype: str,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Return the settings that determine an image beside its prompt and seed.

    Args:
        pipeline: The model for images of one size.
        sampling: How the image is sampled.
        negative_prompt: What the image should not show.
        model: Name of the model.
        dtype: Dtype of activations, as the user named it.
        quantization: Scheme of the denoiser's linear layers; None if they are as in the folder.
    """
    rows, columns = pipeline.image_size
    return {
        "model": model,
        "size": f"{columns}x{rows}",
        "negative_prompt": negative_prompt,
        "steps": sampling.steps,
        "guidance": sampling.guidance,
        "dtype": dtype,
        "quantization": quantization,
    }


def describe_settings(prompts: Sequence[str], settings: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of a PNG: the prompt, the settings as "name: value, …", and the program."""
    listed = ", ".join(
        f"{name}: {setting}" for name, setting in settings.items() if setting not in (None, "")
    )
    return {"prompt": "\n".join(prompts), "settings": listed, "Software": "NKI Workbench"}
