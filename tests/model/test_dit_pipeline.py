"""Pipelines of DiT: images against diffusers, labels, guidance, sizes, plans, and malformed folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.device import DryDevice
from model.errors import ModelError
from model.noise_schedules import read_schedule
from model.plan.images import plan_images
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.denoise import Drawing, Guidance, ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.dit import DiTPipeline
from nkw.commands import main
from tests.model.dit_oracles import CASES, CLASSES, STORED, record, record_labels, write_pipeline
from tests.model.pipeline_folders import check_images, check_refusal, draw_images, edit, list_shapes
from tests.model.pipeline_oracles import draw_noise, read_recordings
from tests.model.test_hostile_images import set_first_number
from tests.model.test_imagine import refuse

RECORDINGS = read_recordings(STORED)
LABELS = {
    "Pembroke": 263,
    "Pembroke Welsh corgi": 263,
    "crane": 517,
    "golden retriever": 207,
    "great white shark": 2,
    "man-eater": 2,
    "white shark": 2,
    "207": 517,
}
"""Class of each of `NAMES`, beside the empty one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each case, and return their paths."""
    parent = tmp_path_factory.mktemp("dit")
    return {
        name: write_pipeline(parent / name, case, list_shapes(case.configs, parent))
        for name, case in CASES.items()
    }


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the folder with DDIM and names of classes."""
    return Path(shutil.copytree(folders["ddim"], tmp_path / "pipeline"))


@pytest.fixture(scope="module")
def pipeline(folders: dict[str, Path]) -> DiTPipeline:
    """Open the folder with names of classes."""
    opened = open_pipeline(folders["ddim"])
    assert isinstance(opened, DiTPipeline)
    return opened


def draw(folders: dict[str, Path], name: str, **options: Any) -> np.ndarray:
    """Return the images of a case: by the numpy model without `ranks`, else by kernels."""
    case = CASES[name]
    requests = [ImageRequest(prompt) for prompt in case.prompts]
    return draw_images(folders[name], requests, case.steps, case.guidance, draw_noise(), **options)


@pytest.mark.parametrize("mode", Guidance)
@pytest.mark.parametrize("name", CASES)
def test_images_equal_those_of_diffusers(name: str, mode: Guidance, folders: dict[str, Path]) -> None:
    check_images(draw(folders, name, mode=mode), RECORDINGS[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_recordings_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    from tests.model.dit_oracles import list_shapes as list_all_shapes

    case = CASES[name]
    check_images(
        record(case, write_pipeline(tmp_path / "dit", case, list_all_shapes(case))), RECORDINGS[name]
    )


@pytest.mark.deep
def test_names_of_classes_are_those_of_diffusers(folder: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    assert record_labels(folder) == LABELS | {"": 517}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("ddim", Guidance.batched),
        ("ddim", Guidance.separate),
        ("solver", Guidance.batched),
        ("unguided", Guidance.batched),
    ],
)
def test_kernels_draw_the_images_of_diffusers(
    name: str, mode: Guidance, ranks: int, folders: dict[str, Path]
) -> None:
    check_images(draw(folders, name, ranks=ranks, mode=mode), RECORDINGS[name])


@pytest.mark.parametrize("ranks", [0, 1, 2])
@pytest.mark.parametrize("mode", Guidance)
def test_bfloat16_is_near_diffusers(mode: Guidance, ranks: int, folders: dict[str, Path]) -> None:
    images = draw(folders, "ddim", dtype="bfloat16", ranks=ranks, mode=mode)
    errors = np.abs(images.astype(int) - RECORDINGS["ddim"])
    # 2^-9 of numbers around 1 in each of some 20 layers, of which a byte is 2^-7: half a byte on average.
    assert errors.mean() < 2 and errors.max() <= 16


def test_labels_are_names_or_numbers(pipeline: DiTPipeline) -> None:
    assert pipeline.classes_by_name == LABELS
    prompts = ["golden retriever", " crane\n", "207", "0206", "0", "999", "", " "]
    labels = pipeline.encode(prompts, ReferenceBackend())["labels"]
    assert labels.dtype == np.int32 and labels.shape == (len(prompts), 1)
    assert labels[:, 0].tolist() == [207, 517, 517, 206, 0, 999, CLASSES, CLASSES]


def refuse_prompt(pipeline: DiTPipeline, prompt: str) -> str:
    """Return the sentence that refuses a prompt; it is refused by `encode` too."""
    with pytest.raises(ModelError) as caught:
        pipeline.check_prompts(["207", prompt])
    with pytest.raises(ModelError) as caught_again:
        pipeline.encode([prompt], ReferenceBackend())
    assert str(caught.value) == str(caught_again.value) and "\n" not in str(caught.value)
    return str(caught.value)


_ADVICE = "give a name in id2label of model_index.json, or a number from 0 to 999"


@pytest.mark.parametrize(
    ("prompt", "nearest"),
    [
        ("Golden Retriever", "'golden retriever'"),
        ("white sharks", "'white shark', 'great white shark'"),
        ("pembroke welsh corgi", "'Pembroke Welsh corgi'"),
    ],
)
def test_an_unknown_label_names_the_nearest(prompt: str, nearest: str, pipeline: DiTPipeline) -> None:
    assert refuse_prompt(pipeline, prompt) == (
        f"{prompt!r} is no class of this model; the nearest of its 8 names are {nearest}: {_ADVICE}"
    )


@pytest.mark.parametrize(
    "prompt", ["a red circle", "1000", "-1", "1e2", "2.5", "٣", "0" * 5000 + "7", "x" * 4000]
)
def test_an_unknown_label_names_how_many_there_are(prompt: str, pipeline: DiTPipeline) -> None:
    shown = f"{prompt!r:.60} is no class of this model; it has 8 names: {_ADVICE}"
    assert refuse_prompt(pipeline, prompt) == shown


@pytest.mark.parametrize("prompt", ["golden retriever", "1000", "-1"])
def test_a_folder_without_names_takes_numbers(prompt: str, folders: dict[str, Path]) -> None:
    unnamed = open_pipeline(folders["solver"])
    assert isinstance(unnamed, DiTPipeline)
    assert unnamed.encode(["999"], ReferenceBackend())["labels"].tolist() == [[999]]
    assert refuse_prompt(unnamed, prompt) == (
        f"'{prompt}' is no class of this model, whose folder names no classes: give a number from 0 to 999"
    )


@pytest.mark.parametrize("entry", [..., None, {}, [None, None], {"3": " , "}])
def test_names_may_be_absent(entry: Any, folder: Path) -> None:
    edit(folder / "model_index.json", id2label=entry)
    opened = open_pipeline(folder)
    assert isinstance(opened, DiTPipeline) and opened.classes_by_name == {}


def test_unknown_labels_are_refused_before_components_are_created(pipeline: DiTPipeline) -> None:
    class Unused:
        def create(self, *arguments: Any) -> Any:
            raise AssertionError("a component is created")

    runner = ImageRunner(pipeline, Unused())
    with pytest.raises(ModelError, match="'cranes' is no class of this model"):
        runner.draw([ImageRequest("cranes")], Sampling(1))
    with pytest.raises(AssertionError, match="a component is created"):
        runner.draw([ImageRequest("crane")], Sampling(1))


def test_groups_share_images_and_their_classes(pipeline: DiTPipeline) -> None:
    from model.device import SimulatedDevice

    requests = [ImageRequest(prompt) for prompt in ("crane", "golden retriever")]
    backend = KernelBackend(SimulatedDevice("trn2", 3), 3)
    latents = ImageRunner(pipeline, backend).draw(requests, Sampling(1)).latents
    expected = ImageRunner(pipeline, ReferenceBackend()).draw(requests, Sampling(1)).latents
    np.testing.assert_allclose(latents, expected, rtol=0, atol=1e-3)


def draw_latents(pipeline: DiTPipeline, prompts: list[str], sampling: Sampling) -> Drawing:
    """Return images of seed 0 by the numpy model."""
    return ImageRunner(pipeline, ReferenceBackend()).draw(
        [ImageRequest(prompt) for prompt in prompts], sampling
    )


def test_classes_and_guidance_decide_images(pipeline: DiTPipeline) -> None:
    latents = draw_latents(pipeline, ["crane", "golden retriever", ""], Sampling(2)).latents
    for pair in combinations(latents, 2):
        assert np.abs(np.subtract(*pair)).max() > 0.01
    # Both passes of an image of no class are equal, so that its guidance has no effect.
    unguided = draw_latents(pipeline, [""], Sampling(2, 1.0)).latents
    np.testing.assert_array_equal(latents[2:], unguided)


def test_guidance_takes_two_passes_and_no_negative_prompt(pipeline: DiTPipeline) -> None:
    passes = [
        draw_latents(pipeline, ["crane"] * 2, Sampling(3, guidance, mode)).passes
        for guidance, mode in ((4.0, Guidance.batched), (4.0, Guidance.separate), (1.0, Guidance.batched))
    ]
    assert passes == [
        {("denoiser", batch): count, ("autoencoder", 2): 1} for batch, count in ((4, 3), (2, 6), (2, 3))
    ]
    request = ImageRequest("crane", negative_prompt="golden retriever")
    for guidance in (4.0, 1.0):
        with pytest.raises(ModelError, match="a negative prompt needs a text encoder"):
            ImageRunner(pipeline, ReferenceBackend()).draw([request], Sampling(1, guidance))


def test_eulers_method_makes_the_images_of_ddim(pipeline: DiTPipeline) -> None:
    """DDIM is Euler's method for latents of another scale: their last latents are equal at the same timesteps."""
    euler = {
        "_class_name": "EulerDiscreteScheduler",
        "beta_schedule": "linear",
        "timestep_spacing": "leading",
    }
    scaled = replace(pipeline, schedule=read_schedule(euler))
    assert scaled.plan(4).initial_scale > 10 and pipeline.plan(4).initial_scale == 1
    expected, latents = (draw_latents(model, ["crane"], Sampling(4)).latents for model in (pipeline, scaled))
    # Noise levels of up to 150 are rounded to float32, and the difference passes through four passes.
    np.testing.assert_allclose(latents, expected, rtol=0, atol=2**-13 * np.abs(expected).max())


def test_takes_one_size(pipeline: DiTPipeline) -> None:
    assert pipeline.sizes == [(16, 16)] and pipeline.with_image_size(16, 16).image_size == (16, 16)
    for rows, columns in ((16, 18), (14, 16), (32, 32)):
        with pytest.raises(
            ModelError, match=f"{columns}x{rows} pixels is no size of this model; its sizes are 16x16"
        ):
            pipeline.with_image_size(rows, columns)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("model_index.json", {"vae": ...}, "vae is missing; DiTPipeline needs AutoencoderKL"),
        (
            "model_index.json",
            {"transformer": ["diffusers", "SD3Transformer2DModel"]},
            "SD3Transformer2DModel; DiTPipeline needs DiTTransformer2DModel or Transformer2DModel",
        ),
        ("model_index.json", {"id2label": 7}, "id2label: 7 is not an object"),
        (
            "model_index.json",
            {"id2label": ["crane", "shark"]},
            "id2label: ['crane', 'shark'] is not an object",
        ),
        ("model_index.json", {"id2label": {"7": 8}}, "id2label.7: 8 is not text"),
        ("model_index.json", {"id2label": {"7": None}}, "id2label.7: None is not text"),
        ("model_index.json", {"id2label": {"7": ["crane"]}}, "id2label.7: ['crane'] is not text"),
        (
            "model_index.json",
            {"id2label": {"1000": "crane"}},
            "id2label: '1000' is no class of the transformer; a number from 0 to 999 is",
        ),
        ("model_index.json", {"id2label": {"-1": "crane"}}, "id2label: '-1' is no class"),
        ("model_index.json", {"id2label": {"crane": "7"}}, "id2label: 'crane' is no class"),
        ("model_index.json", {"id2label": {"9" * 5000: "crane"}}, "id2label: '999"),
        ("transformer/config.json", {"num_embeds_ada_norm": 1001}, "config.json asks for (1002, 32)"),
        ("transformer/config.json", {"patch_size": 3}, "sample_size: 8 is not a multiple of patch_size, 3"),
        ("transformer/config.json", {"in_channels": 3, "out_channels": 3}, "transformer/"),
        ("transformer/config.json", {"out_channels": 6}, "out_channels: 6 is neither in_channels, 4,"),
        ("transformer/config.json", {"norm_type": "ada_norm"}, "norm_type: 'ada_norm'"),
        ("transformer/config.json", {"num_layers": 3}, "is missing"),
        ("transformer/config.json", {"caption_channels": 32}, "caption_channels: the field is not known"),
        ("vae/config.json", {"latent_channels": 5}, "vae/"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "round"}, "beta_schedule"),
        ("scheduler/scheduler_config.json", {"new_field": 1}, "new_field"),
    ],
)
def test_refuses_malformed_folders(file: str, fields: dict[str, Any], message: str, folder: Path) -> None:
    check_refusal(folder, file, fields, message)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "vae/config.json",
            {"latent_channels": 5},
            "latent images have 4 channels in the config of transformer",
        ),
        ("vae/config.json", {"out_channels": 4}, "vae decodes images of 4 channels; images need 3"),
        ("transformer/config.json", {"in_channels": 5, "out_channels": 5}, "latent images have 5 channels"),
        (
            "transformer/config.json",
            {"num_embeds_ada_norm": 517},
            "id2label: '517' is no class of the transformer",
        ),
        (
            "transformer/config.json",
            {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_single", "num_embeds_ada_norm": ...},
            "a PixArtTransformer2DModel; model_index.json of this DiTPipeline names a DiTTransformer2DModel, so one",
        ),
    ],
)
def test_plans_refuse_malformed_folders(
    file: str, fields: dict[str, Any], message: str, folder: Path
) -> None:
    check_refusal(folder, file, fields, message, is_planned=True)


@pytest.mark.parametrize(
    ("variance", "refused"),
    [("fixed_small", False), ("fixed_large", False), ("learned", True), ("learned_range", True)],
)
def test_refuses_learned_variances_of_ddpm(variance: str, refused: bool, folder: Path) -> None:
    scheduler = {"_class_name": "DDPMScheduler", "beta_schedule": "linear", "variance_type": variance}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    if refused:
        with pytest.raises(
            ModelError, match=f"variance_type {variance}, and the denoiser's learned variances"
        ):
            open_pipeline(folder)
    else:
        opened = open_pipeline(folder)
        assert isinstance(opened, DiTPipeline)
        assert np.isfinite(draw_latents(opened, ["crane"], Sampling(2)).latents).all()


def test_an_index_may_name_the_older_class(folder: Path) -> None:
    edit(folder / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    assert open_pipeline(folder).image_size == (16, 16)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_refuses_weights_that_are_not_finite(number: float, folder: Path) -> None:
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    for first, refused in ((0.01, False), (number, True)):
        set_first_number(weights, first)
        opened = open_pipeline(folder)
        assert isinstance(opened, DiTPipeline)
        if refused:
            with pytest.raises(ModelError, match="the denoiser computes numbers that are not finite"):
                draw_latents(opened, ["0"], Sampling(1))
        else:
            draw_latents(opened, ["0"], Sampling(1))


def test_the_commands_draw_and_plan(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, image, document = str(folders["ddim"]), tmp_path / "dog.png", tmp_path / "dog.json"
    words = ["--model", folder, "--steps", "2"]
    outputs = ["--out", str(image), "--json", str(document)]
    assert main(["imagine", "golden retriever", *words, *outputs, "--tp", "2"]) == 0
    text = capsys.readouterr().out
    contents = json.loads(document.read_text())
    passes = {entry["component"]: (entry["batch"], entry["passes"]) for entry in contents["passes"]}
    assert image.is_file() and passes == {"denoiser": (2, 2), "autoencoder": (1, 1)}
    assert contents["difference"]["bytes"] <= 1
    assert "images/s" in text and max(map(len, text.splitlines())) <= 80
    assert main(["plan", folder, "--steps", "50", "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "one image of 16x16 pixels, 16 tokens" in text and "denoiser: 50 x" in text
    assert main(["traffic", folder, "--steps", "5", "--requests", "20"]) == 0


def test_the_command_refuses_labels_and_sizes(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "dog.png"
    words = ["--model", str(folders["ddim"]), "--backend", "numpy", "--steps", "1", "--out", str(image)]
    assert "'a red circle above a blue square' is no class of this model" in refuse(capsys, *words)
    assert "'1000' is no class" in refuse(capsys, "1000", *words)
    assert "a negative prompt needs a text encoder" in refuse(capsys, "5", *words, "--negative-prompt", "6")
    assert "its sizes are 16x16" in refuse(capsys, "5", *words, "--size", "32x32")
    assert "this model draws classes, without any" in refuse(capsys, "5", *words, "--explain")
    assert not image.exists()
    assert main(["imagine", "999", *words, "--size", "16x16"]) == 0 and image.exists()


def test_plans_need_configs_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for weights in folder.glob("*/*.safetensors"):
        weights.unlink()
    assert main(["plan", str(folder), "--instance", "inf2.xlarge", "--steps", "3"]) == 0
    assert "denoiser: 3 x" in capsys.readouterr().out


@pytest.mark.parametrize(("images", "refusal"), [(64, None), (65, "at most 128 images, not 130")])
def test_a_batch_that_a_kernel_refuses_is_refused_before_any_dry_run(
    images: int, refusal: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of the denoiser takes up to 128 images; guidance takes two for each image of the batch."""
    monkeypatch.setattr(DryDevice, "run", lambda device, *arguments: 1 / 0)
    opened = open_pipeline(folder, is_planned=True)
    with pytest.raises(ZeroDivisionError if refusal is None else ModelError, match=refusal):
        plan_images(opened, "trn2", 8, Sampling(2), images)
