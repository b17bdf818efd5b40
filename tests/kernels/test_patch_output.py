"""patch_output: against diffusers, sizes of patches and channels, tokens around tiles and groups, ragged grids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import TARGETS, normal, run
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.diffusers_oracles import GRID, LAYERS, read_layer, record_layer


def tokens(
    images: int = 2,
    grid: tuple[int, int] = (2, 3),
    hidden: int = 20,
    patch: int = 2,
    stored: int = 3,
    dtype: type = F32,
    parameters: type | None = None,
    bias: bool = True,
    shared: bool = False,
    mean: float = 0.0,
    eps: float = 1e-6,
    columns_of_w: int | None = None,
) -> list[Any]:
    weights, columns = parameters or dtype, columns_of_w or patch * patch * stored
    modulated = 1 if shared else images
    return [
        (normal(1, images * grid[0] * grid[1], hidden) + F32(mean)).astype(dtype),
        normal(2, hidden, columns, dtype=weights, scale=hidden**-0.5),
        normal(3, modulated, hidden, dtype=weights, scale=0.3),
        normal(4, modulated, hidden, dtype=weights, scale=0.3),
        eps,
        *grid,
        patch,
        normal(5, 1, columns, dtype=weights) if bias else None,
    ]


class TestPatchOutput(KernelTests):
    case = KernelCase(
        kernels.patch_output,
        tokens,
        values=[
            *vary(dtype=[*DTYPES], parameters=[*DTYPES], bias=[True, False], shared=[True, False]),
            *vary(images=[1, 3], norm_offset=[0.0, 1.0], eps=0.5),
            *together("patch stored", (1, 1), (1, 128), (2, 16), (4, 3), (4, 31), (8, 1), dtype=[*DTYPES]),
            *vary(channels=[1, 2, 3], patch=[1, 2]),
            dict(patch=4, stored=32, channels=16),
            # tokens around a tile, around a group of tiles, and parts of a row
            *vary(grid=[(1, count) for count in (1, 2, 127, 128, 129, 511, 512, 513)], images=1),
            *vary(grid=[(3, 43), (5, 60), (7, 65), (9, 128)], images=1, dtype=[*DTYPES]),
            # outputs that leave room for fewer tiles in a PSUM bank
            *together("patch stored", (2, 31), (2, 32), (4, 10), (4, 11), (4, 15), (4, 16), grid=(4, 70)),
            *vary(hidden=[1, 2, 127, 128, 129, 172, 300]),
            dict(mean=10.0),
            *slow(dict(images=1, grid=(16, 32), hidden=1152, stored=8, channels=4, dtype=BF16)),
        ],
        refusals=[
            refuse("x [N * T, H]", x=normal(1, 20)),
            refuse("w [H, P * P * C]", w=normal(2, 20)),
            refuse("x has whole images of 2 x 3 patches, not 13 rows", x=normal(1, 13, 20)),
            refuse("w has 21 rows for a hidden size of 20", w=normal(2, 21, 12)),
            refuse("w has 12 columns, which patches of 5 x 5 do not divide", patch=5, columns_of_w=12),
            refuse("channels is 1 to 3, the channels of w, not 4", dict(channels=3), channels=4),
            refuse("channels is 1 to 3, the channels of w, not 0", dict(channels=1), channels=0),
            refuse("norm_weight is [2, 20] or [1, 20], not (3, 20)", norm_weight=normal(3, 3, 20)),
            refuse("norm_bias is [2, 20] or [1, 20], not (2, 19)", norm_bias=normal(3, 2, 19)),
            refuse("norm_weight [N, H]", norm_weight=normal(3, 20)),
            refuse("have the same number of rows", norm_bias=normal(3, 1, 20)),
            refuse("bias is [1, 12], not (1, 11)", bias=normal(3, 1, 11)),
        ],
        limits=[
            limit("images", 128, "at most 128 images, not 129", grid=(1, 1)),
            limit("hidden", 4096, "a hidden size of at most 4096, not 4097", dry=True),
            limit("stored", 128, "at most 128 elements of all channels, not 129", patch=1),
            limit("stored", 31, "patches of at most 511 elements, not 512", patch=4),
            limit(
                "columns_of_w",
                1536,
                "w [512, 1540] takes 24640 bytes of a partition, more than 24576",
                step=4,
                dry=True,
                hidden=512,
                channels=1,
            ),
        ],
        fits=[
            dict(images=128, grid=(1, 130), hidden=4096, columns_of_w=192, channels=4),
            dict(images=128, grid=(1, 130), hidden=4096, columns_of_w=384, channels=4, dtype=BF16),
        ],
        # a token reaches those of its tile, and no other image
        undefined=[Undefined({"x": np.s_[3]}, dict(dtype=dtype), rows=[0]) for dtype in DTYPES],
        two_cores=[dict(), dict(images=1), dict(images=3, grid=(5, 200), dtype=BF16)],
    )


def test_variance_of_equal_elements_is_not_negative() -> None:
    """The mean of squares and the square of the mean cancel, up to roundings of either sign."""
    arguments = tokens(images=1, grid=(1, 7))
    arguments[0] = np.repeat(np.linspace(-300, 300, 7, dtype=F32)[:, None], 20, axis=1)
    assert np.isfinite(kernels.patch_output(*arguments)).all()


def test_permuted_columns_give_images_that_flux_packs() -> None:
    """FLUX packs rows, u, columns, v of each channel as (row, column, channel, u, v)."""
    arguments = tokens(images=2, stored=4)
    x, w, scale, shift, eps, rows, columns, patch, bias = arguments
    normalised = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
    modulated = normalised.reshape(2, 6, -1) * (scale[:, None] + 1) + shift[:, None]
    packed = modulated @ w + bias
    images = packed.reshape(2, rows, columns, 4, patch, patch).transpose(0, 3, 1, 4, 2, 5)
    order = np.arange(16).reshape(4, 2, 2).transpose(1, 2, 0).ravel()
    permuted = [x, w[:, order], scale, shift, eps, rows, columns, patch, bias[:, order]]
    y = kernels.patch_output(*permuted)
    largest = (np.abs(modulated) @ np.abs(w) + np.abs(bias)).max()
    assert np.abs(y - images.reshape(y.shape)).max() <= (4 * 20 + 64) * 2.0**-24 * largest


def check_layer(name: str, layer: dict[str, np.ndarray], target: str) -> None:
    """Compare a denoiser's last layer with diffusers: at most 64 roundings beside those of sums of 16 terms."""
    table, w, bias = (layer.get(key) for key in ("table", "modulation_w", "modulation_bias"))
    first, second = run(kernels.modulation, (layer["conditions"], w, bias, table, 2), target)
    shift, scale = (first, second) if name == "pixart" else (second, first)
    arguments = (layer["x"], layer["w"], scale, shift, 1e-6, *GRID, 2, layer["bias"])
    hidden = layer["x"].shape[1]
    magnitudes = np.abs(scale).max() + 1 + np.abs(shift).max()
    # Normalised elements are at most the root of their number.
    largest = np.sqrt(hidden) * magnitudes * np.abs(layer["w"]).sum(0).max() + np.abs(layer["bias"]).max()
    for y in (run(kernels.patch_output, arguments, target), kernels.patch_output_reference(*arguments)):
        assert y.shape == layer["y"].shape
        assert np.abs(y - layer["y"]).max() <= (4 * hidden + 64) * 2.0**-24 * largest


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYERS)
def test_last_layers_are_those_of_diffusers(name: str, target: str) -> None:
    check_layer(name, read_layer(name), target)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_last_layers_are_those_of_installed_diffusers(name: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    check_layer(name, record_layer(name), "trn2")
