"""Pipelines of FLUX: images against diffusers, texts, noise levels, guidance, sizes, and malformed folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.runners.backends import ReferenceBackend
from model.runners.denoise import Drawing, Guidance, ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.flux import FluxPipeline
from nkw.commands import main
from tests.model.flux_oracles import (
    CASES,
    LEVELS,
    STORED,
    Case,
    record,
    record_levels,
    write_pipeline,
)
from tests.model.pipeline_folders import check_images, check_refusal, draw_images, list_shapes
from tests.model.pipeline_oracles import PROMPTS, read_recordings

RECORDINGS = read_recordings(STORED)
REQUESTS = [ImageRequest(prompt, seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each case, and return their paths."""
    parent = tmp_path_factory.mktemp("flux")
    return {
        name: write_pipeline(parent / name, case, list_shapes(case.configs, parent))
        for name, case in CASES.items()
    }


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the folder with a guided denoiser."""
    return Path(shutil.copytree(folders["dev"], tmp_path / "pipeline"))


def draw(folder: Path, case: Case, dtype: str = "float32", ranks: int = 0) -> np.ndarray:
    """Return the images of a case: by the numpy model for 0 ranks, else by kernels."""
    return draw_images(folder, REQUESTS, case.steps, case.guidance, case.draw_noise(), dtype, ranks)


def draw_small(folder: Path, sampling: Sampling, count: int = 1, **fields: Any) -> Drawing:
    """Return images of few pixels by the numpy model; `fields` change the requests."""
    runner = ImageRunner(open_pipeline(folder).resize(4, 4), ReferenceBackend())
    return runner.draw([replace(request, **fields) for request in REQUESTS[:count]], sampling)


@pytest.mark.parametrize("name", CASES)
def test_images_equal_those_of_diffusers(name: str, folders: dict[str, Path]) -> None:
    check_images(draw(folders[name], CASES[name]), RECORDINGS[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_recordings_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    from tests.model.flux_oracles import list_shapes as list_all_shapes

    case = CASES[name]
    check_images(record(case, write_pipeline(tmp_path, case, list_all_shapes(case))), RECORDINGS[name])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_kernels_draw_the_images_of_diffusers(name: str, ranks: int, folders: dict[str, Path]) -> None:
    check_images(draw(folders[name], CASES[name], ranks=ranks), RECORDINGS[name])


@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_bfloat16_is_near_diffusers(name: str, ranks: int, folders: dict[str, Path]) -> None:
    errors = np.abs(draw(folders[name], CASES[name], "bfloat16", ranks).astype(int) - RECORDINGS[name])
    # 2^-9 of numbers around 1 in each of some 20 layers, of which a byte is 2^-7: half a byte on average.
    assert errors.mean() < 2 and errors.max() <= 16


@pytest.mark.parametrize(("steps", "tokens"), LEVELS)
def test_noise_levels_are_shifted_once(steps: int, tokens: int, folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["dev"]).resize(4, tokens)  # two rows of tokens / 2 patches
    levels = pipeline.plan(steps).sigmas
    # Both round the shifted levels to float32.
    np.testing.assert_allclose(levels, RECORDINGS[f"levels of {steps}"], rtol=2**-23)
    if steps > 1:
        shifted_twice = pipeline.schedule.plan(steps, tokens, levels[:-1].tolist()).sigmas
        assert np.abs(shifted_twice - levels).max() > 0.01


@pytest.mark.deep
@pytest.mark.parametrize(("steps", "tokens"), LEVELS)
def test_recorded_noise_levels_are_those_of_diffusers(steps: int, tokens: int) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    np.testing.assert_array_equal(record_levels(steps, tokens), RECORDINGS[f"levels of {steps}"])


@pytest.mark.parametrize("steps", [0, 1001, 10**12])
def test_refuses_steps_out_of_range(steps: int, folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders["dev"])
    assert pipeline.plan(1).passes == 1 and pipeline.plan(1000).passes == 1000
    with pytest.raises(ModelError, match=f"steps {steps} must be a whole number from 1"):
        pipeline.plan(steps)


@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_texts_have_rows_of_t5_with_padding_and_a_pooled_state(name: str, folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders[name])
    assert isinstance(pipeline, FluxPipeline)
    encoded = pipeline.encode(PROMPTS, ReferenceBackend())
    assert encoded["text"].shape == (2, CASES[name].text_rows, 24) and encoded["pooled"].shape == (2, 20)
    clip, t5 = (
        encoder.encode(PROMPTS, ReferenceBackend(), masks_padding=True)
        for encoder in (pipeline.pooled_encoder, pipeline.row_encoder)
    )
    assert np.abs(encoded["text"] - t5.outputs["x"]).max() > 0.01
    for number, length in enumerate(clip.lengths[:, 0]):
        np.testing.assert_array_equal(encoded["pooled"][number], clip.outputs["x"][number, length - 1])


def test_latents_are_scaled_and_shifted(folders: dict[str, Path]) -> None:
    latents = np.full((1, 16, 8, 8), 3.611, np.float32)
    np.testing.assert_allclose(open_pipeline(folders["dev"]).unscale(latents), 10.1159, rtol=2**-22)


@pytest.mark.parametrize("mode", Guidance)
def test_distilled_guidance_takes_one_pass_a_step(mode: Guidance, folders: dict[str, Path]) -> None:
    drawing = draw_small(folders["dev"], Sampling(5, 4.0, mode), count=2)
    assert drawing.passes == {
        ("text_encoder", 2): 1,
        ("text_encoder_2", 2): 1,
        ("denoiser", 2): 5,
        ("autoencoder", 2): 1,
    }


def test_guidance_is_an_input_of_the_denoiser(folders: dict[str, Path]) -> None:
    weak, strong, again = (
        draw_small(folders["dev"], Sampling(1, guidance)).latents for guidance in (1.0, 4.0, 1.0)
    )
    np.testing.assert_array_equal(weak, again)
    assert np.abs(weak - strong).max() > 0.01
    inputs = open_pipeline(folders["dev"]).build_guidance(3.5, ["", ""])
    assert inputs["guidance"].tolist() == [[3500.0], [3500.0]]


def test_a_denoiser_without_guidance_takes_none(folders: dict[str, Path]) -> None:
    default, unguided = (
        draw_small(folders["schnell"], sampling).latents for sampling in (Sampling(1), Sampling(1, 1.0))
    )
    np.testing.assert_array_equal(default, unguided)
    with pytest.raises(ModelError, match=r"guidance 3\.5; the denoiser of this model takes no guidance"):
        draw_small(folders["schnell"], Sampling(1, 3.5))


@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_refuses_negative_prompts(name: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="a negative prompt needs two passes of guidance"):
        draw_small(folders[name], Sampling(1, 1.0), negative_prompt="a black square")


@pytest.mark.parametrize(
    ("name", "patches"), [("dev", (64, 120)), ("dev", (128, 60)), ("schnell", (62, 128)), ("dev", (1, 1))]
)
def test_takes_sizes_of_whole_patches(name: str, patches: tuple[int, int], folders: dict[str, Path]) -> None:
    pipeline = open_pipeline(folders[name])
    assert pipeline.sizes == [(256, 256)] and pipeline.image_size == (256, 256)
    rows, columns = patches
    resized = pipeline.with_image_size(4 * rows, 4 * columns)
    assert resized.denoiser_config.rows == rows * columns and resized.sizes == [(256, 256)]


@pytest.mark.parametrize(
    ("name", "size", "most"),
    [
        ("dev", (256, 484), "122,880"),
        ("dev", (4, 516), "122,880"),
        ("schnell", (252, 516), "126,976"),
        ("schnell", (256, 500), "126,976"),
        ("dev", (254, 256), "122,880"),
        ("dev", (256, 255), "122,880"),
    ],
)
def test_refuses_other_sizes(name: str, size: tuple[int, int], most: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError) as caught:
        open_pipeline(folders[name]).with_image_size(*size)
    assert caught.value.message == (
        f"{size[1]}x{size[0]} pixels is no size of this model; width and height are multiples of 4 up to 512, "
        f"together at most {most} pixels"
    )


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "model_index.json",
            {"text_encoder_2": ...},
            "text_encoder_2 is missing; FluxPipeline needs T5EncoderModel",
        ),
        (
            "model_index.json",
            {"tokenizer_2": [None, None]},
            "tokenizer_2 is missing; FluxPipeline needs T5Tok",
        ),
        ("model_index.json", {"text_encoder": ["transformers", "T5EncoderModel"]}, "needs CLIPTextModel"),
        (
            "model_index.json",
            {"transformer": ["diffusers", "SD3Transformer2DModel"]},
            "transformer is a SD3Transformer2DModel; FluxPipeline needs FluxTransformer2DModel",
        ),
        (
            "transformer/config.json",
            {"pooled_projection_dim": 21},
            "transformer takes encoded texts of 21 elements and text_encoder returns 20; they must be equal",
        ),
        (
            "transformer/config.json",
            {"joint_attention_dim": 25},
            "transformer takes encoded texts of 25 elements and text_encoder_2 returns 24; they must be equal",
        ),
        ("transformer/config.json", {"in_channels": 60}, "latent images have 15 channels"),
        ("vae/config.json", {"out_channels": 4}, "vae decodes images of 4 channels; images need 3"),
        (
            "scheduler/scheduler_config.json",
            {"_class_name": "DDIMScheduler", **dict.fromkeys(("shift", "use_dynamic_shifting"), ...)}
            | dict.fromkeys(("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"), ...),
            "FluxPipeline needs a FlowMatchEulerDiscreteScheduler",
        ),
    ],
)
def test_refuses_malformed_folders(file: str, fields: dict[str, Any], message: str, folder: Path) -> None:
    check_refusal(folder, file, fields, message, is_planned=True)


@pytest.mark.parametrize("component", ["text_encoder_2", "tokenizer_2", "text_encoder"])
def test_refuses_folders_without_a_component(component: str, folder: Path) -> None:
    open_pipeline(folder)
    shutil.rmtree(folder / component)
    with pytest.raises(ModelError, match=component) as caught:
        open_pipeline(folder)
    assert "\n" not in str(caught.value)


def test_the_commands_draw_and_plan(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, document = tmp_path / "picture.png", tmp_path / "document.json"
    words = ["--model", str(folders["dev"]), "--size", "8x8", "--steps", "2"]
    assert main(["imagine", "a red circle", *words, "--out", str(path), "--json", str(document)]) == 0
    contents = json.loads(document.read_text())
    passes = {entry["component"]: (entry["batch"], entry["passes"]) for entry in contents["passes"]}
    once = dict.fromkeys(("text_encoder", "text_encoder_2", "autoencoder"), (1, 1))
    assert path.is_file() and passes == {**once, "denoiser": (1, 2)}
    assert contents["difference"]["bytes"] <= 1
    capsys.readouterr()
    assert main(["plan", str(folders["dev"]), "--size", "24x16", "--steps", "50", "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "one image of 24x16 pixels, 24 tokens" in text and "text encoder 2: 1 x" in text
    assert "denoiser: 50 x" in text and max(map(len, text.splitlines())) <= 80
