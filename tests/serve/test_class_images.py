"""Servers of DiT models: a prompt is a name or a number of a class, other prompts and sizes are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.runners.backends import ReferenceBackend
from model.runners.denoise import ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from tests.model.test_dit_pipeline import folders  # noqa: F401
from tests.serve.conftest import ServedImages, serving_images
from tests.serve.test_ends import metric
from tests.serve.test_images import PATH, request_images
from tests.serve.test_refusals import posted

BODY: dict[str, Any] = {"model": "ddim", "prompt": "golden retriever", "num_inference_steps": 1}
ADVICE = "give a name in id2label of model_index.json, or a number from 0 to 999"


@pytest.fixture(scope="module")
def classes(folders: dict[str, Path]) -> Iterator[ServedImages]:  # noqa: F811
    """Yield a server of a tiny DiT model with names of classes, in NumPy."""
    with serving_images("--model", str(folders["ddim"]), "--backend", "numpy") as served:
        yield served


@pytest.mark.parametrize("prompt", ["golden retriever", "207"])
def test_draws_images_of_a_class(
    prompt: str,
    classes: ServedImages,
    folders: dict[str, Path],  # noqa: F811
) -> None:
    before = metric(classes, "nkw_denoiser_passes_total")
    images = request_images(classes, model="ddim", prompt=prompt, n=2, size="16x16", seed=3)
    runner = ImageRunner(open_pipeline(folders["ddim"]), ReferenceBackend())
    expected = runner.draw([ImageRequest(prompt, 3), ImageRequest(prompt, 4)], Sampling(2)).images
    np.testing.assert_array_equal(images, expected)
    assert metric(classes, "nkw_denoiser_passes_total") - before == 2 * 2 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": "a red circle"},
            f"'a red circle' is no class of this model; it has 8 names: {ADVICE}",
        ),
        (
            {"prompt": "Cranes"},
            f"'Cranes' is no class of this model; the nearest of its 8 names are 'crane': {ADVICE}",
        ),
        ({"prompt": "1000"}, f"'1000' is no class of this model; it has 8 names: {ADVICE}"),
        ({"size": "32x32"}, "size: '32x32' is no size of this model; its sizes are 16x16"),
        (
            {"negative_prompt": "crane"},
            "a negative prompt needs a text encoder, and this model draws classes, guided away from images of no "
            "class: leave the negative prompt out",
        ),
    ],
)
def test_refuses_before_the_queue(classes: ServedImages, fields: dict[str, str], message: str) -> None:
    failed = 'nkw_image_requests_total{model_name="ddim",outcome="failed"}'
    before = metric(classes, failed)
    status, error = posted(classes, PATH, BODY | fields)
    assert (status, error["message"], error["type"]) == (400, message, "invalid_request_error")
    assert metric(classes, failed) == before
    assert posted(classes, PATH, BODY | {"prompt": "999", "negative_prompt": "", "size": "auto"}) == (200, {})
