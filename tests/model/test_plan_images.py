"""`nkw plan` for diffusion models: passes, times and prices of images, without weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from model.device import DryDevice, chip
from model.errors import ModelError
from model.mesh import Mesh
from model.plan.images import plan_images
from model.plan.prices import Price
from model.runners import rank_memory
from model.runners.denoise import Sampling
from model.runners.pipelines import open_pipeline
from nkw.commands import main
from tests.model.pipeline_folders import edit
from tests.model.test_denoise import folders  # noqa: F401


@pytest.fixture
def configs(folders: dict[str, Path], tmp_path: Path) -> Path:  # noqa: F811
    """Return a folder of configs alone, without weights and tokenizer."""
    folder = Path(shutil.copytree(folders["flow"], tmp_path / "configs"))
    for path in (*folder.glob("*/*.safetensors"), *folder.glob("tokenizer/*")):
        path.unlink()
    return folder


def test_times_add_up(configs: Path) -> None:
    pipeline = open_pipeline(configs, "bfloat16", is_planned=True)
    plan = plan_images(pipeline, "trn2", 8, Sampling(5), images=2, ranks=2, price=Price(36.0))
    assert [(time.name, time.passes, time.batch) for time in plan.components] == [
        ("text_encoder", 1, 4),
        ("denoiser", 5, 4),
        ("autoencoder", 1, 2),
    ]
    assert plan.total_ns == sum(time.total_ns for time in plan.components)
    assert plan.copies == 4
    assert plan.images_per_second == pytest.approx(4 * 2 / (plan.total_ns * 1e-9))
    assert plan.dollars_per_thousand == pytest.approx(0.01 * 1000 / plan.images_per_second)
    assert plan.weight_bytes == 2 * plan.parameters


def test_fewer_steps_save_passes_of_the_denoiser_alone(configs: Path) -> None:
    pipeline = open_pipeline(configs, is_planned=True)
    many, few = (plan_images(pipeline, "trn2", 8, Sampling(steps)) for steps in (50, 8))
    (text, denoiser, autoencoder), (text_again, few_passes, autoencoder_again) = (
        [time.total_ns for time in plan.components] for plan in (many, few)
    )
    assert (text, autoencoder) == (text_again, autoencoder_again)
    assert few_passes == pytest.approx(denoiser * 8 / 50)


def test_the_command_plans_a_folder_without_weights(
    configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "plan.json"
    words = ["plan", str(configs), "--instance", "inf2.xlarge", "--tp", "2", "--steps", "3"]
    assert main([*words, "--json", str(document)]) == 0
    text = capsys.readouterr().out
    assert "one image of 16x16 pixels, 16 tokens, on 2 ranks of inf2" in text and "$ for 1,000 images" in text
    assert max(map(len, text.splitlines())) <= 80
    contents = json.loads(document.read_text())
    assert contents["copies"] == 1 and contents["ranks"] == 2
    assert contents["total_ns"] == pytest.approx(sum(entry["total_ns"] for entry in contents["components"]))


@pytest.fixture
def limit_hbm(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the bytes of HBM of each core."""
    chips = {target: chip(target) for target in ("trn1", "inf2", "trn2")}
    changed: dict[str, int] = {}
    monkeypatch.setattr(
        rank_memory,
        "chip",
        lambda target: SimpleNamespace(
            hbm_bytes_per_core=changed.get("bytes", chips[target].hbm_bytes_per_core)
        ),
    )
    return lambda nbytes: changed.update(bytes=nbytes)


def test_weights_of_a_rank_are_those_that_it_loads(folders: dict[str, Path]) -> None:  # noqa: F811
    pipeline = open_pipeline(folders["flow"], "bfloat16")
    for ranks in (1, 2):
        loaded = [component.load_shards(Mesh(ranks))[0] for component in pipeline.components]
        nbytes = sum(array.nbytes for weights in loaded for array in weights.arrays.values())
        assert rank_memory.RankMemory.measure(pipeline.components, "trn2", ranks).weight_bytes == nbytes


@pytest.mark.parametrize(
    ("spare", "refusal"), [(-1, "a pass of the autoencoder over a batch of 2"), (0, None), (1, None)]
)
def test_weights_and_activations_fit_into_hbm(
    spare: int, refusal: str | None, configs: Path, limit_hbm: Callable[[int], None]
) -> None:
    pipeline = open_pipeline(configs, "bfloat16", is_planned=True)
    plan = plan_images(pipeline, "trn2", 8, Sampling(1), images=2)
    largest = max(plan.components, key=lambda component: component.activation_bytes)
    assert largest.name == "autoencoder" and plan.memory.hbm_bytes == chip("trn2").hbm_bytes_per_core
    limit_hbm(plan.memory.weight_bytes + largest.activation_bytes + spare)
    if refusal is None:
        assert plan_images(pipeline, "trn2", 8, Sampling(1), images=2).total_ns == plan.total_ns
        return
    with pytest.raises(ModelError, match=refusal) as caught:
        plan_images(pipeline, "trn2", 8, Sampling(1), images=2)
    assert "give fewer or smaller images, more ranks (--tp), or weights of fewer bits" in str(caught.value)
    assert plan_images(pipeline, "trn2", 8, Sampling(1), images=1).images == 1
    assert plan_images(pipeline, "trn2", 8, Sampling(1), images=2, lnc=2).memory.fits(
        largest.activation_bytes
    )


@pytest.mark.parametrize(("spare", "is_refused"), [(-1, True), (0, False), (1, False)])
def test_weights_alone_are_refused_before_any_dry_run(
    spare: int,
    is_refused: bool,
    configs: Path,
    limit_hbm: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline = open_pipeline(configs, "bfloat16", is_planned=True)
    alone, shared = (rank_memory.RankMemory.measure(pipeline.components, "inf2", ranks) for ranks in (1, 2))
    assert shared.weight_bytes < alone.weight_bytes
    words = ["plan", str(configs), "--instance", "inf2.xlarge", "--steps", "1"]
    limit_hbm(alone.weight_bytes + spare)
    monkeypatch.setattr(DryDevice, "run", lambda device, *arguments: 1 / 0)
    if not is_refused:
        with pytest.raises(ModelError, match="a pass of the denoiser"):
            plan_images(pipeline, "inf2", 2, Sampling(1))
        return
    assert main(words) == 2
    message = capsys.readouterr().err
    assert f"the weights take {alone.weight_bytes:,} bytes of HBM; a rank of inf2 (LNC 1) has" in message
    assert "give more ranks (--tp), or weights of fewer bits" in message
    with pytest.raises(ZeroDivisionError):
        main([*words, "--tp", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pp", "2"], "--pp: images are planned on tensor and Ulysses ranks of one instance"),
        (["--prompt", "7"], "--prompt: images are planned"),
        (["--tp", "3"], "3 ranks"),
        (["--size", "32x32"], "its sizes are 16x16"),
        (["--steps", "1001"], "steps 1001"),
        (["--instance", "trn1.2xlarge,trn1.32xlarge"], "on one instance, not on 2"),
    ],
)
def test_refuses_options_of_texts(
    words: list[str], message: str, configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(configs), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("images", "refusal"), [(63, None), (64, None), (65, "at most 128 images, not 130"), (1024, "not 2048")]
)
def test_a_batch_that_a_kernel_refuses_is_refused_before_any_dry_run(
    images: int, refusal: str | None, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of the denoiser takes up to 128 images; guidance takes two for each image of the batch."""
    launches: list[str] = []
    monkeypatch.setattr(DryDevice, "run", lambda device, kernel, *arguments: launches.append(kernel) or 1 / 0)
    pipeline = open_pipeline(configs, is_planned=True)
    with pytest.raises(ZeroDivisionError if refusal is None else ModelError, match=refusal):
        plan_images(pipeline, "trn2", 8, Sampling(2), images)
    assert bool(launches) == (refusal is None)


@pytest.mark.parametrize(("sample_size", "refusal"), [(128, None), (1000, "not 250000"), (100_000, " GB")])
def test_a_large_size_is_refused_before_any_dry_run(
    sample_size: int, refusal: str | None, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DryDevice, "run", lambda device, *arguments: 1 / 0)
    edit(configs / "transformer" / "config.json", sample_size=sample_size)
    pipeline = open_pipeline(configs, is_planned=True)
    with pytest.raises(ZeroDivisionError if refusal is None else ModelError, match=refusal):
        plan_images(pipeline, "trn2", 8, Sampling(2))


def test_a_plan_of_texts_has_no_steps_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stories", "--steps", "7"]) == 2
    assert "--steps: only images of a diffusion model have it" in capsys.readouterr().err


def test_configs_published_under_an_older_class(configs: Path) -> None:
    edit(
        configs / "transformer" / "config.json", _class_name="Transformer2DModel", norm_type="ada_norm_single"
    )
    edit(configs / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    assert open_pipeline(configs, is_planned=True).image_size == (16, 16)
