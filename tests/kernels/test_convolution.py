"""conv1d and conv2d: ragged channels, strides and padding, every activation, both orders of the product."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels.convolution.packing import packed
from nki_kernels.convolution.windows import Windows, stripe_sizes, tile_sizes
from tests.kernels.accuracy import TARGETS, check, compare_all, normal, run, whole_numbers

BF16 = ml_dtypes.bfloat16


def images(
    shape: tuple[int, ...], outputs: int, window: tuple[int, ...], *rest: Any, dtype: Any = np.float32
) -> tuple[Any, ...]:
    """Images or sequences, weights whose sums are of the order of 1, a bias, and further arguments."""
    scale = (shape[1] * np.prod(window)) ** -0.5
    weights = normal(2, *window, shape[1], outputs, dtype=dtype, scale=scale)
    return normal(1, *shape, dtype=dtype), weights, normal(3, 1, outputs, dtype=dtype), *rest


def checked(*arguments: Any, target: str = "trn2") -> None:
    name = "conv1d" if arguments[0].ndim == 3 else "conv2d"
    check(getattr(kernels, name), getattr(kernels, f"{name}_reference"), arguments, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "weights"), [(np.float32, BF16), (BF16, BF16), (BF16, np.float32)])
def test_dtypes_on_every_chip(target: str, dtype: type, weights: type) -> None:
    x, w, bias, *_ = images((2, 20, 9, 11), 24, (3, 2))
    checked(x.astype(dtype), w.astype(weights), bias.astype(weights), (2, 1), (1, 1), "gelu", target=target)
    x, w, bias, *_ = images((2, 20, 60), 24, (3,))
    added = normal(4, 30, 24, dtype=weights)
    for rest in ((False,), (True, added)):
        given = (x.astype(dtype), w.astype(weights), bias.astype(weights), 2, 1, "gelu", *rest)
        checked(*given, target=target)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 300])
def test_any_number_of_channels_and_positions(size: int) -> None:
    checked(*images((1, size, 20), 8, (3,), 1, 1))
    checked(*images((1, 6, 20), size, (3,), 1, 1))
    checked(*images((1, 6, size), 8, (3,), 1, 1))
    checked(*images((1, size, 20), 8, (3,), 1, 1, None, True))
    checked(*images((1, 6, 20), size, (3,), 1, 1, None, True))
    checked(*images((1, 6, size), 8, (3,), 1, 1, None, True))


@pytest.mark.parametrize("size", [511, 512, 513, 1025])
def test_results_around_a_psum_bank(size: int) -> None:
    checked(*images((1, 5, size), 8, (3,), 1, 1))
    checked(*images((1, 5, 1, size), 8, (1, 3), (1, 1), (0, 1)))
    checked(*images((1, 5, 20), size, (3,), 1, 1, None, True))


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((1, 1), (1, 1), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((2, 5), (3, 1), (1, 4)), ((4, 1), (1, 2), (3, 0))],
)
def test_windows_strides_and_padding(
    window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    checked(*images((2, 6, 13, 30), 7, window, stride, padding))
    checked(*images((2, 6, 30), 7, window[1:], stride[1], padding[1]))
    checked(*images((2, 6, 30), 7, window[1:], stride[1], padding[1], None, True))


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
def test_activations_with_a_bias_and_without(activation: str | None) -> None:
    given = images((1, 6, 30), 8, (3,), 1, 0, activation)
    checked(*given)
    checked(*given, True)
    for as_rows in (False, True):
        checked(*given[:2], None, *given[3:], as_rows)


@pytest.mark.parametrize("channels", [1, 3, 21, 22, 42, 43, 64, 65, 80])
@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((7, 7), (2, 2), (3, 3)), ((4, 4), (4, 4), (0, 0)), ((3, 5), (1, 3), (2, 1))],
)
def test_taps_of_few_channels_are_packed(
    channels: int, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    """Of all rows or some, of several columns, with last packs of fewer taps; 512 outputs, so that packs pay."""
    checked(*images((2, channels, 13, 17), 512, window, stride, padding))
    checked(*images((2, channels, 40), 512, window[1:], stride[1], padding[1], "gelu", True))


def test_a_pack_is_chosen_by_matmuls_and_by_bytes() -> None:
    """Whisper's 80 bands: two packs of three taps of 40; patches of 16: all rows of two columns.

    What leaves room for other stripes: ResNet's first layer in groups of 32 partitions, its 3 x 3 of 64 of 64.
    """

    def sizes(channels: int, outputs: int, *given: Any, shortest: int = 32) -> tuple[int, ...]:
        pack = packed(Windows(1, *given), channels, outputs, BF16, shortest)
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("channels", "outputs"),
    [(10, 31), (11, 32), (21, 33), (22, 63), (43, 64), (64, 65), (32, 127), (33, 128), (64, 129), (64, 160)],
)
def test_stripes_and_outputs_share_the_array(channels: int, outputs: int, target: str) -> None:
    """Groups of 32 and of 64 rows and columns, full and not; a last load of fewer stripes, stripes of fewer tiles."""
    checked(*images((3, channels, 22, 40), outputs, (3, 3), (1, 1), (1, 1)), target=target)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stripes_of_rows_of_columns_and_of_images_share_the_array(count: int) -> None:
    checked(*images((count, 3, 50, 41), 20, (5, 4), (2, 1), (2, 1), "gelu"))
    checked(*images((count, 12, 2600), 24, (3,), 1, 1))
    checked(*images((count, 40, 9, 8), 24, (3, 3), (1, 1), (1, 1), dtype=BF16))


def test_the_last_stripe_of_a_load_may_have_fewer_tiles() -> None:
    """Of 19 tiles, two for each of two groups of rows: the last stripe has one."""
    checked(*images((1, 33, 241, 40), 65, (2, 2)))


def test_four_products_of_64_channels_to_64_are_done_at_a_time() -> None:
    """Of one step, in the four quarters of the array; 65 outputs take half of it, which holds stripes of two images."""

    def starts(outputs: int) -> list[tuple[float, ...]]:
        given = np.empty((4, 64, 16, 28), BF16), np.empty((3, 3, 64, outputs), BF16), None, (1, 1), (1, 1)
        done = simulate.World("trn2").launch(kernels.conv2d, [(given, {})], mode=simulate.Mode.dry)
        costs = [done.streams[0].costs[number] for number in done.streams[0].cost_ids]
        return [cost.cells for cost in costs if cost.cells]

    quarters, halves = starts(64), starts(65)
    assert len(quarters) == 9 * 4 and len(set(quarters)) == 4
    assert len(halves) == 9 * 4 and len(set(halves)) == 2


@pytest.mark.parametrize(("channels", "outputs"), [(3, 20), (40, 64)])
def test_nothing_of_one_image_reaches_another(channels: int, outputs: int) -> None:
    x, w, bias = images((5, channels, 12, 40), outputs, (3, 3))
    clean = run(kernels.conv2d, (x, w, bias), "trn2")
    x[2] = np.nan
    x[4, :, 5:] = np.inf
    dirty = run(kernels.conv2d, (x, w, bias), "trn2")
    assert np.array_equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
    assert np.array_equal(dirty[4, :, :3], clean[4, :, :3])


def test_an_infinity_beside_a_window_does_not_reach_it() -> None:
    """Unused taps of a last pack are not multiplied by zero weights."""
    x, w, bias, *_ = images((1, 3, 9, 20), 512, (7, 7))
    clean = run(kernels.conv2d, (x, w, bias))
    x[:, :, 8, :] = x[:, :, :, 19] = np.inf
    assert np.array_equal(run(kernels.conv2d, (x, w, bias))[:, :, :2, :13], clean[:, :, :2, :13])


def test_small_images_share_a_tile_and_large_ones_are_cut_into_stripes() -> None:
    small = Windows(20, (7, 7), (3, 3), (1, 1), (1, 1))
    assert tile_sizes(small, 4) == (10, 7, 7)
    large = Windows(2, (60, 90), (3, 3), (1, 1), (1, 1))
    assert tile_sizes(large, 4) == (1, 5, 90)
    assert stripe_sizes(large, (1, 5, 90), 4) == (1, 40, 90)
    # Of 24 tiles, two of each of four stripes: in three steps, of which stripes of four tiles leave fewer loads.
    assert stripe_sizes(large, (1, 5, 90), 4, 4, 2) == (1, 10, 90)
    # Seven tiles of an image do not halve; those of two images do.
    resnet = Windows(8, (56, 56), (3, 3), (1, 1), (1, 1))
    assert stripe_sizes(resnet, (1, 8, 56), 2) == (1, 56, 56)
    assert stripe_sizes(resnet, (1, 8, 56), 2, 2, 2) == (2, 56, 56)
    checked(*images((20, 5, 7, 7), 6, (3, 3), (1, 1), (1, 1)))
    checked(*images((2, 5, 60, 90), 6, (3, 3), (1, 1), (1, 1)))


def test_what_many_channels_read_is_made_to_fit() -> None:
    """2,048 channels leave 16 KiB / 64 elements of a partition: columns, rows and images are cut in turn."""
    wide = Windows(1, (1, 3000), (1, 3), (1, 2), (0, 1))
    assert tile_sizes(wide, 64) == (1, 1, 250)
    assert tile_sizes(Windows(1, (22, 22), (3, 3), (1, 1), (1, 1)), 128) == (1, 6, 22)
    assert tile_sizes(Windows(9, (7, 7), (3, 3), (1, 1), (1, 1)), 128) == (3, 7, 7)


@pytest.mark.parametrize("as_rows", [False, True])
@pytest.mark.parametrize(("outputs", "times"), [(1280, 1), (1281, 2)])
def test_outputs_whose_weights_do_not_stay_together_read_the_image_again(
    outputs: int, times: int, as_rows: bool
) -> None:
    """16 taps of 256 channels in bfloat16 take 64 bytes of an output: 80 KiB hold 1,280."""
    given = np.empty((1, 256, 100), BF16), np.empty((16, 256, outputs), BF16), None, 1, 0, None, as_rows
    traffic = simulate.profile(kernels.conv1d, *given).traffic
    assert {each.name: each.reads for each in traffic if each.argument} == {"x": times, "w": 1}


def test_whole_numbers_are_those_of_torch() -> None:
    import torch

    x, w, bias = whole_numbers(1, 2, 130, 12, 11), whole_numbers(2, 3, 2, 130, 9), whole_numbers(3, 1, 9)
    truth = torch.nn.functional.conv2d(
        *map(torch.from_numpy, (x, w.transpose(3, 2, 0, 1).copy(), bias[0])), stride=(2, 1), padding=(1, 0)
    ).numpy()
    given = x, w, bias, (2, 1), (1, 0)
    assert np.array_equal(run(kernels.conv2d, given), truth)
    assert np.array_equal(kernels.conv2d_reference(*given), truth)
    row = torch.nn.functional.conv1d(
        *map(torch.from_numpy, (x[:, :, 0], w[0].transpose(2, 1, 0).copy(), bias[0])), stride=2, padding=1
    ).numpy()
    given = x[:, :, 0], w[0], bias, 2, 1
    assert np.array_equal(run(kernels.conv1d, given), row)
    rows = run(kernels.conv1d, (*given, None, True))
    assert np.array_equal(rows.reshape(2, -1, 9).transpose(0, 2, 1), row)


@pytest.mark.parametrize("rest", [(), (None, True)])
def test_two_cores_divide_the_outputs(rest: tuple[Any, ...]) -> None:
    """A sum's order, and so its last bits, may depend on the outputs that numpy computes beside it."""
    given = images((1, 20, 60), 200, (3,), 2, 1, *rest)
    two = simulate.World("trn2", logical_core_size=2).launch(kernels.conv1d, [(given, {})]).outputs[0]
    compare_all((two,), kernels.conv1d_reference, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=(1, 4, 20, 3)), r"expected x \[N, C, L\], not a tensor of shape \(1, 4, 20, 3\)"),
        (dict(w=(3, 5, 8)), "w has 5 input channels for x of 4"),
        (dict(bias=(1, 9)), r"bias is \[1, 8\], not \(1, 9\)"),
        (dict(stride=0), r"conv1d takes windows and strides from 1 and padding from 0 on, not .*\(1, 0\)"),
        (dict(padding=3), "padding of conv1d is less than the window, 3, not 3"),
        (dict(w=(21, 4, 8)), "a window of 21 does not fit into 20 padded elements"),
        (dict(activation="tanh"), "activation is silu, gelu, gelu_tanh or relu, not tanh"),
        (dict(added=(18, 8)), "conv1d adds to rows; set as_rows"),
        (dict(added=(19, 8), as_rows=True), r"added is \[18, 8\], not \(19, 8\)"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    fitting = dict(x=(1, 4, 20), w=(3, 4, 8), bias=(1, 8))

    def given(**changes: Any) -> dict[str, Any]:
        return {
            name: np.ones(each, np.float32) if isinstance(each, tuple) else each
            for name, each in (fitting | changes).items()
        }

    world = simulate.World("trn2")
    world.launch(kernels.conv1d, [((), given(padding=2, w=(20, 4, 8), added=(5, 8), as_rows=True))])
    with pytest.raises(AssertionError, match=message):
        world.launch(kernels.conv1d, [((), given(**change))])


@pytest.mark.parametrize(("taps", "dtype"), [(160, np.float32), (320, BF16)])
def test_the_most_taps_fit_on_the_smallest_chip(taps: int, dtype: Any) -> None:
    """Planned and placed without computing numbers; a launch refuses tiles that do not fit."""
    world = simulate.World("trn1")

    def launch(count: int) -> None:
        given = np.empty((1, 128, 2000), dtype), np.empty((count, 128, 300), dtype), None, 2, 1
        world.launch(kernels.conv1d, [(given, {})], mode=simulate.Mode.dry)

    launch(taps - 1)
    launch(taps)
    with pytest.raises(AssertionError, match=f"{taps + 1} taps of 128 channels take .* more than 81920"):
        launch(taps + 1)


def test_twice_the_taps_of_half_the_channels_fit() -> None:
    """Two on the partitions, without room for other stripes, whose weights would not stay in SBUF."""
    world = simulate.World("trn1")

    def launch(taps: int) -> None:
        given = np.empty((1, 64, 2000), BF16), np.empty((taps, 64, 300), BF16), None, 2, 1
        world.launch(kernels.conv1d, [(given, {})], mode=simulate.Mode.dry)

    launch(320)
    launch(321)
    launch(640)
    with pytest.raises(AssertionError, match="641 taps of 64 channels take"):
        launch(641)


@pytest.mark.nki_budget(time_us=41.0, target="trn2")
def test_64_channels_keep_to_their_budget(nki_budget: Any) -> None:
    """3 x 3 of ResNet-50, whose operations take 23.5 us of the Tensor engine."""
    given = np.empty((8, 64, 56, 56), BF16), np.empty((3, 3, 64, 64), BF16), np.empty((1, 64), BF16)
    nki_budget.ranks(kernels.conv2d, [(*given, (1, 1), (1, 1))])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_the_convolutions_of_whisper_fit(target: str, dtype: Any) -> None:
    world = simulate.World(target)
    for mels, width in ((80, 384), (128, 1280)):
        first = np.empty((1, mels, 3000), dtype), np.empty((3, mels, width), dtype)
        second = np.empty((1, width, 3000), dtype), np.empty((3, width, width), dtype)
        bias, added = np.empty((1, width), dtype), np.empty((1500, width), dtype)
        dry = simulate.Mode.dry
        world.launch(kernels.conv1d, [((*first, bias, 1, 1, "gelu"), {})], mode=dry)
        world.launch(kernels.conv1d, [((*second, bias, 2, 1, "gelu", True, added), {})], mode=dry)
