"""Files, weights and options that `nkw imagine` and `nkw plan` refuse in one sentence, each with an accepted twin."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from model.errors import ModelError
from model.runners.backends import ReferenceBackend
from model.runners.denoise import ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from nkw.commands import main
from tests.model.pipeline_oracles import LATENT_SHAPE
from tests.model.test_denoise import edit, folder, folders  # noqa: F401
from tests.model.test_imagine import refuse

QUICK = ["--steps", "1", "--backend", "numpy"]


def set_first_number(path: Path, number: float) -> None:
    """Set the first number of every float32 tensor of a .safetensors file."""
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for name, tensor in json.loads(content[8:start]).items():
        if name != "__metadata__":
            assert tensor["dtype"] == "F32"
            struct.pack_into("<f", content, start + tensor["data_offsets"][0], number)
    path.write_bytes(content)


@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize(
    ("file", "component"),
    [
        ("text_encoder/model.safetensors", "text encoder"),
        ("transformer/diffusion_pytorch_model.safetensors", "denoiser"),
        ("vae/diffusion_pytorch_model.safetensors", "autoencoder"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_refuses_weights_that_are_not_finite(
    file: str,
    component: str,
    number: float,
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = folder / "image.png"
    words = ["--model", str(folder), *QUICK, "--out", str(image)]
    set_first_number(folder / file, 0.01)
    assert main(["imagine", *words]) == 0
    image.unlink()
    set_first_number(folder / file, number)
    assert f"the {component} computes numbers that are not finite" in refuse(capsys, *words)
    assert not image.exists()


def test_refuses_a_batch_that_exceeds_the_memory(
    folders: dict[str, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    needed = runner._count_bytes(1)
    monkeypatch.setattr("model.errors.memory_bytes", lambda: needed)
    assert runner.draw([ImageRequest("a")], Sampling(1)).images.shape == (1, 16, 16, 3)
    monkeypatch.setattr("model.errors.memory_bytes", lambda: needed - 1)
    with pytest.raises(ModelError, match="a batch of 1 images takes"):
        runner.draw([ImageRequest("a")], Sampling(1))


def test_refuses_latents_above_float32(folders: dict[str, Path]) -> None:  # noqa: F811
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    noise = np.ones((1, *LATENT_SHAPE))
    assert runner.draw([ImageRequest("a")], Sampling(1), noise).passes
    with pytest.raises(ModelError, match="finite numbers of float32"):
        runner.draw([ImageRequest("a")], Sampling(1), noise * 1e300)
