"""AutoencoderKL: both halves against diffusers, by the reference and by kernels, and what folders are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.autoencoder import AutoencoderConfig, Half
from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import compose
from model.families.tasks import AUTOENCODER, DENOISER
from model.layers.image.convolution import ImageSize
from model.layers.image.normalization import GroupNorm
from model.layers.launch import FLOAT32, WeightDtypes
from model.loading.component import LoadedComponent, read_component
from model.mesh import Mesh
from model.runners.component import KernelComponent, ReferenceComponent, make_step
from model.runners.tiling import TiledComponent
from tests.model.autoencoder_oracles import (
    CONFIGS,
    LATENT,
    STORED,
    compute_oracles,
    draw_images,
    draw_latents,
    write_folder,
)

ORACLES = np.load(STORED)
CASES = [pytest.param(case, half, id=f"{case}-{half.value}") for case in CONFIGS for half in Half]


def list_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of diffusers' tensors by name."""
    rows = (row.split(" ", 1) for row in ORACLES[f"{case} names"])
    return {name: tuple(map(int, re.findall(r"\d+", shape))) for name, shape in rows}


def open_half(folder: Path, half: Half, dtype: str = "float32") -> LoadedComponent:
    """Return one half of a folder, for latents of LATENT."""
    model = LoadedComponent.open(folder, AUTOENCODER, dtype)
    assert isinstance(model.config, AutoencoderConfig)
    return model.reopen(model.config.with_half(half).with_size(*LATENT))


def check(case: str, half: Half, dtype: str, computed: np.ndarray) -> None:
    """Compare with the float64 result of diffusers, by the errors that diffusers has in the same dtype.

    In float32 the largest error may be four times as large: sums are taken in other orders, and the errors of two
    orders differ as random numbers do. In bfloat16 the mean over thousands of elements may be a quarter larger.
    """
    key = f"{case} {half.value}"
    errors = np.abs(computed - ORACLES[key])
    largest, mean = ORACLES[f"{key} errors"]
    if dtype == "float32":
        assert errors.max() <= 4 * largest
    else:
        assert errors.mean() <= 1.25 * mean


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "half"), CASES)
def test_the_reference_computes_what_diffusers_does(
    case: str, half: Half, dtype: str, tmp_path: Path
) -> None:
    model = open_half(write_folder(tmp_path, case, list_shapes(case)), half, dtype)
    check(case, half, dtype, ReferenceComponent(model).run(draw_inputs(case, half))["x"])


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 2), ("bfloat16", 1)])
@pytest.mark.parametrize(("case", "half"), CASES)
def test_kernels_compute_what_diffusers_does(
    case: str, half: Half, dtype: str, ranks: int, tmp_path: Path
) -> None:
    model = open_half(write_folder(tmp_path, case, list_shapes(case)), half, dtype)
    kernels = KernelComponent(model, SimulatedDevice("trn2", ranks), batch=2)
    check(case, half, dtype, kernels.run(draw_inputs(case, half))["x"])


@pytest.mark.parametrize("half", Half)
def test_tiles_are_blended_as_in_diffusers(half: Half, tmp_path: Path) -> None:
    """Tiles of 4 x 4 latents begin at rows 0 and 3 and columns 0, 3 and 6: four sizes."""
    model = open_half(write_folder(tmp_path, "plain", list_shapes("plain")), half)
    sizes = []
    tiled = tile_reference(model, sizes)
    check("plain tiled", half, "float32", tiled.run(draw_inputs("plain", half))["x"])
    assert sizes == [(4, 4), (4, 1), (2, 4), (2, 1)]


@pytest.mark.parametrize("half", Half)
def test_equal_tiles_need_one_size(half: Half, tmp_path: Path) -> None:
    """Where one tile covers a pixel alone, its own result counts; between tiles lies a mean of both."""
    model = open_half(write_folder(tmp_path, "plain", list_shapes("plain")), half)
    sizes = []
    ((name, source),) = draw_inputs("plain", half).items()
    images = tile_reference(model, sizes, equal_tiles=True).run({name: source})["x"]
    assert sizes == [(4, 4)]
    (scale, result_scale) = (1, 4) if half is Half.decoder else (4, 1)
    tile = tile_reference(model, []).run({name: source[:, :, : 4 * scale, : 4 * scale]})["x"]
    np.testing.assert_array_equal(
        images[:, :, :result_scale, :result_scale], tile[:, :, :result_scale, :result_scale]
    )
    last = tile_reference(model, []).run({name: source[:, :, -4 * scale :, -4 * scale :]})["x"]
    np.testing.assert_array_equal(
        images[:, :, -result_scale:, -result_scale:], last[:, :, -result_scale:, -result_scale:]
    )
    assert images.shape[2:] == (5 * result_scale, 7 * result_scale)


def test_images_of_one_tile_are_not_cut(tmp_path: Path) -> None:
    model = open_half(write_folder(tmp_path, "plain", list_shapes("plain")), Half.decoder)
    sizes = []
    tile_reference(model, sizes, tile=8).run({"latents": draw_latents("plain")})
    assert sizes == [LATENT]


@pytest.mark.parametrize("tile", [3, 5, 0])
def test_tiles_have_quarters(tile: int, tmp_path: Path) -> None:
    model = open_half(write_folder(tmp_path, "plain", list_shapes("plain")), Half.encoder)
    with pytest.raises(ModelError, match=f"a tile has {tile} rows of latents"):
        tile_reference(model, [], tile=tile)
    tiled = tile_reference(model, [], tile=4)
    with pytest.raises(ModelError, match="images of 20 x 27 pixels; both are multiples of 4"):
        tiled.run({"images": draw_images("plain")[:, :, :, 1:]})


def tile_reference(model: LoadedComponent, sizes: list[tuple[int, int]], **options: Any) -> TiledComponent:
    """Return a half that computes tiles with the reference, and appends each size that it is created for to `sizes`."""
    config = model.config
    assert isinstance(config, AutoencoderConfig)

    def create(rows: int, columns: int) -> ReferenceComponent:
        sizes.append((rows, columns))
        return ReferenceComponent(model.resize(config.with_size(rows, columns)))

    return TiledComponent(create, config, **options)


def draw_inputs(case: str, half: Half) -> dict[str, np.ndarray]:
    """Return a batch of two inputs of a half."""
    return {"latents": draw_latents(case)} if half is Half.decoder else {"images": draw_images(case)}


@pytest.mark.deep
def test_stored_results_are_those_of_diffusers() -> None:
    pytest.importorskip("diffusers")
    oracles = compute_oracles()
    assert oracles.keys() == set(ORACLES)
    for name, oracle in oracles.items():
        if name.endswith(" errors"):  # depends on the order of sums of the processor
            continue
        if oracle.dtype.kind == "f":
            np.testing.assert_allclose(ORACLES[name], oracle, rtol=1e-6, atol=1e-6)
        else:
            assert np.array_equal(ORACLES[name], oracle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(down_block_types=["AttnDownEncoderBlock2D"] * 3), "down_block_types: 'AttnDownEncoderBlock2D'"),
        (
            dict(up_block_types=["UpBlock2D"] * 3),
            "up_block_types: 'UpBlock2D' is not computed; UpDecoderBlock2D",
        ),
        (dict(up_block_types=["UpDecoderBlock2D"] * 2), "up_block_types: .* is not a list of 3"),
        (dict(block_out_channels=[]), "block_out_channels: .* is not a list of 1 to 8 whole numbers"),
        (
            dict(block_out_channels=[16, 32, True]),
            "block_out_channels: .* is not a list of 1 to 8 whole numbers",
        ),
        (dict(act_fn="mish"), "act_fn: 'mish' is not computed"),
        (dict(latents_mean=[0.0] * 4), "latents_mean: scaling of latents by channel is not computed"),
        (dict(latents_std=[1.0] * 4), "latents_std: scaling of latents by channel is not computed"),
        (dict(norm_num_groups=5), "norm_num_groups: 5 groups do not divide a block's 16 channels"),
        (dict(sample_size=3), "sample_size: 3 is less than a pixel of a latent, which has 4"),
        (dict(scaling_factor=0), "scaling_factor: 0 is not a positive number"),
        (dict(shift_factor="1"), "shift_factor: '1' is not a finite number"),
        (dict(force_upcast=1), "force_upcast: 1 is neither true nor false"),
        (dict(patch_size=2), "patch_size: the field is not known"),
    ],
)
def test_refuses_what_no_layer_computes(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "plain", list_shapes("plain"))
    assert read_component(tmp_path, AUTOENCODER).refusals == ()
    write_folder(tmp_path, "plain", {}, **changes)
    with pytest.raises(ModelError, match=message):
        read_component(tmp_path, AUTOENCODER)


def test_refuses_an_autoencoder_as_another_component(tmp_path: Path) -> None:
    write_folder(tmp_path, "plain", list_shapes("plain"))
    with pytest.raises(ModelError, match="_class_name: 'AutoencoderKL' is not known"):
        read_component(tmp_path, DENOISER)


def test_absent_fields_have_the_values_of_diffusers(tmp_path: Path) -> None:
    changes = {name: ... for name in CONFIGS["plain"] if name != "_class_name"}
    write_folder(tmp_path, "plain", {}, **changes | {"block_out_channels": [64]})
    config = read_component(tmp_path, AUTOENCODER)
    assert isinstance(config, AutoencoderConfig)
    assert (config.latent_channels, config.latent_rows, config.spatial_scale, config.rows) == (4, 32, 1, 1024)
    assert (config.scaling_factor, config.shift_factor, config.layers_per_block) == (0.18215, 0.0, 1)
    assert config.use_quant_conv and config.use_post_quant_conv and config.force_upcast
    assert config.mid_block_add_attention


def test_a_config_has_the_size_of_its_latents(tmp_path: Path) -> None:
    model = open_half(write_folder(tmp_path, "plain", list_shapes("plain")), Half.decoder)
    config = model.config
    assert isinstance(config, AutoencoderConfig)
    assert (config.rows, config.sample_size, config.refusal(3)) == (35, 16, None)
    with pytest.raises(ModelError, match="a latent has 0 rows and 1 columns"):
        config.with_size(0, 1)
    assert config.with_size(1, 1).rows == 1


def list_kernels(model: LoadedComponent) -> list[list[str]]:
    """Return the kernels of each layer's launches."""
    (shard,) = model.load_shards(Mesh(1))
    step = make_step(model.config, shard.dtype, shard.dtypes)
    return [[launch.kernel for launch in layer.launches(step)] for layer in compose(model.config).layers]


def test_sums_and_norms_of_many_channels_are_no_launches(tmp_path: Path) -> None:
    """A residual block has two launches, and a third one where the number of channels changes."""
    model = open_half(write_folder(tmp_path, "attention", list_shapes("attention")), Half.decoder)
    kernels = list_kernels(model)
    assert kernels.count(["conv2d"] * 2) == 2 + 2 * 2 - 1
    assert kernels.count(["conv2d"] * 3) == 1
    assert kernels.count(["group_norm", *["conv1d"] * 3, "attention_prefill", "conv2d"]) == 1
    assert sum(map(len, kernels)) == 1 + 2 * 5 + 3 + 6 + 1 + 1


def test_norms_of_few_channels_are_launches(tmp_path: Path) -> None:
    """64 channels leave room for two taps on the partitions, 65 do not."""
    model = open_half(write_folder(tmp_path, "plain", list_shapes("plain")), Half.decoder)
    assert list_kernels(model).count(["group_norm", "conv2d"] * 2) == 2 + 2 * 3 - 1
    fused = [GroupNorm("", "", ImageSize(channels, 3, 3), channels).is_fused for channels in (63, 64, 65, 66)]
    assert fused == [False, False, True, True]


def test_norms_whose_groups_lie_across_tiles_are_launches(tmp_path: Path) -> None:
    """Of 140 channels 70 are on the partitions at a time: groups of 35 fit there, groups of 28 do not."""
    for groups, launches in ((4, 1), (5, 2)):
        changes = dict(block_out_channels=[140], norm_num_groups=groups, mid_block_add_attention=False)
        folder = tmp_path / str(groups)
        write_folder(folder, "plain", {}, **changes, down_block_types=..., up_block_types=...)
        config = read_component(folder, AUTOENCODER)
        assert isinstance(config, AutoencoderConfig)
        step = make_step(config, FLOAT32, WeightDtypes(FLOAT32))
        *_, block, output = compose(config).layers
        assert len(block.launches(step)) == 2 * launches and len(output.launches(step)) == launches
        assert output.launches(step)[-1].refusal is None
        measured = [launch.results for launch in block.launches(step) if len(launch.results) == 2]
        assert measured == ([("inner", "inner_moments"), ("x", "x_moments")] if launches == 1 else [])


@pytest.mark.parametrize("missing", ["decoder.conv_in.bias", "decoder.mid_block.resnets.1.conv2.weight"])
def test_refuses_a_missing_tensor_of_its_half(missing: str, tmp_path: Path) -> None:
    shapes = list_shapes("plain")
    del shapes[missing]
    folder = write_folder(tmp_path, "plain", shapes)
    with pytest.raises(ModelError, match="is missing; a AutoencoderKL has it"):
        LoadedComponent.open(folder, AUTOENCODER)
