"""conv1d and conv2d: ragged channels, strides and padding, every activation, both orders of the product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels.conv2d import compute_moments_reference
from nki_kernels.convolution.packing import choose_pack
from nki_kernels.convolution.windows import Windows, choose_stripe_sizes, choose_tile_sizes
from tests.kernels.accuracy import normal, run, whole_numbers
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    MIXED_DTYPES,
    KernelCase,
    KernelTests,
    Settings,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)


def images(
    shape: tuple[int, ...] = (1, 6, 20),
    outputs: int = 8,
    window: tuple[int, ...] = (3,),
    stride: Any = 1,
    padding: Any = 0,
    dtype: Any = F32,
    weights: Any = None,
) -> tuple[Any, ...]:
    """Return images or sequences, weights whose sums are of the order of 1, and a bias."""
    scale, weight_dtype = (shape[1] * np.prod(window)) ** -0.5, weights or dtype
    w = normal(2, *window, shape[1], outputs, dtype=weight_dtype, scale=scale)
    return normal(1, *shape, dtype=dtype), w, normal(3, 1, outputs, dtype=weight_dtype), stride, padding


def sequences(
    count: int = 1,
    channels: int = 6,
    length: int = 20,
    outputs: int = 8,
    taps: int = 3,
    stride: int = 1,
    padding: int = 0,
    dtype: Any = F32,
    weights: Any = None,
) -> tuple[Any, ...]:
    return images((count, channels, length), outputs, (taps,), stride, padding, dtype, weights)


def without_bias(_: np.ndarray) -> None:
    return None


SIZES = [1, 127, 128, 129, 300]
BANKS = [511, 512, 513, 1025]
CHANNELS = [1, 3, 21, 22, 42, 43, 64, 65, 80]
ROWS = [False, True]
ADDED = [
    dict(added=normal(4, 30, 24, dtype=weights), as_rows=True, dtype=dtype, weights=weights)
    for dtype, weights in MIXED_DTYPES
]


def whisper(mels: int, width: int, dtype: type) -> list[Settings]:
    """Return both convolutions of Whisper."""
    same = dict(outputs=width, length=3000, padding=1, activation="gelu", dtype=dtype)
    rows = dict(as_rows=True, added=lambda _: np.broadcast_to(np.zeros((), dtype), (1500, width)))
    return [dict(channels=mels) | same, dict(channels=width, stride=2) | same | rows]


class TestConv1d(KernelTests):
    """Taps of few channels are packed; 512 outputs, so that packs pay. `as_rows` is the other order of the product."""

    case = KernelCase(
        kernels.conv1d,
        sequences,
        values=[
            *(
                dict(count=2, channels=20, length=60, outputs=24, stride=2, padding=1, activation="gelu")
                | more
                for more in ADDED
            ),
            *vary(channels=SIZES, padding=1, as_rows=ROWS),
            *vary(outputs=SIZES, padding=1, as_rows=ROWS),
            *vary(length=SIZES, padding=1, as_rows=ROWS),
            *vary(channels=5, length=BANKS, padding=1),
            *vary(channels=5, outputs=BANKS, padding=1, as_rows=True),
            *together(
                "taps stride padding",
                *((1, 1, 0), (3, 2, 1), (5, 1, 4), (1, 2, 0)),
                count=2,
                length=30,
                outputs=7,
                as_rows=ROWS,
            ),
            *vary(length=30, activation=[None, "silu", "gelu", "gelu_tanh", "relu"], as_rows=ROWS),
            *vary(
                length=30,
                activation=[None, "silu", "gelu", "gelu_tanh", "relu"],
                as_rows=ROWS,
                bias=without_bias,
            ),
            *together(
                "taps stride padding",
                *((7, 2, 3), (4, 4, 0), (5, 3, 1)),
                count=2,
                channels=CHANNELS,
                length=40,
                outputs=512,
                activation="gelu",
                as_rows=True,
            ),
        ],
        every_chip=[
            *(
                dict(count=2, channels=20, length=60, outputs=24, stride=2, padding=1, activation="gelu")
                | more
                for more in together("dtype weights", *MIXED_DTYPES)
            ),
            *vary(count=[1, 2, 3, 5], channels=12, length=2600, outputs=24, padding=1),
        ],
        refusals=[
            refuse(
                "expected x [N, C, L] or [N, C, H, W], not a tensor of shape (6, 20)", x=np.ones((6, 20), F32)
            ),
            refuse("w has 5 input channels for x of 6", w=np.ones((3, 5, 8), F32)),
            refuse("bias is [1, 8], not (1, 9)", bias=np.ones((1, 9), F32)),
            refuse("conv1d takes windows and strides from 1 and padding from 0 on, not ", stride=0),
            refuse(
                "padding of conv1d is 3; pass less than the window, which is 3", dict(padding=2), padding=3
            ),
            refuse("a window of 21 does not fit into 20 padded elements", dict(taps=20), taps=21),
            refuse("activation is silu, gelu, gelu_tanh, gelu_sigmoid or relu, not tanh", activation="tanh"),
            refuse(
                "conv1d adds to rows alone; set as_rows",
                dict(added=normal(4, 18, 8), as_rows=True),
                as_rows=False,
            ),
            refuse(
                "added has to be [18, 8], not (19, 8)",
                dict(added=normal(4, 18, 8), as_rows=True),
                added=normal(4, 19, 8),
            ),
        ],
        limits=[
            limit(
                "taps",
                taps,
                f"{taps + 1} taps of {channels} channels take ",
                dry=True,
                channels=channels,
                length=2000,
                outputs=300,
                stride=2,
                padding=1,
                dtype=dtype,
                bias=without_bias,
            )
            # 640 taps of half the channels: two on the partitions, without room for other stripes
            for taps, channels, dtype in ((160, 128, F32), (320, 128, BF16), (640, 64, BF16))
        ],
        fits=[
            *vary(channels=64, length=2000, outputs=300, taps=[320, 321], stride=2, padding=1, dtype=BF16),
            *(
                setting
                for mels, width in ((80, 384), (128, 1280))
                for dtype in DTYPES
                for setting in whisper(mels, width, dtype)
            ),
        ],
        two_sums=[
            *vary(channels=20, length=60, outputs=200, stride=2, padding=1, as_rows=ROWS),
        ],
    )


def padded(
    shape: tuple[int, ...], outputs: int, window: tuple[int, ...] = (3, 3), **settings: Any
) -> Settings:
    return dict(shape=shape, outputs=outputs, window=window, stride=(1, 1), padding=(1, 1)) | settings


class TestConv2d(KernelTests):
    """Stripes of rows, columns and images share the array, in groups of 32 and of 64 rows and columns, full and not.

    A last load has fewer stripes, and stripes have fewer tiles: of 19 tiles, two for each of two groups of rows, the
    last stripe has one.
    """

    case = KernelCase(
        kernels.conv2d,
        images,
        every_chip=[
            *(
                dict(
                    shape=(2, 20, 9, 11),
                    outputs=24,
                    window=(3, 2),
                    stride=(2, 1),
                    padding=(1, 1),
                    activation="gelu",
                )
                | more
                for more in together("dtype weights", *MIXED_DTYPES)
            ),
            *(
                padded((3, channels, 22, 40), outputs)
                for channels, outputs in (
                    *((10, 31), (11, 32), (21, 33), (22, 63), (43, 64)),
                    *((64, 65), (32, 127), (33, 128), (64, 129), (64, 160)),
                )
            ),
        ],
        values=[
            *(padded((1, 5, 1, size), 8, (1, 3), padding=(0, 1)) for size in BANKS),
            *together(
                "window stride padding",
                ((1, 1), (1, 1), (0, 0)),
                ((3, 3), (2, 2), (1, 1)),
                ((2, 5), (3, 1), (1, 4)),
                ((4, 1), (1, 2), (3, 0)),
                shape=(2, 6, 13, 30),
                outputs=7,
            ),
            *together(
                "window stride padding",
                ((7, 7), (2, 2), (3, 3)),
                ((4, 4), (4, 4), (0, 0)),
                ((3, 5), (1, 3), (2, 1)),
                shape=[(2, channels, 13, 17) for channels in CHANNELS],
                outputs=512,
            ),
            *(
                setting
                for count in (1, 2, 3, 5)
                for setting in (
                    padded((count, 3, 50, 41), 20, (5, 4), stride=(2, 1), padding=(2, 1), activation="gelu"),
                    padded((count, 40, 9, 8), 24, dtype=BF16),
                )
            ),
            dict(shape=(1, 33, 241, 40), outputs=65, window=(2, 2), stride=(1, 1), padding=(0, 0)),
            padded((20, 5, 7, 7), 6),
            padded((2, 5, 60, 90), 6),
            # padding after the image alone, as where halves of images follow one another, and more or less of it
            *together(
                "stride padding padding_end",
                ((2, 2), (0, 0), (1, 1)),
                ((2, 3), (2, 0), (0, 2)),
                ((1, 1), (2, 2), (1, 0)),
                shape=[(2, channels, *sizes) for channels in (6, 130) for sizes in ((8, 12), (9, 11))],
                outputs=9,
                window=(3, 3),
            ),
        ],
        refusals=[
            refuse(
                "padding of conv2d is 3; pass less than the window, which is 3",
                padded((1, 6, 5, 5), 8, padding_end=(2, 2)),
                padding_end=(3, 2),
            ),
            refuse(
                "a window of 3 does not fit into 2 padded elements",
                padded((1, 6, 2, 2), 8, padding=(0, 0), padding_end=(1, 1)),
                padding_end=(0, 1),
            ),
            refuse(
                "added is [1, 8, 5, 5] like y, not (1, 8, 5, 6)",
                padded((1, 6, 5, 5), 8, added=normal(4, 1, 8, 5, 5)),
                added=normal(4, 1, 8, 5, 6),
            ),
            refuse(
                "added has x's dtype",
                padded((1, 6, 5, 5), 8, added=normal(4, 1, 8, 5, 5)),
                added=normal(4, 1, 8, 5, 5, dtype=BF16),
            ),
        ],
        two_cores=[padded((1, 8, 5, 6), 256, added=normal(4, 1, 256, 5, 6))],
        undefined=[
            Undefined(
                dict(x=elements),
                padded((5, channels, 12, 40), outputs, padding=(0, 0)),
                value,
                kept=kept,
            )
            for channels, outputs in ((3, 20), (40, 64))
            for elements, value, kept in (
                (2, np.nan, lambda _, outputs: [outputs[0][[0, 1, 3, 4]]]),
                (np.s_[4, :, 5:], np.inf, lambda _, outputs: [outputs[0][:4], outputs[0][4, :, :3]]),
            )
        ],
    )


def test_a_pack_is_chosen_by_matmuls_and_by_bytes() -> None:
    """Whisper's 80 bands: two packs of three taps of 40; patches of 16: all rows of two columns.

    What leaves room for other stripes: ResNet's first layer in groups of 32 partitions, its 3 x 3 of 64 of 64.
    """

    def sizes(channels: int, outputs: int, *geometry: Any, shortest: int = 32) -> tuple[int, ...]:
        pack = choose_pack(Windows(1, *geometry), channels, outputs, BF16, shortest)
        return len(pack.blocks), pack.rows, pack.columns, pack.matmuls, pack.groups

    assert sizes(80, 1280, (1, 3000), (1, 3), (1, 1), (0, 1)) == (2, 1, 3, 2, 1)
    assert sizes(3, 768, (224, 224), (16, 16), (16, 16), (0, 0)) == (1, 16, 2, 8, 1)
    assert sizes(128, 1280, (1, 3000), (1, 3), (1, 1), (0, 1)) == (1, 1, 1, 3, 1)
    assert sizes(256, 8, (9, 9), (1, 1), (1, 1), (0, 0)) == (2, 1, 1, 2, 1)
    first = 3, 64, (224, 224), (7, 7), (2, 2), (3, 3)
    assert sizes(*first) == (1, 7, 1, 7, 4)
    assert sizes(*first, shortest=128) == (1, 7, 3, 3, 1)
    inner = (56, 56), (3, 3), (1, 1), (1, 1)
    assert sizes(64, 64, *inner) == sizes(64, 64, *inner, shortest=64) == (1, 1, 1, 9, 2)
    assert sizes(65, 64, *inner) == (2, 3, 1, 6, 1)


def test_four_products_of_64_channels_to_64_are_done_at_a_time() -> None:
    """Of one step, in the four quarters of the array; 65 outputs take half of it, which holds stripes of two images."""

    def starts(outputs: int) -> list[tuple[float, ...]]:
        inputs = np.empty((4, 64, 16, 28), BF16), np.empty((3, 3, 64, outputs), BF16), None, (1, 1), (1, 1)
        done = simulate.World("trn2").launch(kernels.conv2d, [(inputs, {})], mode=simulate.Mode.dry)
        costs = [done.streams[0].costs[number] for number in done.streams[0].cost_ids]
        return [cost.cells for cost in costs if cost.cells]

    quarters, halves = starts(64), starts(65)
    assert len(quarters) == 9 * 4 and len(set(quarters)) == 4
    assert len(halves) == 9 * 4 and len(set(halves)) == 2


class TestAddedImages(KernelTests):
    """Sums of one bank, of several beside one another and of a last one, with and without bias and activation."""

    case = KernelCase(
        kernels.conv2d,
        images,
        every_chip=[
            padded(
                (3, channels, *sizes),
                outputs,
                added=normal(4, 3, outputs, *sizes, dtype=dtype),
                dtype=dtype,
                **more,
            )
            for channels, outputs, sizes, dtype, more in (
                (10, 31, (22, 40), F32, {}),
                (64, 64, (13, 9), BF16, {}),
                (130, 129, (5, 7), BF16, dict(activation="silu")),
                (40, 127, (22, 25), F32, dict(activation="relu", bias=without_bias)),
                (6, 128, (1, 1), F32, dict(bias=without_bias)),
            )
        ],
    )


def normalised(
    shape: tuple[int, ...] = (2, 8, 5, 7),
    outputs: int = 6,
    window: tuple[int, ...] = (3, 3),
    groups: int = 4,
    dtype: Any = F32,
    weights: Any = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (1, 1),
    activation: str | None = "silu",
    added: np.ndarray | None = None,
    mean: float = 0.0,
    eps: float = 1e-6,
) -> tuple[Any, ...]:
    """Return arguments of a convolution of normalised images whose moments are those of the images."""
    x, w, bias, *_ = images(shape, outputs, window, dtype=dtype, weights=weights)
    x = (x.astype(F32) + mean).astype(dtype)
    moments = compute_moments_reference(x) if x.any() else normal(4, *shape[:2], 2)
    norm = (normal(seed, 1, shape[1], dtype=weights or dtype) for seed in (5, 6))
    epilogue = stride, padding, None, None, added, None
    return x, w, bias, *epilogue, moments, *norm, groups, eps, activation, True


class TestNormalisedImages(KernelTests):
    """Channels in groups of 32 and 64 partitions and in several blocks; stripes at all edges; padding stays 0."""

    case = KernelCase(
        kernels.conv2d,
        normalised,
        every_chip=[
            *(
                dict(dtype=dtype, weights=weights, activation=activation)
                for dtype, weights in MIXED_DTYPES
                for activation in (None, "silu")
            ),
            *together(
                "shape groups outputs",
                ((1, 3, 9, 11), 3, 5),
                ((3, 24, 22, 40), 8, 40),
                ((1, 64, 60, 90), 32, 3),
                ((2, 128, 6, 6), 32, 130),
                ((1, 256, 5, 9), 32, 64),
                ((1, 192, 5, 9), 32, 20),
                ((5, 40, 4, 4), 5, 9),
            ),
            dict(window=(1, 1), padding=(0, 0)),
            dict(stride=(2, 2), padding=(0, 0), padding_end=(1, 1)),
            dict(stride=(2, 1), padding=(1, 0), window=(2, 3)),
            dict(added=normal(7, 2, 6, 5, 7)),
            dict(mean=300.0),
            dict(eps=0.5),
            # 90 tiles of an image: more than one run of statistics
            *slow(dict(shape=(1, 4, 90, 300), outputs=3, dtype=BF16)),
        ],
        refusals=[
            refuse("moments are [2, 8, 2] float32, not (2, 8, 3)", moments=normal(4, 2, 8, 3)),
            refuse(
                "moments are [2, 8, 2] float32, not (2, 8, 2) bfloat16",
                moments=normal(4, 2, 8, 2, dtype=BF16),
            ),
            refuse("with moments norm_weight is [1, 8], not absent", norm_weight=None),
            refuse("with moments norm_bias is [1, 8], not (1, 9)", norm_bias=normal(5, 1, 9)),
            refuse("3 groups do not divide 8 channels", groups=3),
            refuse(
                "130 channels, which are on the partitions at a time",
                dict(shape=(1, 130, 2, 2), groups=2),
                groups=1,
            ),
            refuse("activation is silu", activation="tanh"),
        ],
        two_cores=[dict(shape=(1, 8, 5, 6), outputs=256)],
    )


def test_moments_without_a_norm_are_those_of_the_results() -> None:
    x, w, bias, *geometry = images((3, 20, 9, 11), 24, (3, 2), (2, 1), (1, 1), BF16)
    y, moments = run(
        kernels.conv2d, (x, w, bias, *geometry, None, None, None, None, None, None, None, 1, 0.0, None, True)
    )
    np.testing.assert_allclose(moments, compute_moments_reference(y), rtol=1e-5, atol=1e-6)
    assert np.array_equal(y, run(kernels.conv2d, (x, w, bias, *geometry)))


def hidden_states(
    image: tuple[int, int] = (5, 6), count: int = 1, channels: int = 6, outputs: int = 8, dtype: Any = F32
) -> tuple[Any, ...]:
    """Return rows of hidden states of some images, and weights, bias and images that are added."""
    pixels = image[0] * image[1]
    x = normal(1, count * pixels, channels, dtype=dtype)
    w = normal(2, 1, 1, channels, outputs, dtype=dtype, scale=channels**-0.5)
    added = normal(4, count, outputs, *image, dtype=dtype)
    return x, w, normal(3, 1, outputs, dtype=dtype), (1, 1), (0, 0), None, None, added, image


class TestHiddenStates(KernelTests):
    """Rows of hidden states become images of channels; pixels around a bank, channels around a tile and its parts."""

    case = KernelCase(
        kernels.conv2d,
        hidden_states,
        every_chip=[
            *vary(dtype=[*DTYPES], count=[1, 3], image=(7, 9), channels=40, outputs=24),
            *vary(image=[(1, 511), (16, 32), (27, 19)], channels=20, outputs=130, dtype=BF16),
            *vary(channels=[1, 64, 127, 128, 129, 300], image=(3, 5), count=2),
            dict(added=lambda _: None, image=(3, 5), count=2),
        ],
        refusals=[
            refuse(
                "x has 31 rows, which are no whole images of 5 x 6 pixels", x=normal(1, 31, 6), added=None
            ),
            refuse("windows of one pixel, not 2 x 1", w=normal(2, 2, 1, 6, 8), added=None),
            refuse("windows of one pixel, not 1 x 1 with stride (2, 1)", stride=(2, 1), added=None),
        ],
        two_cores=[dict(outputs=256)],
    )


def test_pixels_of_images_are_positions_of_sequences() -> None:
    x, w, bias, *_ = sequences(2, 6, 20, 8)
    rows = run(kernels.conv1d, (x, w, bias, 1, 0, None, True))
    images_of_x = x.reshape(2, 6, 4, 5)
    assert np.array_equal(run(kernels.conv1d, (images_of_x, w, bias, 1, 0, None, True)), rows)
    reference = kernels.conv1d_reference
    assert np.array_equal(
        reference(images_of_x, w, bias, 1, 0, None, True), reference(x, w, bias, 1, 0, None, True)
    )


def test_an_infinity_beside_a_window_does_not_reach_it() -> None:
    """Unused taps of a last pack are not multiplied by zero weights."""
    x, *weights_and_geometry = images((1, 3, 9, 20), 512, (7, 7), (1, 1), (0, 0))
    clean = run(kernels.conv2d, (x, *weights_and_geometry))
    x[:, :, 8, :] = x[:, :, :, 19] = np.inf
    assert np.array_equal(
        run(kernels.conv2d, (x, *weights_and_geometry))[:, :, :2, :13], clean[:, :, :2, :13]
    )


def test_small_images_share_a_tile_and_large_ones_are_cut_into_stripes() -> None:
    small = Windows(20, (7, 7), (3, 3), (1, 1), (1, 1))
    assert choose_tile_sizes(small, 4) == (10, 7, 7)
    large = Windows(2, (60, 90), (3, 3), (1, 1), (1, 1))
    assert choose_tile_sizes(large, 4) == (1, 5, 90)
    assert choose_stripe_sizes(large, (1, 5, 90), 4) == (1, 40, 90)
    # Of 24 tiles, two of each of four stripes: in three steps, of which stripes of four tiles leave fewer loads.
    assert choose_stripe_sizes(large, (1, 5, 90), 4, 4, 2) == (1, 10, 90)
    # Seven tiles of an image do not halve; those of two images do.
    resnet = Windows(8, (56, 56), (3, 3), (1, 1), (1, 1))
    assert choose_stripe_sizes(resnet, (1, 8, 56), 2) == (1, 56, 56)
    assert choose_stripe_sizes(resnet, (1, 8, 56), 2, 2, 2) == (2, 56, 56)


def test_what_many_channels_read_is_made_to_fit() -> None:
    """2,048 channels leave 16 KiB / 64 elements of a partition: columns, rows and images are cut in turn."""
    wide = Windows(1, (1, 3000), (1, 3), (1, 2), (0, 1))
    assert choose_tile_sizes(wide, 64) == (1, 1, 250)
    assert choose_tile_sizes(Windows(1, (22, 22), (3, 3), (1, 1), (1, 1)), 128) == (1, 6, 22)
    assert choose_tile_sizes(Windows(9, (7, 7), (3, 3), (1, 1), (1, 1)), 128) == (3, 7, 7)


@pytest.mark.parametrize("as_rows", [False, True])
@pytest.mark.parametrize(("outputs", "times"), [(1280, 1), (1281, 2)])
def test_outputs_whose_weights_do_not_stay_together_read_the_image_again(
    outputs: int, times: int, as_rows: bool
) -> None:
    """16 taps of 256 channels in bfloat16 take 64 bytes of an output: 80 KiB hold 1,280."""
    inputs = np.empty((1, 256, 100), BF16), np.empty((16, 256, outputs), BF16), None, 1, 0, None, as_rows
    traffic = simulate.profile(kernels.conv1d, *inputs).traffic
    assert {tensor.name: tensor.reads for tensor in traffic if tensor.argument} == {"x": times, "w": 1}


def test_whole_numbers_are_those_of_torch() -> None:
    import torch

    x, w, bias = whole_numbers(1, 2, 130, 12, 11), whole_numbers(2, 3, 2, 130, 9), whole_numbers(3, 1, 9)
    truth = torch.nn.functional.conv2d(
        *map(torch.from_numpy, (x, w.transpose(3, 2, 0, 1).copy(), bias[0])), stride=(2, 1), padding=(1, 0)
    ).numpy()
    inputs = x, w, bias, (2, 1), (1, 0)
    assert np.array_equal(run(kernels.conv2d, inputs), truth)
    assert np.array_equal(kernels.conv2d_reference(*inputs), truth)
    row = torch.nn.functional.conv1d(
        *map(torch.from_numpy, (x[:, :, 0], w[0].transpose(2, 1, 0).copy(), bias[0])), stride=2, padding=1
    ).numpy()
    inputs = x[:, :, 0], w[0], bias, 2, 1
    assert np.array_equal(run(kernels.conv1d, inputs), row)
    rows = run(kernels.conv1d, (*inputs, None, True))
    assert np.array_equal(rows.reshape(2, -1, 9).transpose(0, 2, 1), row)


@pytest.mark.nki_budget(time_us=296.0, target="trn2")
def test_a_normalised_convolution_keeps_to_its_budget(nki_budget: Any) -> None:
    """3 x 3 of the last block of FLUX's decoder on a quarter of its pixels, whose operations take 246 us."""
    image = np.empty((1, 128, 256, 256), BF16)
    rows = (np.empty((1, 128), BF16) for _ in range(3))
    bias, *affine = rows
    moments = np.empty((1, 128, 2), F32)
    inputs = image, np.empty((3, 3, 128, 128), BF16), bias, (1, 1), (1, 1), None, None, image, None, moments
    nki_budget.ranks(kernels.conv2d, [(*inputs, *affine, 32, 1e-6, "silu", True)])


@pytest.mark.nki_budget(time_us=41.0, target="trn2")
def test_64_channels_keep_to_their_budget(nki_budget: Any) -> None:
    """3 x 3 of ResNet-50, whose operations take 23.5 us of the Tensor engine."""
    inputs = np.empty((8, 64, 56, 56), BF16), np.empty((3, 3, 64, 64), BF16), np.empty((1, 64), BF16)
    nki_budget.ranks(kernels.conv2d, [(*inputs, (1, 1), (1, 1))])
