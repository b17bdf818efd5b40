"""Files, weights and options that `nkw imagine` and `nkw plan` refuse in one sentence, each with an accepted twin."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from model.commands.imagine.command import list_requests, read_noise
from model.errors import ModelError
from model.runners.backends import ReferenceBackend
from model.runners.denoise import MOST_IMAGES, ImageRequest, ImageRunner, Sampling, check_count
from model.runners.pipelines import open_pipeline
from nkw.commands import main
from tests.model.denoiser_oracles import DIT
from tests.model.pipeline_folders import edit
from tests.model.pipeline_oracles import CLIP, LATENT_SHAPE, T5
from tests.model.test_denoise import folder, folders  # noqa: F401
from tests.model.test_imagine import refuse

QUICK = ["--steps", "1", "--backend", "numpy"]


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/vocab.json",
        "text_encoder/model.safetensors",
    ],
)
def test_outputs_replace_no_file_of_the_model(
    name: str,
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = (folder / name).read_bytes()
    words = ["--model", str(folder), *QUICK]
    for option in ("--out", "--json"):
        assert "this command reads that file" in refuse(capsys, *words, option, str(folder / name))
    assert (folder / name).read_bytes() == content
    assert main(["imagine", *words, "--out", str(folder / "new.png")]) == 0


def test_plans_replace_no_file_of_the_model(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = folder / "vae" / "config.json"
    content = config.read_bytes()
    assert main(["plan", str(folder), "--json", str(config)]) == 2
    assert "this command reads that file" in capsys.readouterr().err
    assert config.read_bytes() == content
    assert main(["plan", str(folder), "--json", str(tmp_path / "plan.json")]) == 0


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


def test_limits_the_images_of_a_batch(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    options = Namespace(prompt=["a", "b"], images=MOST_IMAGES // 2, seed=0, negative_prompt="")
    assert len(list_requests(options)) == MOST_IMAGES
    check_count(MOST_IMAGES)
    with pytest.raises(ModelError, match="1025 images in one batch"):
        check_count(MOST_IMAGES + 1)
    words = ["--model", str(folders["flow"]), *QUICK]
    assert "at most 1,024" in refuse(capsys, "a", *words, "--images", str(10**12))
    assert main(["plan", str(folders["flow"]), "--batch", str(10**9)]) == 2
    assert "at most 1,024" in capsys.readouterr().err


def test_refuses_a_batch_that_exceeds_the_memory(
    folders: dict[str, Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    needed = runner._count_bytes(1)
    monkeypatch.setattr("model.errors.memory_bytes", lambda: needed)
    assert runner.draw([ImageRequest("a")], Sampling(1)).images.shape == (1, 16, 16, 3)
    monkeypatch.setattr("model.errors.memory_bytes", lambda: needed - 1)
    with pytest.raises(ModelError, match="a batch of 1 image takes"):
        runner.draw([ImageRequest("a")], Sampling(1))


def make_header(text: bytes) -> bytes:
    """Return a .npy file that ends after a header of this text."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text


def make_archive() -> bytes:
    """Return an .npz file."""
    file = io.BytesIO()
    np.savez(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 no archive",
        make_archive(),
        make_header(b"{'descr':'<f4'"),
        make_header(b"(" * 9000),
        make_header(b"{'descr':'<f4','fortran_order':False,'shape':(%d,)}\n" % 10**40),
        make_header(b"{'descr':'<f4','fortran_order':False,'shape':(%d,)}\n" % 10**15),
        make_header(b"{'descr':'|O','fortran_order':False,'shape':(1,)}\n"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    ],
)
def test_refuses_damaged_latents(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "noise.npy"
    np.save(path, np.ones((1, *LATENT_SHAPE), ">f8"))
    assert read_noise(path).shape == (1, *LATENT_SHAPE)
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"it is no \.npy file of numbers"):
        read_noise(path)


def test_does_not_wait_for_a_pipe_of_latents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "noise.npy")
    with pytest.raises(ModelError, match="it is not a regular file"):
        read_noise(tmp_path / "noise.npy")


def test_refuses_latents_above_float32(folders: dict[str, Path]) -> None:  # noqa: F811
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    noise = np.ones((1, *LATENT_SHAPE))
    assert runner.draw([ImageRequest("a")], Sampling(1), noise).passes
    with pytest.raises(ModelError, match="finite numbers of float32"):
        runner.draw([ImageRequest("a")], Sampling(1), noise * 1e300)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "-"], "images are not written to stdout"),
        (["--out", ".", "--images", "2"], "it is a folder"),
        (["--out", "/", "--images", "2"], "it is a folder"),
    ],
)
def test_refuses_outputs_without_a_file(
    words: list[str],
    message: str,
    folders: dict[str, Path],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refuse(capsys, "--model", str(folders["flow"]), *QUICK, *words)
    assert not Path("-").exists()


@pytest.mark.parametrize("name", ["tokenizer", "scheduler", "vae"])
def test_refuses_subfolders_that_are_links_out_of_the_folder(name: str, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    shutil.move(folder / name, folder / "moved")
    (folder / name).symlink_to(folder / "moved")
    open_pipeline(folder)
    shutil.move(folder / "moved", tmp_path / "moved")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "moved")
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        open_pipeline(folder)


def test_names_a_damaged_schedule_once(folder: Path) -> None:  # noqa: F811
    path = folder / "scheduler" / "scheduler_config.json"
    open_pipeline(folder)
    path.unlink()
    with pytest.raises(ModelError) as caught:
        open_pipeline(folder)
    assert caught.value.message == f"{path} is missing"


@pytest.mark.parametrize(
    ("name", "config", "class_name"),
    [
        ("transformer", {"_class_name": "DiTTransformer2DModel"} | DIT, "DiTTransformer2DModel"),
        ("transformer", {"_class_name": "Transformer2DModel"} | DIT, "Transformer2DModel"),
        ("text_encoder", T5, "T5EncoderModel"),
        (
            "text_encoder",
            CLIP | {"architectures": ["CLIPTextModelWithProjection"], "projection_dim": 32},
            "CLIPTextModelWithProjection",
        ),
    ],
)
def test_refuses_configs_of_another_class(
    name: str,
    config: dict[str, object],
    class_name: str,
    folder: Path,  # noqa: F811
) -> None:
    named = {"transformer": "PixArtTransformer2DModel", "text_encoder": "CLIPTextModel"}[name]
    path = folder / name / "config.json"
    open_pipeline(folder, is_planned=True)
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        open_pipeline(folder, is_planned=True)
    assert caught.value.message == (
        f"{path}: a {class_name}; model_index.json of this PixArtAlphaPipeline names a {named}, so one of the files is "
        "of another model"
    )


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("vae/config.json", {"latent_channels": 5}, "latent images have 4 channels"),
        ("vae/config.json", {"out_channels": 4}, "vae decodes images of 4 channels; images need 3"),
        ("transformer/config.json", {"caption_channels": 48}, "takes encoded texts of 48 elements"),
    ],
)
def test_plans_refuse_components_of_different_sizes(
    file: str,
    fields: dict[str, int],
    message: str,
    folder: Path,  # noqa: F811
) -> None:
    open_pipeline(folder, is_planned=True)
    edit(folder / file, **fields)
    with pytest.raises(ModelError, match=message):
        open_pipeline(folder, is_planned=True)
