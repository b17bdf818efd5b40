"""Pipelines of SD3 and SD3.5: images against diffusers, noise levels, sizes, and malformed folders."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.noise_schedules import read_schedule
from model.runners.backends import ReferenceBackend
from model.runners.denoise import ImageRequest
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.sd3 import StableDiffusion3Pipeline
from nkw.commands import main
from tests.model.pipeline_folders import check_images, check_refusal, draw_images, edit, list_shapes
from tests.model.pipeline_oracles import NEGATIVE_PROMPT, PROMPTS, draw_noise, read_recordings
from tests.model.sd3_oracles import CASES, LATENT_SHAPE, STORED, T5_ROWS, record, write_pipeline

RECORDINGS = read_recordings(STORED)
REQUESTS = [ImageRequest(prompt, 0, NEGATIVE_PROMPT) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each case, and return their paths."""
    parent = tmp_path_factory.mktemp("sd3")
    return {
        name: write_pipeline(parent / name, case, list_shapes(case.configs, parent))
        for name, case in CASES.items()
    }


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the folder with all three text encoders."""
    return Path(shutil.copytree(folders["sd3"], tmp_path / "pipeline"))


def draw(folders: dict[str, Path], name: str, dtype: str = "float32", ranks: int = 0) -> np.ndarray:
    """Return the images of a case: by the numpy model for 0 ranks, else by kernels."""
    case = CASES[name]
    return draw_images(
        folders[name], REQUESTS, case.steps, case.guidance, draw_noise(LATENT_SHAPE), dtype, ranks
    )


@pytest.mark.parametrize("name", CASES)
def test_images_equal_those_of_diffusers(name: str, folders: dict[str, Path]) -> None:
    check_images(draw(folders, name), RECORDINGS[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_recordings_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    from tests.model.sd3_oracles import list_shapes as list_all_shapes

    folder = write_pipeline(tmp_path, CASES[name], list_all_shapes(CASES[name]))
    check_images(record(CASES[name], folder), RECORDINGS[name])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["sd3", "sd3.5", "without t5"])
def test_kernels_draw_the_images_of_diffusers(name: str, ranks: int, folders: dict[str, Path]) -> None:
    check_images(draw(folders, name, ranks=ranks), RECORDINGS[name])


@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("name", ["sd3", "sd3.5"])
def test_bfloat16_is_near_diffusers(name: str, ranks: int, folders: dict[str, Path]) -> None:
    errors = np.abs(draw(folders, name, "bfloat16", ranks).astype(int) - RECORDINGS[name])
    # 2^-9 of numbers around 1 in each of some 20 layers, of which a byte is 2^-7: half a byte on average.
    assert errors.mean() < 2 and errors.max() <= 16


def encode(folder: Path, texts: list[str]) -> dict[str, np.ndarray]:
    """Return the encoded texts of the numpy model."""
    return open_pipeline(folder).encode(texts, ReferenceBackend())


def test_texts_are_clip_rows_then_t5_rows(folders: dict[str, Path]) -> None:
    all_three, without = (encode(folders[name], list(PROMPTS)) for name in ("sd3", "without t5"))
    clip_rows = 16
    assert all_three["text"].shape == without["text"].shape == (2, clip_rows + T5_ROWS, 48)
    assert all_three["pooled"].shape == (2, 12 + 8)
    np.testing.assert_array_equal(all_three["text"][:, :clip_rows], without["text"][:, :clip_rows])
    # The text encoders of 16 and 24 elements stand side by side; zeros fill the 48 elements of T5.
    assert all_three["text"][:, :clip_rows, 39].any() and not all_three["text"][:, :clip_rows, 40:].any()
    assert all_three["text"][:, clip_rows:, 40:].any() and not without["text"][:, clip_rows:].any()


def test_t5_padding_is_not_masked(folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["sd3"])
    assert isinstance(pipeline, StableDiffusion3Pipeline) and pipeline.t5_encoder is not None
    alone = pipeline.t5_encoder.encode(PROMPTS[:1], ReferenceBackend(), masks_padding=True).outputs["x"]
    rows = encode(folders["sd3"], list(PROMPTS[:1]))["text"][:, 16:]
    assert np.abs(rows - alone[..., :48]).max() > 0.01


def test_a_constant_shift_moves_the_last_noise_level_twice(folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["sd3"])
    once = 3 * 0.001 / (1 + 2 * 0.001)
    assert pipeline.plan(5).sigmas[4] == np.float32(3 * once / (1 + 2 * once))
    assert pipeline.plan(1).sigmas.tolist() == [1, 0]
    assert pipeline.schedule.plan(5).sigmas[4] == np.float32(once)
    dynamic = open_pipeline(folders["dynamic shift"])
    np.testing.assert_array_equal(dynamic.plan(5).sigmas, dynamic.schedule.plan(5, 16).sigmas)
    for steps in (0, 1001, 10**12):
        with pytest.raises(ModelError, match=f"steps {steps} must be a whole number from 1"):
            pipeline.plan(steps)


@pytest.mark.parametrize("size", [(4, 4), (28, 28), (4, 28), (16, 24)])
def test_takes_sizes_of_whole_patches(size: tuple[int, int], folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["sd3"])
    assert pipeline.sizes == [(16, 16)]
    resized = pipeline.with_image_size(*size)
    assert resized.image_size == size and resized.sizes == [(16, 16)]
    assert resized.denoiser_config.rows == size[0] * size[1] // 16
    assert resized.denoiser_config.text_rows == 16 + T5_ROWS


@pytest.mark.parametrize("size", [(32, 16), (16, 32), (16, 14), (2, 4)])
def test_refuses_sizes_without_positions(size: tuple[int, int], folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["sd3"])
    message = (
        f"{size[1]}x{size[0]} pixels is no size of this model; width and height are multiples of 4 up to 28"
    )
    with pytest.raises(ModelError, match=message):
        pipeline.with_image_size(*size)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("model_index.json", {"text_encoder": [None, None]}, "text_encoder is missing"),
        (
            "model_index.json",
            {"text_encoder_2": ...},
            "text_encoder_2 is missing; StableDiffusion3Pipeline needs CLIPTextModelWithProjection",
        ),
        ("model_index.json", {"text_encoder": ["transformers", "CLIPTextModel"]}, "is a CLIPTextModel;"),
        ("model_index.json", {"tokenizer_3": [None, None]}, "tokenizer_3 is missing"),
        (
            "model_index.json",
            {"transformer": ["diffusers", "FluxTransformer2DModel"]},
            "transformer is a FluxTransformer2DModel; StableDiffusion3Pipeline needs SD3Transformer2DModel",
        ),
        ("text_encoder/config.json", {"projection_dim": 13}, "text_encoder/model.safetensors"),
        (
            "scheduler/scheduler_config.json",
            {"_class_name": "DDIMScheduler", "shift": ...},
            "not one of a flow",
        ),
        ("vae/config.json", {"latent_channels": 4}, "vae"),
    ],
)
def test_refuses_malformed_folders(file: str, fields: dict[str, Any], message: str, folder: Path) -> None:
    check_refusal(folder, file, fields, message)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "transformer/config.json",
            {"pooled_projection_dim": 21},
            "return pooled texts of 20 elements together and transformer takes 21; they must be equal",
        ),
        (
            "transformer/config.json",
            {"joint_attention_dim": 49},
            "transformer takes encoded texts of 49 elements and text_encoder_3 returns 48",
        ),
        (
            "text_encoder_2/config.json",
            {"max_position_embeddings": 15},
            "texts have 16 tokens in text_encoder and 15 in text_encoder_2; they must be equal",
        ),
        ("vae/config.json", {"latent_channels": 4}, "latent images have 16 channels"),
        ("vae/config.json", {"out_channels": 4}, "images of 4 channels; images need 3"),
    ],
)
def test_refuses_components_that_do_not_fit(
    file: str, fields: dict[str, Any], message: str, folder: Path
) -> None:
    open_pipeline(folder, is_planned=True)
    edit(folder / file, **fields)
    with pytest.raises(ModelError) as caught:
        open_pipeline(folder, is_planned=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_clip_texts_are_at_most_as_wide_as_the_denoisers(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["without t5"], tmp_path / "narrow"))
    for width, refused in ((41, False), (40, False), (39, True)):
        edit(folder / "transformer" / "config.json", joint_attention_dim=width)
        if not refused:
            assert open_pipeline(folder, is_planned=True).denoiser_config.text_size == width
            continue
        with pytest.raises(ModelError, match=r"40 elements together; transformer takes encoded texts of 39"):
            open_pipeline(folder, is_planned=True)


def test_other_schedules_of_a_flow_are_taken(folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["heun"])
    assert pipeline.plan(4).passes == 2 * 4 - 1
    flow = read_schedule({"_class_name": "FlowMatchEulerDiscreteScheduler"})
    np.testing.assert_array_equal(replace(pipeline, schedule=flow).plan(4).sigmas, flow.plan(4).sigmas)


def test_the_commands_draw_and_plan(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(folders["sd3"])
    words = ["imagine", "a red circle", "--model", folder, "--steps", "1", "--out", str(tmp_path / "p.png")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "text encoder 3 1 (batch of 2)" in " ".join(text.split()) and "images/s" in text
    assert max(map(len, text.splitlines())) <= 80
    assert main(["plan", folder, "--size", "24x16", "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "one image of 24x16 pixels, 24 tokens" in text and "text encoder 2: 1 x" in text
    assert max(map(len, text.splitlines())) <= 80
