"""Ulysses ranks of denoisers: images equal those of one rank and of diffusers, weights, plans, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.denoisers import DenoiserConfig
from model.device import SimulatedDevice
from model.errors import ModelError
from model.layers.launch import Axis
from model.layers.shard import Shard
from model.loading.component import LoadedComponent
from model.loading.weights import check_ranks
from model.mesh import Mesh
from model.plan.images import plan_images
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.component import KernelComponent, ReferenceComponent
from model.runners.denoise import ImageRunner, Sampling
from model.runners.image_mesh import create_mesh
from model.runners.pipelines import open_pipeline
from nkw.commands import main
from tests.model.conftest import PRETRAINED
from tests.model.denoiser_oracles import CASES, Case
from tests.model.test_denoise import REQUESTS, folders  # noqa: F401
from tests.model.test_denoisers import BFLOAT16_UNIT, RECORDINGS, UNIT, bound_error, open_case
from tests.model.test_plan_images import configs  # noqa: F401

DIVISIBLE = ("pixart", "pixart with the size of images", "flux with guidance", "dit", "sd3")
"""Cases of four rows of patches and two heads, which two ranks divide; texts have seven rows."""
SECOND = "sd3 with second attention and head norms"
FOUR_HEADS = "flux without guidance, other sizes"


def divide(model: LoadedComponent, ulysses: int) -> LoadedComponent:
    """Return a denoiser whose rows Ulysses ranks divide."""
    assert isinstance(model.config, DenoiserConfig)
    return model.resize(replace(model.config, ulysses_ranks=ulysses))


def run(model: LoadedComponent, case: Case, ranks: int, groups: int = 1, images: int = 2) -> np.ndarray:
    """Return the output of kernels for the first images of a case, on so many ranks in all."""
    inputs = {name: array[:images] for name, array in case.draw_inputs().items()}
    output = KernelComponent(model, SimulatedDevice("trn2", ranks), images, groups=groups).run(inputs)["x"]
    assert output.dtype == np.float32
    return output


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in DIVISIBLE), ("pixart", "bfloat16"), ("flux with guidance", "bfloat16")],
)
def test_two_ranks_equal_one_and_diffusers(name: str, dtype: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, recorded = open_case(case, tmp_path, dtype), RECORDINGS[name][:, : case.channels]
    bound = bound_error(recorded, UNIT if dtype == "float32" else BFLOAT16_UNIT, case)
    images = run(divide(model, 2), case, 2)
    np.testing.assert_allclose(images, recorded, rtol=0, atol=bound)
    # One rank is as far from the recording. Rows and heads are computed alike; only the text's sums are divided.
    np.testing.assert_allclose(images, run(model, case, 1), rtol=0, atol=bound / 4)
    reference = ReferenceComponent(divide(model, 2), 2).run(case.draw_inputs())["x"]
    np.testing.assert_allclose(images, reference, rtol=0, atol=bound / 2)


@pytest.mark.parametrize(
    ("name", "ulysses", "tensor", "groups", "images"),
    [
        (SECOND, 2, 1, 1, 2),
        (FOUR_HEADS, 4, 1, 1, 2),
        (FOUR_HEADS, 2, 2, 1, 2),
        (FOUR_HEADS, 2, 1, 2, 1),
        ("pixart", 2, 1, 2, 2),
        ("pixart", 2, 1, 1, 1),
    ],
)
def test_ranks_combine_with_tensor_ranks_and_groups(
    name: str, ulysses: int, tensor: int, groups: int, images: int, tmp_path: Path
) -> None:
    """One image on two groups is computed by both."""
    case = replace(CASES[name], size=(8, CASES[name].size[1]))
    model = open_case(case, tmp_path)
    inputs = {key: array[:images] for key, array in case.draw_inputs().items()}
    expected = ReferenceComponent(model).run(inputs)["x"]
    output = run(divide(model, ulysses), case, ulysses * tensor * groups, groups, images)
    np.testing.assert_allclose(output, expected, rtol=0, atol=bound_error(expected, UNIT, case) / 2)


@pytest.mark.parametrize("name", ["pixart", "flux with guidance"])
def test_rows_of_text_are_rounded_to_fp8_as_the_numpy_model_says(name: str, tmp_path: Path) -> None:
    """A row is rounded by its columns on a rank: for texts that is half of them, for images all of them."""
    case = CASES[name]
    model = divide(open_case(case, tmp_path).quantise("fp8-dynamic", "trn2"), 2)
    images, inputs = run(model, case, 2), case.draw_inputs()
    expected = ReferenceComponent(model, 2).run(inputs)["x"]
    divided_alike = ReferenceComponent(divide(model, 1), 2).run(inputs)["x"]
    assert np.abs(images - expected).mean() < np.abs(images - divided_alike).mean() / 4


def test_pipelines_draw_the_images_of_one_rank(folders: dict[str, Path]) -> None:  # noqa: F811
    """Two groups with a pass of guidance each, of two Ulysses ranks; encoders have two tensor-parallel ranks."""
    pipeline, sampling = open_pipeline(folders["flow"]), Sampling(2)
    alone = ImageRunner(pipeline, KernelBackend(SimulatedDevice("trn2", 1))).draw(REQUESTS, sampling)
    divided = pipeline.with_ulysses_ranks(2)
    drawing = ImageRunner(divided, KernelBackend(SimulatedDevice("trn2", 4), 2)).draw(REQUESTS, sampling)
    expected = ImageRunner(divided, ReferenceBackend(2)).draw(REQUESTS, sampling)
    for compared in (alone, expected):
        np.testing.assert_allclose(drawing.latents, compared.latents, rtol=0, atol=1e-4)
        assert np.abs(drawing.images.astype(int) - compared.images).max() <= 1


def test_ranks_share_the_weights_of_images_and_divide_those_of_texts(tmp_path: Path) -> None:
    model = divide(open_case(CASES["flux with guidance"], tmp_path), 2)
    mesh = create_mesh(model.config, 2)
    first, second = (weights.arrays for weights in model.load_shards(mesh))
    (alone,) = (weights.arrays for weights in divide(model, 1).load_shards(Mesh()))
    assert {name for name in first if first[name] is not second[name]} >= {
        "single.0.text.attention.w_qkv",
        "single.0.text.mlp.w_up",
        "double.0.text.attention.w_o",
        "double.0.image.modulation.w",
    }
    for name in ("single.0.attention.w_qkv", "double.0.image.mlp.w_up", "patches.w"):
        assert first[name] is second[name] and np.array_equal(first[name], alone[name])
    up = np.concatenate([arrays["single.0.text.mlp.w_up"] for arrays in (first, second)], axis=1)
    assert np.array_equal(up, alone["single.0.mlp.w_up"])


def test_positions_of_a_checkpoint_are_those_of_a_ranks_rows(tmp_path: Path) -> None:
    model = divide(open_case(CASES["sd3"], tmp_path), 2)
    first, second = (
        weights.arrays["patches.positions"] for weights in model.load_shards(create_mesh(model.config, 2))
    )
    (alone,) = divide(model, 1).load_shards(Mesh())
    assert np.array_equal(np.concatenate([first, second]), alone.arrays["patches.positions"])


def test_shared_weights_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = divide(open_case(CASES["pixart"], tmp_path), 2)
    mesh = create_mesh(model.config, 2)
    (alone,) = divide(model, 1).load_shards(Mesh())
    needed = sum(array.nbytes for array in alone.arrays.values())
    monkeypatch.setattr("model.errors.memory_bytes", lambda: needed)
    model.load_shards(mesh)
    monkeypatch.setattr("model.errors.memory_bytes", lambda: needed - 1)
    with pytest.raises(ModelError, match="the weights of 2 ranks"):
        model.load_shards(mesh)


def test_neighbouring_groups_divide_rows() -> None:
    mesh = Mesh(tensor=2, data=4, ulysses=2)
    assert [mesh.shard(rank) for rank in range(4)] == [
        Shard(rank % 2, 2, ulysses_rank=rank // 2, ulysses_ranks=2) for rank in range(4)
    ]
    assert mesh.shards == [mesh.shard(rank) for rank in range(4)]
    assert mesh.list_groups(Axis.ulysses) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.list_groups(Axis.tensor) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.list_groups(Axis.flattened) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mesh.shard(rank).flattened.rank for rank in range(4)] == [0, 2, 1, 3]
    assert [mesh.count_group_sequences(count) for count in (1, 2, 3)] == [1, 1, 2]
    assert Mesh(2, 2).list_groups(Axis.ulysses) is None and Mesh().list_groups(Axis.flattened) is None


@pytest.mark.parametrize(
    ("ulysses", "tensor", "size", "heads", "message"),
    [
        (2, 1, (8, 8), 3, "2 Ulysses ranks do not divide 3 heads; give numbers whose product divides 3"),
        (2, 2, (8, 8), 2, "2 Ulysses ranks times 2 tensor-parallel ranks do not divide 2 heads"),
        (2, 1, (6, 8), 2, "2 Ulysses ranks do not divide 3 rows of patches of an image; give a divisor of 3"),
        (3, 1, (8, 6), 3, "3 Ulysses ranks do not divide 4 rows of patches"),
    ],
)
def test_refuses_what_ranks_do_not_divide(
    ulysses: int, tensor: int, size: tuple[int, int], heads: int, message: str, tmp_path: Path
) -> None:
    """The twin without Ulysses ranks is accepted: padding heads make up for tensor-parallel ranks."""
    model = open_case(CASES["pixart"], tmp_path)
    assert isinstance(model.config, DenoiserConfig)
    config = replace(model.config.with_size(*size, 7), heads=heads)
    check_ranks(config, tensor)
    check_ranks(replace(config.with_size(8, 8, 7), heads=4, ulysses_ranks=2), 2)
    with pytest.raises(ModelError, match=message):
        check_ranks(replace(config, ulysses_ranks=ulysses), tensor)


def test_the_commands_take_and_refuse_ranks(
    folders: dict[str, Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = tmp_path / "images.json"
    words = ["imagine", "a red circle", "--model", str(folders["flow"]), "--steps", "1"]
    assert main([*words, "--ulysses-degree", "2", "--json", str(document)]) == 0
    contents = json.loads(document.read_text())
    assert contents["difference"]["latents"] < 1e-4 and contents["difference"]["bytes"] <= 1
    assert "predicted on 2 cores" in capsys.readouterr().out
    for degree, message in (
        ("3", "3 Ulysses ranks do not divide"),
        ("32", "32 Ulysses ranks do not divide"),
        ("33", "--tp 1, --ulysses-degree 33 and --dp 1; one run takes 32 ranks at most"),
    ):
        assert main([*words, "--ulysses-degree", degree]) == 2
        assert message in capsys.readouterr().err


def test_plans_count_ranks_that_divide_rows(
    configs: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = tmp_path / "plan.json"
    words = ["plan", str(configs), "--instance", "trn2.3xlarge", "--lnc", "1", "--steps", "3"]
    assert main([*words, "--ulysses-degree", "2", "--json", str(document)]) == 0
    assert "on 2 ranks of trn2 (LNC 1), 2 by Ulysses" in capsys.readouterr().out
    contents: dict[str, Any] = json.loads(document.read_text())
    assert (contents["ranks"], contents["ulysses_ranks"], contents["copies"]) == (2, 2, 4)
    pipeline = open_pipeline(configs, "bfloat16", is_planned=True)
    alone, divided = (plan_images(pipeline, "trn2", 8, Sampling(3), ulysses=ulysses) for ulysses in (1, 2))
    assert alone.parameters == divided.parameters == contents["parameters"]
    # Keys and values of the text are computed by every rank.
    assert alone.work.operations / 2 < divided.work.operations < alone.work.operations
    assert divided.work.beside_weights == alone.work.beside_weights / 2
    assert main([*words, "--ulysses-degree", "3"]) == 2
    assert "3 Ulysses ranks do not divide" in capsys.readouterr().err


def test_plans_of_texts_refuse_ulysses_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(PRETRAINED / "stories-mask"), "--instance", "trn2.3xlarge"]
    assert main(words) == 0
    assert main([*words, "--ulysses-degree", "2"]) == 2
    assert "--ulysses-degree: only images of a diffusion model have it" in capsys.readouterr().err
