"""Pipelines of diffusion models: images against diffusers, guidance, batches, passes, and malformed folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.config.autoencoder import AutoencoderConfig
from model.config.fields import Fields
from model.errors import ModelError
from model.families.registry import compose, read
from model.noise_schedules import read_schedule
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.component import count_activation_bytes
from model.runners.denoise import (
    Drawing,
    Guidance,
    ImageRequest,
    ImageRunner,
    Sampling,
    convert_to_bytes,
    find_tile,
)
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.pipeline import ImagePipeline
from tests.model.pipeline_folders import check_refusal, edit
from tests.model.pipeline_oracles import (
    CASES,
    FLOW,
    LATENT_SHAPE,
    NEGATIVE_PROMPT,
    PROMPTS,
    STORED_SIZES,
    Case,
    draw_noise,
    read_recordings,
    record,
    record_sizes,
    write_pipeline,
)

RECORDINGS = read_recordings()
RECORDINGS_OF_SIZES = read_recordings(STORED_SIZES)
REQUESTS = [ImageRequest(prompt, seed, NEGATIVE_PROMPT) for seed, prompt in enumerate(PROMPTS)]


def list_shapes(case: Case, folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors of each component that our networks read."""
    keys = {
        "text_encoder": case.text_encoder["model_type"],
        "transformer": "PixArtTransformer2DModel",
        "vae": "AutoencoderKL",
    }
    shapes = {}
    for name, config in case.configs.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        shapes[name] = compose(read(keys[name], Fields(path))).list_tensor_shapes()
    return shapes


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each case, and return their paths."""
    parent = tmp_path_factory.mktemp("pipelines")
    return {
        name: write_pipeline(parent / name, case, list_shapes(case, parent)) for name, case in CASES.items()
    }


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the folder with flow-match Euler."""
    return Path(shutil.copytree(folders["flow"], tmp_path / "pipeline"))


def draw(folder: Path, case: Case, dtype: str = "float32", ranks: int = 0) -> Drawing:
    """Return the images of a case: by the numpy model for 0 ranks, else by kernels."""
    from model.device import SimulatedDevice

    backend = KernelBackend(SimulatedDevice("trn2", ranks)) if ranks else ReferenceBackend()
    runner = ImageRunner(open_pipeline(folder, dtype).resize(*LATENT_SHAPE[1:]), backend)
    requests = [replace(request, prompt=prompt) for request, prompt in zip(REQUESTS, case.prompts)]
    return runner.draw(requests, Sampling(case.steps, case.guidance), draw_noise())


@pytest.mark.parametrize("name", CASES)
def test_images_equal_those_of_diffusers(name: str, folders: dict[str, Path]) -> None:
    images = draw(folders[name], CASES[name]).images
    errors = np.abs(images.astype(int) - RECORDINGS[name])
    # Sums in another order move a number by some 2^-20 of the largest one, which rounds 1 byte in 1,000 otherwise.
    assert errors.max() <= 1 and (errors > 0).mean() < 0.01


def test_activations_of_components_are_counted(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays of a batch on the host are fewer bytes than the activations, which a bound between them refuses."""
    pipeline = open_pipeline(folders["flow"])
    assert count_activation_bytes(pipeline.denoiser, 2) == 2 * count_activation_bytes(pipeline.denoiser)
    runner, request = ImageRunner(pipeline, ReferenceBackend()), ImageRequest("a red circle")
    needed = runner._count_bytes(1)
    decoded = pipeline.autoencoder_config.latent_rows * pipeline.autoencoder_config.latent_columns
    assert needed > count_activation_bytes(pipeline.autoencoder) >= 4 * 16 * decoded
    for memory, is_refused in ((needed - 1, True), (needed, False), (needed + 1, False)):
        monkeypatch.setattr("model.errors.memory_bytes", lambda memory=memory: memory)
        if is_refused:
            with pytest.raises(ModelError, match="a batch of 1 image takes"):
                runner.draw([request], Sampling(1))
        else:
            assert runner.draw([request], Sampling(1)).images.shape[0] == 1


def test_kernels_count_the_activations_of_the_whole_batch(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.device import SimulatedDevice

    model = open_pipeline(folders["flow"]).denoiser
    needed = count_activation_bytes(model, 32)
    for memory, is_refused in ((needed - 1, True), (needed, False), (needed + 1, False)):
        monkeypatch.setattr("model.errors.memory_bytes", lambda memory=memory: memory)
        backend = KernelBackend(SimulatedDevice("trn2", 1))
        if is_refused:
            with pytest.raises(ModelError, match="the denoiser of a batch of 32 takes"):
                backend.create(model, 32, "denoiser")
        else:
            backend.create(model, 32, "denoiser")


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_recordings_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    from tests.model.pipeline_oracles import list_shapes as list_all_shapes

    made = record(CASES[name], write_pipeline(tmp_path, CASES[name], list_all_shapes(CASES[name])))
    errors = np.abs(made.astype(int) - RECORDINGS[name])
    assert errors.max() <= 1 and (errors > 0).mean() < 0.01


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["flow", "t5", "sigma", "size of images"])
def test_kernels_draw_the_images_of_diffusers(name: str, ranks: int, folders: dict[str, Path]) -> None:
    images = draw(folders[name], CASES[name], ranks=ranks).images
    errors = np.abs(images.astype(int) - RECORDINGS[name])
    assert errors.max() <= 1 and (errors > 0).mean() < 0.01


@pytest.mark.parametrize(("prompt", "is_same"), [("a red circle", True), ("a red circle.", False)])
def test_capitals_and_blanks_around_prompts_change_nothing(
    prompt: str, is_same: bool, folders: dict[str, Path]
) -> None:
    pipeline = open_pipeline(folders["t5"])
    first, second = pipeline.encode([" A Red CIRCLE\n", prompt], ReferenceBackend())["text"]
    assert np.array_equal(first, second) == is_same


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_in_bfloat16_are_near_diffusers(ranks: int, folders: dict[str, Path]) -> None:
    images = draw(folders["flow"], CASES["flow"], "bfloat16", ranks).images
    errors = np.abs(images.astype(int) - RECORDINGS["flow"])
    # 2^-9 of numbers around 1 in each of some 20 layers, of which a byte is 2^-7: half a byte on average.
    assert errors.mean() < 2 and errors.max() <= 16


@pytest.mark.parametrize(("tensor", "groups"), [(1, 2), (2, 2), (1, 3)])
def test_groups_share_images_and_passes(tensor: int, groups: int, folders: dict[str, Path]) -> None:
    from model.device import SimulatedDevice

    pipeline, sampling = open_pipeline(folders["flow"]), Sampling(2)
    expected = ImageRunner(pipeline, KernelBackend(SimulatedDevice("trn2", tensor))).draw(REQUESTS, sampling)
    device = SimulatedDevice("trn2", tensor * groups)
    shared = ImageRunner(pipeline, KernelBackend(device, groups)).draw(REQUESTS, sampling)
    np.testing.assert_allclose(shared.latents, expected.latents, rtol=0, atol=1e-4)
    assert np.abs(shared.images.astype(int) - expected.images).max() <= 1


def test_images_of_a_batch_equal_the_images_alone(folders: dict[str, Path]) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    together = runner.draw(REQUESTS, Sampling(2))
    for index, request in enumerate(REQUESTS):
        alone = runner.draw([request], Sampling(2))
        np.testing.assert_array_equal(alone.latents[0], together.latents[index])
        np.testing.assert_array_equal(alone.images[0], together.images[index])


def test_seeds_decide_the_noise(folders: dict[str, Path]) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    first, second, again = (
        runner.draw([ImageRequest("a red circle", seed)], Sampling(1)).latents for seed in (0, 1, 0)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize(
    ("guidance", "mode", "passes"),
    [
        (4.0, Guidance.batched, {("denoiser", 4): 5}),
        (4.0, Guidance.separate, {("denoiser", 2): 10}),
        (1.0, Guidance.batched, {("denoiser", 2): 5}),
    ],
)
def test_counts_passes(
    guidance: float, mode: Guidance, passes: dict[tuple[str, int], int], folders: dict[str, Path]
) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    drawing = runner.draw(REQUESTS, Sampling(5, guidance, mode))
    texts = 2 if guidance == 1.0 else 4
    assert drawing.passes == {("text_encoder", texts): 1, **passes, ("autoencoder", 2): 1}


def test_passes_one_after_another_equal_a_batch(folders: dict[str, Path]) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    batched, separate = (runner.draw(REQUESTS, Sampling(2, 4.0, mode)).latents for mode in Guidance)
    np.testing.assert_array_equal(batched, separate)


def test_heun_takes_two_passes_a_step_but_the_last(folders: dict[str, Path]) -> None:
    heun = read_schedule({"_class_name": "FlowMatchHeunDiscreteScheduler"})
    pipeline = replace(open_pipeline(folders["flow"]), schedule=heun)
    drawing = ImageRunner(pipeline, ReferenceBackend()).draw(REQUESTS[:1], Sampling(4))
    assert drawing.passes["denoiser", 2] == 2 * 4 - 1


def test_ancestral_noise_is_that_of_the_image(folders: dict[str, Path]) -> None:
    schedule = read_schedule({"_class_name": "EulerAncestralDiscreteScheduler"})
    runner = ImageRunner(replace(open_pipeline(folders["flow"]), schedule=schedule), ReferenceBackend())
    together = runner.draw(REQUESTS, Sampling(3)).latents
    alone = runner.draw(REQUESTS[1:], Sampling(3)).latents
    np.testing.assert_array_equal(alone[0], together[1])


def test_dry_runs_time_every_component(folders: dict[str, Path]) -> None:
    from model.device import DryDevice
    from model.runners.image_times import DryBackend

    backend = DryBackend(DryDevice("trn2", 2, one_for_all=True), "trn2")
    drawing = ImageRunner(open_pipeline(folders["flow"], "bfloat16"), backend).draw(REQUESTS, Sampling(5))
    times = backend.list_times(drawing.passes)
    assert [(time.name, time.passes, time.batch) for time in times] == [
        ("text_encoder", 1, 4),
        ("denoiser", 5, 4),
        ("autoencoder", 1, 2),
    ]
    for time in times:
        assert 0 < time.prediction.dataflow_ns <= time.prediction.program_ns <= time.prediction.serial_ns
        assert time.total_ns == time.passes * time.prediction.program_ns


def test_bytes_are_clipped_and_rounded_half_to_even() -> None:
    numbers = np.array([-2, -1, 0, 1, 2, 2 * 100.5 / 255 - 1, 2 * 101.5 / 255 - 1], np.float32)
    images = convert_to_bytes(np.broadcast_to(numbers, (1, 3, 1, 7)))
    assert images.shape == (1, 1, 7, 3) and images.dtype == np.uint8
    # 0 is 127.5, and half a byte above 100 and 101 is rounded to the even 100 and 102 up to float32's error.
    assert images[0, 0, :5, 0].tolist() == [0, 0, 128, 255, 255]
    assert np.abs(images[0, 0, 5:, 0].astype(int) - [100, 102]).max() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda requests, sampling: ([], sampling, None), "no image is asked for"),
        (
            lambda requests, sampling: ([replace(requests[0], seed=2**64)], sampling, None),
            "seed 18446744073709551616",
        ),
        (lambda requests, sampling: (requests, replace(sampling, steps=1001), None), "steps 1001"),
        (
            lambda requests, sampling: (requests, sampling, np.zeros((1, 4, 8, 8), np.float32)),
            "latents of shape [1, 4",
        ),
        (
            lambda requests, sampling: (requests, sampling, np.full((2, 4, 8, 8), np.nan, np.float32)),
            "need finite numbers",
        ),
    ],
)
def test_refuses_requests(change: Any, message: str, folders: dict[str, Path]) -> None:
    runner = ImageRunner(open_pipeline(folders["flow"]), ReferenceBackend())
    requests, sampling, noise = change(REQUESTS, Sampling(1))
    with pytest.raises(ModelError) as caught:
        runner.draw(requests, sampling, noise)
    assert message in str(caught.value)


@pytest.mark.parametrize("guidance", [-0.1, 1000.1, float("nan")])
def test_refuses_guidance_out_of_range(guidance: float) -> None:
    assert Sampling(1, 1000.0).is_guided and Sampling(1, 0.0).is_guided
    with pytest.raises(ModelError, match="must be between 0 and 1000"):
        Sampling(1, guidance)


def test_takes_the_sizes_of_the_model(folder: Path) -> None:
    pipeline = open_pipeline(folder)
    assert pipeline.with_image_size(16, 16).image_size == (16, 16)
    with pytest.raises(ModelError, match="32x16 pixels is no size of this model; its sizes are 16x16"):
        pipeline.with_image_size(16, 32)


SIDES = {32: 256, 64: 512, 128: 1024}


def open_large(folder: Path, sample: int) -> ImagePipeline:
    """Return a pipeline planned for latents of `sample` rows, which its autoencoder makes 8 times as large."""
    edit(folder / "transformer" / "config.json", sample_size=sample)
    blocks = {"block_out_channels": [16] * 4, "sample_size": 8 * sample}
    blocks |= {
        f"{way}_block_types": [f"{name}Block2D"] * 4
        for way, name in (("down", "DownEncoder"), ("up", "UpDecoder"))
    }
    edit(folder / "vae" / "config.json", **blocks)
    return open_pipeline(folder, is_planned=True)


@pytest.mark.parametrize("sample", SIDES)
def test_sizes_are_the_aspect_ratios_of_diffusers(sample: int, folder: Path) -> None:
    pipeline, side = open_large(folder, sample), SIDES[sample]
    recorded = RECORDINGS_OF_SIZES[str(side)].tolist()
    assert sorted(map(list, pipeline.sizes)) == sorted(recorded)
    assert len(recorded) == 33 and pipeline.sizes[0] == (side, side)
    for rows, columns in pipeline.sizes:
        resized = pipeline.with_image_size(rows, columns)
        assert resized.image_size == (rows, columns)
        assert resized.denoiser_config.rows * 16 * 16 == rows * columns


def test_no_other_sizes_are_known_of_other_squares(folder: Path) -> None:
    assert open_large(folder, 30).sizes == [(240, 240)]
    assert open_large(folder, 256).sizes == [(2048, 2048)]


@pytest.mark.parametrize(
    ("size", "nearest"), [((500, 1000), "704x352"), ((1024, 1024), "512x512"), ((9, 1), "256x1024")]
)
def test_a_refusal_names_the_nearest_of_many_sizes(size: tuple[int, int], nearest: str, folder: Path) -> None:
    pipeline = open_large(folder, 64)
    with pytest.raises(ModelError, match=f"of its 33 sizes, {nearest} has the nearest aspect ratio"):
        pipeline.with_image_size(*size)


@pytest.mark.deep
@pytest.mark.parametrize("side", SIDES.values())
def test_recorded_sizes_are_those_of_diffusers(side: int) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    np.testing.assert_array_equal(record_sizes(side), RECORDINGS_OF_SIZES[str(side)])


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "WuerstchenPipeline"},
            "_class_name: WuerstchenPipeline is not known",
        ),
        ("model_index.json", {"_class_name": 7}, "_class_name: 7 is not the name of a pipeline"),
        ("model_index.json", {"vae": ...}, "vae is missing; PixArtAlphaPipeline needs AutoencoderKL"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderTiny"]}, "vae is a AutoencoderTiny"),
        ("model_index.json", {"vae": ["diffusers", 3]}, "vae: ['diffusers', 3] is not a library and a class"),
        (
            "model_index.json",
            {"tokenizer": ["transformers", "GemmaTokenizer"]},
            "tokenizer is a GemmaTokenizer",
        ),
        ("scheduler/scheduler_config.json", {"shift": -1.0}, "Scheduler: shift: -1.0"),
        ("scheduler/scheduler_config.json", {"new_field": 1}, "new_field"),
        (
            "vae/config.json",
            {"_class_name": "AutoencoderTiny"},
            "_class_name: 'AutoencoderTiny' is not known",
        ),
        ("transformer/config.json", {"num_layers": 3}, "is missing"),
        ("text_encoder/config.json", {"hidden_size": 33}, "hidden_size"),
    ],
)
def test_refuses_malformed_folders(file: str, fields: dict[str, Any], message: str, folder: Path) -> None:
    check_refusal(folder, file, fields, message)


@pytest.mark.parametrize(
    "file",
    ["model_index.json", "vae/config.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json"],
)
def test_refuses_damaged_and_missing_files(file: str, folder: Path) -> None:
    (folder / file).write_text('{"_class_name": ')
    with pytest.raises(ModelError, match="is not JSON"):
        open_pipeline(folder)
    (folder / file).unlink()
    with pytest.raises(ModelError):
        open_pipeline(folder)


def test_refuses_links_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "vae" / "config.json", tmp_path / "config.json")
    (folder / "vae" / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        open_pipeline(folder)


def test_refuses_a_folder_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model_index\.json"):
        open_pipeline(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        open_pipeline(tmp_path / "nothing")
    assert FLOW["_class_name"] in CASES["flow"].scheduler.values()


def test_large_images_are_decoded_in_tiles() -> None:
    small = AutoencoderConfig(
        rows=64 * 64,
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=128,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=True,
        use_post_quant_conv=True,
        mid_block_add_attention=True,
        latent_rows=64,
        latent_columns=64,
    )
    bfloat16, float32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    assert find_tile(small, bfloat16) is None and find_tile(small, float32) == 44
    assert find_tile(small.with_size(44, 44), float32) is None
    assert find_tile(small.with_size(64, 65), bfloat16) == 64
    assert find_tile(replace(small.with_size(64, 65), mid_block_add_attention=False), bfloat16) is None
