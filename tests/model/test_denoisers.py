"""Denoisers against diffusers: stored outputs, and the package where it is installed."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.config.denoisers import DenoiserConfig
from model.config.fields import Fields
from model.errors import ModelError
from model.families.registry import read
from model.families.tasks import DENOISER, TEXT_ENCODER
from model.loading.component import LoadedComponent
from model.runners.component import KernelComponent, ReferenceComponent
from tests.model.denoiser_oracles import CASES, PIXART, Case, read_recordings, record, write_folder

RECORDINGS = read_recordings()
UNIT = 2.0**-24
BFLOAT16_UNIT = 2.0**-9


def open_case(case: Case, folder: Path, dtype: str = "float32") -> LoadedComponent:
    """Write the folder of a case, and open it for the sizes of its inputs."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config))
    config = read(case.class_name, Fields(folder / "config.json"))
    assert isinstance(config, DenoiserConfig)
    from model.families import compose

    write_folder(folder, case.config, compose(config).list_tensor_shapes())
    model = LoadedComponent.open(folder, DENOISER, dtype)
    assert isinstance(model.config, DenoiserConfig)
    return model.resize(model.config.with_size(*case.size, case.text[0]))


def bound_error(expected: np.ndarray, unit: float, case: Case) -> float:
    """Return a bound of errors: a network of some ten layers adds up the rounding errors of each.

    A sinusoid of a number t has an error of up to 2^-22 * t in float32, here and in diffusers, times its frequency. The
    mean square of the frequencies from 1 to 1e-4 is 1 / (2 ln 10^4) = 0.23^2.
    """
    largest = max(*case.timesteps, *(case.guidance or ()), *chain.from_iterable(case.pixels))
    return (200 * unit + 0.25 * 2.0**-22 * largest) * float(np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_diffusers(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name], RECORDINGS[name][:, : CASES[name].channels]
    images = ReferenceComponent(open_case(case, tmp_path)).run(case.draw_inputs())["x"]
    assert images.dtype == np.float32
    np.testing.assert_allclose(images, expected, rtol=0, atol=bound_error(expected, UNIT, case))


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_recordings_are_those_of_diffusers(name: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    np.testing.assert_allclose(
        record(CASES[name]), RECORDINGS[name], rtol=0, atol=bound_error(RECORDINGS[name], UNIT, CASES[name])
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_diffusers(name: str, dtype: str, ranks: int, tmp_path: Path) -> None:
    from model.device import SimulatedDevice

    case, expected = CASES[name], RECORDINGS[name][:, : CASES[name].channels]
    model = open_case(case, tmp_path, dtype)
    device = SimulatedDevice("trn2", ranks)
    images = KernelComponent(model, device, len(case.timesteps)).run(case.draw_inputs())["x"]
    unit = UNIT if dtype == "float32" else BFLOAT16_UNIT
    np.testing.assert_allclose(
        images, expected, rtol=0, atol=bound_error(expected, unit, case) / (1 if ranks == 1 else 0.5)
    )
    reference = ReferenceComponent(model, ranks).run(case.draw_inputs())["x"]
    np.testing.assert_allclose(images, reference, rtol=0, atol=bound_error(expected, unit, case) / 2)


def test_bfloat16_weights_with_float32_activations(tmp_path: Path) -> None:
    from model.device import SimulatedDevice

    case = CASES["pixart"]
    model = open_case(case, tmp_path)
    write_folder(tmp_path, case.config, model.network.list_tensor_shapes(), ml_dtypes.bfloat16)
    model = LoadedComponent.open(tmp_path, DENOISER).resize(model.config)
    inputs = case.draw_inputs()
    images = KernelComponent(model, SimulatedDevice("trn2", 1), 2).run(inputs)["x"]
    expected = ReferenceComponent(model).run(inputs)["x"]
    np.testing.assert_allclose(images, expected, rtol=0, atol=bound_error(expected, UNIT, case))


@pytest.mark.parametrize(
    "name", ["pixart", "pixart with the size of images", "flux with guidance", "sd3", "dit"]
)
def test_images_of_a_batch_equal_the_images_alone(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    reference = ReferenceComponent(open_case(case, tmp_path))
    inputs = case.draw_inputs()
    together = reference.run(inputs)["x"]
    for index in range(2):
        alone = reference.run({name: array[index : index + 1] for name, array in inputs.items()})["x"]
        np.testing.assert_array_equal(alone[0], together[index])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_type": "ada_norm_zero"}, "norm_type: 'ada_norm_zero'; the only norms"),
        ({"activation_fn": "geglu"}, "activation_fn: 'geglu'"),
        ({"norm_elementwise_affine": True}, "norm_elementwise_affine: true"),
        (
            {"use_additional_conditions": True},
            "use_additional_conditions: true; 32 elements of a hidden state",
        ),
        (
            {"sample_size": 128, "use_additional_conditions": None},
            "use_additional_conditions: true; 32 elements",
        ),
        ({"sample_size": 9}, "sample_size: 9 is not a multiple of patch_size, 2"),
        ({"out_channels": 5}, "out_channels: 5 is neither in_channels, 4, nor twice"),
        ({"cross_attention_dim": 48}, "cross_attention_dim: 48 is not the hidden size, 32"),
        ({"num_layers": 0}, "num_layers: 0 is not a positive whole number"),
        ({"new_field": 3}, "new_field: the field is not known"),
        ({"_class_name": "UNet2DConditionModel"}, "_class_name: 'UNet2DConditionModel' is not known"),
    ],
)
def test_refuses_what_no_layer_computes(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    check_refusal(CASES["pixart"], fields, message, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_channels": 18}, "in_channels: 18 is no multiple of 4"),
        ({"out_channels": 8}, "out_channels: not 16 as in_channels"),
        ({"patch_size": 2}, "patch_size: not 1"),
        ({"axes_dims_rope": [4, 6]}, "axes_dims_rope: [4, 6] is not three even positive numbers"),
        ({"axes_dims_rope": [4, 5, 7]}, "axes_dims_rope: [4, 5, 7] is not three even positive numbers"),
        (
            {"axes_dims_rope": [4, 6, 8]},
            "axes_dims_rope: [4, 6, 8] adds up to 18, not to attention_head_dim, 16",
        ),
        ({"num_single_layers": 0}, "num_single_layers: 0 is not a positive whole number"),
        ({"guidance_embeds": 1}, "guidance_embeds: 1 is neither true nor false"),
        ({"new_field": 3}, "new_field: the field is not known"),
    ],
)
def test_refuses_flux_configs(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    check_refusal(CASES["flux with guidance"], fields, message, tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample_size": 9}, "sample_size: 9 is not a multiple of patch_size, 2"),
        ({"out_channels": 8}, "out_channels: 8 is not in_channels, 4"),
        ({"caption_projection_dim": 48}, "caption_projection_dim: 48 is not the hidden size, 32"),
        ({"qk_norm": "layer_norm"}, "qk_norm: 'layer_norm'; the only norm"),
        ({"pos_embed_max_size": 3}, "pos_embed_max_size: 3 is below 4"),
        ({"dual_attention_layers": [2]}, "dual_attention_layers: [2] is no list of numbers below 2"),
        ({"dual_attention_layers": 1}, "dual_attention_layers: 1 is no list of numbers below 2"),
        ({"new_field": 3}, "new_field: the field is not known"),
    ],
)
def test_refuses_sd3_configs(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    check_refusal(CASES["sd3"], fields, message, tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("dit", {"norm_type": "ada_norm_single"}, "norm_type: 'ada_norm_single'; the only norms"),
        ("dit", {"activation_fn": "geglu"}, "activation_fn: 'geglu'; the only activations"),
        ("dit", {"norm_elementwise_affine": True}, "norm_elementwise_affine: true"),
        ("dit", {"sample_size": 9}, "sample_size: 9 is not a multiple of patch_size, 2"),
        ("dit", {"num_embeds_ada_norm": 0}, "num_embeds_ada_norm: 0 is not a positive whole number"),
        ("dit", {"new_field": 3}, "new_field: the field is not known"),
        ("dit in a general class", {"norm_type": None}, "norm_type: not ada_norm_zero"),
        ("dit in a general class", {"double_self_attention": True}, "double_self_attention: true"),
        (
            "dit in a general class",
            {"attention_type": "gated"},
            "attention_type: 'gated'; the only attention",
        ),
    ],
)
def test_refuses_dit_configs(name: str, fields: dict[str, object], message: str, tmp_path: Path) -> None:
    check_refusal(CASES[name], fields, message, tmp_path)


def test_sd3_takes_as_many_patches_as_it_has_positions(tmp_path: Path) -> None:
    config = open_case(CASES["sd3"], tmp_path).config
    assert isinstance(config, DenoiserConfig)
    for columns in (12, 14):
        assert config.with_size(8, columns, 7).patches == (4, columns // 2)
    with pytest.raises(
        ModelError, match="latents of 8 x 16 have 4 x 8 patches; positions are stored for at most 7"
    ):
        config.with_size(8, 16, 7)


@pytest.mark.parametrize("fields", [{"out_channels": 16}, {"patch_size": 1}, {"out_channels": None}])
def test_accepts_fields_that_say_what_is_computed(fields: dict[str, object], tmp_path: Path) -> None:
    open_case(CASES["flux with guidance"], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CASES["flux with guidance"].config | fields))
    config = LoadedComponent.open(tmp_path, DENOISER).config
    assert isinstance(config, DenoiserConfig)
    assert (config.channels, config.outputs, config.patch_size) == (4, 4, 2)


def check_refusal(case: Case, fields: dict[str, object], message: str, folder: Path) -> None:
    """Check that the case is accepted, and that it is refused with `message` after `fields` of its config change."""
    open_case(case, folder)
    (folder / "config.json").write_text(json.dumps(case.config | fields))
    with pytest.raises(ModelError) as caught:
        LoadedComponent.open(folder, DENOISER)
    assert message in str(caught.value)


def test_refuses_a_component_for_another_task(tmp_path: Path) -> None:
    open_case(CASES["pixart"], tmp_path)
    with pytest.raises(ModelError, match="'PixArtTransformer2DModel' is not known"):
        LoadedComponent.open(tmp_path, TEXT_ENCODER)


def test_refuses_more_ranks_than_heads(tmp_path: Path) -> None:
    model = open_case(CASES["pixart"], tmp_path)
    assert model.config.refusal(2) is None
    assert model.config.refusal(3) == "3 ranks and 2 heads; give at most 2 ranks"
    assert PIXART["num_attention_heads"] == 2
