"""Convolutions of images that are enlarged twice by repeating each pixel, computed on the small images.

A window of 3 x 3 on the large image reads 2 x 2 pixels of the small one. Which weights fall on one pixel depends on the
*phase* of the result: whether its row and its column are even (0) or odd (1).

    phase 0: pixels i - 1 and i get w[0] and w[1] + w[2];   phase 1: pixels i and i + 1 get w[0] + w[1] and w[2]

So four windows of 2 x 2 replace one of 3 x 3 on four times as many pixels: 4/9 of the operations. Results of the four
phases are interleaved in SBUF, so that whole rows are stored. Packs, groups and boxes are those of convolution/.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.cells import find_shortest_side, split_reads
from nki_kernels.convolution.moments import ResultMoments, count_image_tiles
from nki_kernels.convolution.packing import WEIGHT_BYTES, Pack, load_packed
from nki_kernels.convolution.products import load_bias_columns, plan_banks, plan_stripes, sum_taps
from nki_kernels.convolution.windows import Windows
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, PARTITIONS, blocks, ranges

PHASES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Phases (row, column) of results."""

PHASE_TAPS = 16
"""Taps of the windows of all phases."""


def convolve_upsampled(y, x, w, bias, function, moments=None):
    """Store function(convolution of the enlarged images + bias) to y [N, O, 2 H, 2 W].

    Args:
        y: results @ HBM.
        x: images [N, C, H, W] @ HBM.
        w: weights [3, 3, C, O] @ HBM.
        bias: [1, O] @ HBM, or None.
        function: activation such as `nl.silu`; `nl.copy` for none.
        moments: [N, O, 2] float32 @ HBM, which takes mean and variance of each channel of y; or None.
    """
    images, channels, height, width = x.shape
    outputs = w.shape[3]
    windows = Windows(images, (height, width), (3, 3), (1, 1), (1, 1))
    pack = Pack(windows, channels, blocks(channels), 1, 1, find_shortest_side())
    windows.lay_out(pack)
    halves = Windows(images, (height, width), (2, 2), (1, 1), (1, 1))
    phase_pack = Pack(halves, channels, blocks(channels), 1, 1, pack.shortest)
    tile, stripes, most_boxes = plan_stripes(windows, pack, outputs, x.dtype)
    phase_pack.limit_groups(len(stripes))
    loads = ranges(0, len(stripes), pack.groups)
    across = y.permute((1, 0, 2, 3))
    measured = None
    for first_output, end_output in ranges(0, outputs, count_resident_outputs(pack, outputs, x.dtype)):
        following = load_packed(x, windows, stripes[loads[0][0] : loads[0][1]], pack)
        weights = load_phase_weights(w[:, :, :, first_output:end_output], pack, x.dtype)
        added = load_bias_columns(bias, first_output, end_output, pack, most_boxes)
        if moments is not None:
            most = len(PHASES) * count_image_tiles(stripes, tile, images)
            measured = ResultMoments(moments, (first_output, end_output), most)
        for number in range(len(loads)):
            stripe_group, regions = stripes[loads[number][0] : loads[number][1]], following
            if number + 1 < len(loads):
                ahead = loads[number + 1]
                following = load_packed(x, windows, stripes[ahead[0] : ahead[1]], pack)
            for first, end in ranges(0, end_output - first_output):
                bias_column = added[first // PARTITIONS] if bias is not None else None
                banks = plan_banks(stripe_group, tile, phase_pack, (first, end))
                size = (phase_pack.side, phase_pack.find_width(end - first))
                for start, last in ranges(0, len(banks), ACCUMULATOR_BANKS):
                    finish = (function, bias_column)
                    results = compute_phases(
                        banks[start:last], regions, halves, weights, phase_pack, size, finish, x.dtype
                    )
                    store_interleaved(across[first_output:end_output], results, measured)
        if measured is not None:
            measured.store()


def count_resident_outputs(pack, outputs, dtype):
    """Return the number of output channels whose weights of all phases stay in SBUF: all, or a multiple of 128.

    Raises AssertionError if the weights of 128 outputs take more than WEIGHT_BYTES of a partition.
    """
    output_bytes = len(pack.blocks) * PHASE_TAPS * item_bytes(dtype)
    most = WEIGHT_BYTES // output_bytes
    if most >= outputs:
        return outputs
    assert most >= PARTITIONS, (
        f"weights of all channels take {output_bytes * PARTITIONS} bytes of a partition for 128 outputs, more than "
        f"{WEIGHT_BYTES}; use fewer channels"
    )
    return most // PARTITIONS * PARTITIONS


def load_phase_weights(w, pack, dtype):
    """Load weights [3, 3, C, O] @ HBM, add those that fall on one pixel, and return them for each block of channels.

    A tile is [(group, channel), phase, row of tap, column of tap, output] of `dtype` @ SBUF, repeated for each group of
    partitions. Sums are float32 and rounded once.
    """
    outputs = w.shape[3]
    tiles = []
    for first, end in pack.blocks:
        channels = end - first
        raw = nl.ndarray((channels, 3, 3, outputs), dtype=w.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=raw, src=w[:, :, first:end, :].permute((2, 0, 1, 3)))
        shape = ((pack.groups - 1) * pack.side + channels, len(PHASES), 2, 2, outputs)
        tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        pairs = nl.ndarray((channels, 2, 3, outputs), dtype=nl.float32, buffer=nl.sbuf)
        for pair in range(2):
            nisa.tensor_tensor(dst=pairs[:, pair], data1=raw[:, pair], data2=raw[:, pair + 1], op=nl.add)
        for phase in range(len(PHASES)):
            row_phase, column_phase = PHASES[phase]
            for row in range(2):
                # Of rows 0, 1 and 2 one stands alone: the first in phase 0, the last in phase 1.
                is_single = row == row_phase
                line = raw[:, 2 * row] if is_single else pairs[:, 1 - row_phase]
                for column in range(2):
                    target = tile[0:channels, phase, row, column]
                    if column == column_phase:
                        nisa.tensor_copy(dst=target, src=line[:, 2 * column])
                    else:
                        pair = 1 - column_phase
                        nisa.tensor_tensor(
                            dst=target, data1=line[:, pair], data2=line[:, pair + 1], op=nl.add
                        )
        for group in range(1, pack.groups):
            nisa.tensor_copy(dst=tile[group * pack.side : group * pack.side + channels], src=tile[0:channels])
        tiles.append(tile)
    return tiles


def compute_phases(banks, regions, windows, weights, pack, size, finish, dtype):
    """Return the activated results of all phases of the boxes in `banks`, interleaved: (tile, first partition, boxes).

    There is an entry for each of `split_reads`. A tile is [output, image, row, column] of the large image @ SBUF.

    Args:
        banks: lists of `OutputBox`, at most ACCUMULATOR_BANKS.
        regions: what `load_packed` returns for windows of 3 x 3.
        windows: windows of 2 x 2.
        weights: what `load_phase_weights` returns.
        pack: packs of single taps of 2 x 2.
        size: (rows, columns) of a tile of the PE array.
        finish: activation, and the bias as a float32 column or None.
        dtype: of the results.
    """
    function, bias = finish
    results = []
    for phase in range(len(PHASES)):
        row_phase, column_phase = PHASES[phase]
        shifted, phase_weights = [], []
        for block in range(len(regions)):
            region = regions[block]
            shifted.append(region[:, :, row_phase : region.shape[2], column_phase : region.shape[3]])
            phase_weights.append(weights[block][:, phase])
        sums = sum_taps(banks, shifted, windows, phase_weights, pack, size)
        number = 0
        for index in range(len(banks)):
            for view, first, together in split_reads(banks[index], sums[index]):
                if phase == 0:
                    shape = (view.shape[0], view.shape[1], 2 * view.shape[2], 2 * view.shape[3])
                    results.append((nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf), first, together))
                column = bias[first : first + view.shape[0]] if bias is not None else None
                interleaved = results[number][0]
                target = interleaved[
                    :, :, row_phase : interleaved.shape[2] : 2, column_phase : interleaved.shape[3] : 2
                ]
                nisa.activation(dst=target, op=function, data=view, bias=column)
                number += 1
    return results


def store_interleaved(y, results, measured):
    """Store the results of `compute_phases` to y [output, image, row, column] @ HBM.

    `measured` is `ResultMoments` that take their statistics, or None.
    """
    for tile, first, together in results:
        for output_box in together:
            start, outputs = output_box.position[1] - first, output_box.outputs
            (first_image, _), (top, bottom), (first_column, end_column) = output_box.box
            box_results = tile[start : start + output_box.count_outputs()]
            if measured is not None:
                for row, column in PHASES:
                    # A phase has the pixels of one PSUM tile, as many as statistics take at a time.
                    rows, columns = box_results.shape[2], box_results.shape[3]
                    measured.add(output_box, box_results[:, :, row:rows:2, column:columns:2])
            for image in range(tile.shape[1]):
                nisa.dma_copy(
                    dst=y[
                        outputs[0] : outputs[1],
                        first_image + image,
                        2 * top : 2 * bottom,
                        2 * first_column : 2 * end_column,
                    ],
                    src=box_results[:, image],
                )
