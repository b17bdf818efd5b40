"""Servers of FLUX models: sizes that are multiples of a patch, one pass a step, and no negative prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.runners.backends import ReferenceBackend
from model.runners.denoise import ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from tests.model.test_flux_pipeline import folders  # noqa: F401
from tests.serve.conftest import ServedImages, serving_images
from tests.serve.test_ends import metric
from tests.serve.test_images import PATH, PROMPT, request_images
from tests.serve.test_refusals import posted

STEPS = 2


@pytest.fixture(scope="module")
def flux(folders: dict[str, Path]) -> Iterator[ServedImages]:  # noqa: F811
    """Yield a server of a tiny FLUX model with distilled guidance, in NumPy."""
    with serving_images("--model", str(folders["dev"]), "--backend", "numpy") as served:
        yield served


def test_draws_a_size_that_is_a_multiple_of_a_patch(
    flux: ServedImages,
    folders: dict[str, Path],  # noqa: F811
) -> None:
    before = metric(flux, "nkw_denoiser_passes_total")
    (image,) = request_images(flux, model="dev", size="12x8", seed=3, num_inference_steps=STEPS)
    runner = ImageRunner(open_pipeline(folders["dev"]).with_image_size(8, 12), ReferenceBackend())
    (expected,) = runner.draw([ImageRequest(PROMPT, 3)], Sampling(STEPS)).images
    np.testing.assert_array_equal(image, expected)
    assert metric(flux, "nkw_denoiser_passes_total") - before == STEPS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"size": "10x8"},
            "size: '10x8' is no size of this model; width and height are multiples of 4 up to",
        ),
        ({"size": "12x8", "negative_prompt": "a cat"}, "a negative prompt needs two passes of guidance"),
    ],
)
def test_refuses_before_the_queue(flux: ServedImages, fields: dict[str, str], message: str) -> None:
    failed = 'nkw_image_requests_total{model_name="dev",outcome="failed"}'
    before = metric(flux, failed)
    status, error = posted(flux, PATH, {"model": "dev", "prompt": PROMPT, **fields})
    assert status == 400 and message in error["message"]
    assert metric(flux, failed) == before
