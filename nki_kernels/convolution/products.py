"""Convolutions as products: every pack of taps of a block of channels adds one matmul to a tile in PSUM.

Two orders. `convolve` has the weights stationary and the image moving, so its results lie as images do, with the
channels on the partitions. `convolve_rows` has the image stationary, so that a result is a row of channels.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.cells import OutputBox, allocate_sums, count_groups, shortest_side, split_reads
from nki_kernels.convolution.packing import WEIGHT_BYTES, load_packed, load_weights, packed
from nki_kernels.convolution.windows import (
    all_results,
    box_sizes,
    boxes,
    boxes_in,
    stripe_sizes,
    tap,
    tile_sizes,
)
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, filled, load, ranges


def count_resident_outputs(pack, w, dtype):
    """Return the number of output channels whose weights [taps, C, O] stay in SBUF: all, or a multiple of 128."""
    taps, channels, outputs = w.shape
    output_bytes = pack.matmuls * item_bytes(dtype)
    most = WEIGHT_BYTES // output_bytes
    if most >= outputs:
        return outputs
    assert most >= PARTITIONS, (
        f"{taps} taps of {channels} channels take {output_bytes * PARTITIONS} bytes of a partition for 128 outputs, "
        f"more than {WEIGHT_BYTES}"
    )
    return most // PARTITIONS * PARTITIONS


def chosen_pack(x, w, windows, shortest):
    """Return the pack of taps for images and weights; the windows take its steps."""
    pack = packed(windows, x.shape[1], w.shape[2], x.dtype, shortest)
    windows.lay_out(pack)
    return pack


def convolve(y, x, w, bias, windows, function):
    """Store function(convolution + bias) to y [N, O, H', W']; w [taps, C, O], bias [1, O] or None."""
    outputs = w.shape[2]
    pack = chosen_pack(x, w, windows, shortest_side())
    element_bytes = len(pack.blocks) * item_bytes(x.dtype)
    tile = tile_sizes(windows, element_bytes)
    tiles_together = count_groups(pack.width(outputs))
    sizes = stripe_sizes(windows, tile, element_bytes, pack.groups, tiles_together)
    stripes = boxes(all_results(windows), sizes)
    pack.limit_groups(len(stripes))
    loads = ranges(0, len(stripes), pack.groups)
    across = y.permute((1, 0, 2, 3))
    for left, right in ranges(0, outputs, count_resident_outputs(pack, w, x.dtype)):
        following = load_packed(x, windows, stripes[loads[0][0] : loads[0][1]], pack)
        weights = load_weights(w[:, :, left:right], windows.window, pack, x.dtype)
        added = bias_columns(bias, left, right, pack, boxes_in(sizes, tile))
        for number in range(len(loads)):
            stripe_group, regions = stripes[loads[number][0] : loads[number][1]], following
            if number + 1 < len(loads):
                ahead = loads[number + 1]
                following = load_packed(x, windows, stripes[ahead[0] : ahead[1]], pack)
            for first, end in ranges(0, right - left):
                bias_column = added[first // PARTITIONS] if bias is not None else None
                banks = plan_banks(stripe_group, tile, pack, (first, end))
                size = (pack.side, pack.width(end - first))
                for group, last in ranges(0, len(banks), ACCUMULATOR_BANKS):
                    sums = sum_taps(banks[group:last], regions, windows, weights, pack, size)
                    for i in range(last - group):
                        results = across[left:right]
                        store_activated(results, banks[group + i], sums[i], function, bias_column, i % 2 == 1)


def plan_banks(stripes, tile, pack, outputs):
    """Return the boxes of stripes in groups of rows, for some outputs, by the PSUM bank that holds their sums.

    Those of one stripe lie in the groups of columns of one bank: of several images, boxes of one form.
    """
    width = pack.width(outputs[1] - outputs[0])
    stripe_boxes, steps = [], 0
    for stripe in stripes:
        stripe_boxes.append(boxes(stripe, tile))
        steps = max(steps, blocks(len(stripe_boxes[-1]), count_groups(width)))
    banks = []
    for step in range(steps):
        for row in range(len(stripes)):
            count = len(stripe_boxes[row])
            distance = blocks(count, count_groups(width))
            bank = []
            for number in range(step, count if step < distance else 0, distance):
                position = (row * pack.side, len(bank) * width)
                bank.append(OutputBox(stripes[row], stripe_boxes[row][number], outputs, position, pack.side))
            if len(bank) > 0:
                banks.append(bank)
    return banks


def bias_columns(bias, left, right, pack, tiles):
    """Load the bias of output channels left … right, a column for every 128; none without a bias.

    A short column is repeated for each group of columns of the array that a tile of a stripe, of so many, may lie in.
    """
    columns = []
    if bias is not None:
        for first, end in ranges(left, right):
            column = load(bias[:, first:end].permute((1, 0)), nl.float32)
            width, height = pack.width(end - first), end - first
            count = min(count_groups(width), tiles)
            if count > 1:
                once = column
                column = nl.ndarray(((count - 1) * width + height, 1), dtype=nl.float32, buffer=nl.sbuf)
                for group in range(count):
                    nisa.tensor_copy(dst=column[group * width : group * width + height], src=once)
            columns.append(column)
    return columns


def sum_taps(banks, regions, windows, weights, pack, size):
    """Return the sums over taps and channels, a PSUM tile for each list of boxes; size: of tiles of the array."""
    tiles = []
    for output_boxes in banks:
        tiles.append(allocate_sums(output_boxes))
    begun = False
    for block in range(len(regions)):
        for row in range(pack.steps[0]):
            for column in range(pack.steps[1]):
                position = (row * pack.rows, column * pack.columns)
                used = pack.used(windows.window, block, position)
                # Banks come innermost, so that the array keeps the weights of a step for all of them.
                for i in range(len(banks)):  # i: bank
                    for target in banks[i]:
                        first, (left, right) = target.position[0], target.outputs
                        end = first + min(used, target.rows)
                        nisa.nc_matmul(
                            dst=target.view(tiles[i]),
                            stationary=weights[block][first:end, row, column, left:right],
                            moving=tap(
                                regions[block][first:end],
                                windows,
                                target.stripe,
                                target.box,
                                position[0],
                                position[1],
                            ),
                            accumulate=begun,
                            tile_position=target.position,
                            tile_size=size,
                        )
                begun = True
    return tiles


def select_box(y, box):
    """Return a view of a box of images [channel, image, row, column]."""
    return y[:, box[0][0] : box[0][1], box[1][0] : box[1][1], box[2][0] : box[2][1]]


def store_activated(results, output_boxes, bank, function, bias, by_vector):
    """Store function(sums + bias) of the boxes of a PSUM tile to [output, image, row, column] of HBM.

    The bias is a column or None. Without a function the Vector engine may add it.
    """
    for sums, first, together in split_reads(output_boxes, bank):
        column = bias[first : first + sums.shape[0]] if bias is not None else None
        result = nl.ndarray(sums.shape, dtype=results.dtype, buffer=nl.sbuf)
        if function != nl.copy or not by_vector:
            nisa.activation(dst=result, op=function, data=sums, bias=column)
        elif bias is None:
            nisa.tensor_copy(dst=result, src=sums, engine=nisa.engine.vector)
        else:
            nisa.tensor_scalar(dst=result, data=sums, op0=nl.add, operand0=column)
        for output_box in together:
            target = select_box(results[output_box.outputs[0] : output_box.outputs[1]], output_box.box)
            start = output_box.position[1] - first
            for image in range(target.shape[1]):
                nisa.dma_copy(dst=target[:, image], src=result[start : start + output_box.width(), image])


def convolve_rows(y, x, w, bias, added, windows, function):
    """Store function(convolution + bias) + added to y [N, T, O], for images of one row; added [T, O] or None."""
    outputs = w.shape[2]
    pack = chosen_pack(x, w, windows, PARTITIONS)
    element_bytes = len(pack.blocks) * item_bytes(x.dtype)
    _, _, most = tile_sizes(windows, element_bytes)
    tile = (1, 1, min(most, PARTITIONS))
    stripes = boxes(all_results(windows), stripe_sizes(windows, tile, element_bytes))
    ones = None
    if bias is not None:
        ones = filled((1, tile[2]), 1.0, x.dtype)
    for left, right in ranges(0, outputs, count_resident_outputs(pack, w, x.dtype)):
        following = load_packed(x, windows, stripes[0:1], pack)
        weights = load_weights(w[:, :, left:right], windows.window, pack, x.dtype)
        row = load(bias[:, left:right], x.dtype) if bias is not None else None
        for number in range(len(stripes)):
            stripe, regions = stripes[number], following
            if number + 1 < len(stripes):
                following = load_packed(x, windows, stripes[number + 1 : number + 2], pack)
            for box in boxes(stripe, tile):
                start, end = box[2]
                for first, last in ranges(0, right - left, ACCUMULATOR_BANKS * BANK):
                    panels = ranges(first, last, BANK)
                    sums = sum_taps_of_rows(box, regions, windows, stripe, weights, pack, panels)
                    if bias is not None:
                        # The bias lies along the free dim, where an activation adds none: it is one more product.
                        add_row(sums, panels, ones[:, 0 : end - start], row)
                    columns = (left + first, left + last)
                    added_rows = added[start:end, columns[0] : columns[1]] if added is not None else None
                    store_rows(y[box[0][0], start:end, columns[0] : columns[1]], sums, added_rows, function)


def sum_taps_of_rows(box, regions, windows, stripe, weights, pack, panels):
    """Return the sums over taps and channels of the rows of a box, a PSUM tile for each of `panels` of outputs."""
    rows = box_sizes(box)[2]
    sums = []
    for left, right in panels:
        sums.append(nl.ndarray((rows, right - left), dtype=nl.float32, buffer=nl.psum))
    begun = False
    for block in range(len(regions)):
        for column in range(pack.steps[1]):
            column_position = column * pack.columns
            used = pack.used(windows.window, block, (0, column_position))
            stationary = tap(regions[block][0:used], windows, stripe, box, 0, column_position)
            # Panels come innermost, so that the array keeps the rows of the image for all of them.
            for i in range(len(panels)):
                left, right = panels[i]
                nisa.nc_matmul(
                    dst=sums[i],
                    stationary=stationary,
                    moving=weights[block][0:used, 0, column, left:right],
                    accumulate=begun,
                )
            begun = True
    return sums


def add_row(sums, panels, ones, row):
    """Add a row to all rows of the PSUM tiles, by the product of a column of ones with it."""
    for i in range(len(panels)):
        left, right = panels[i]
        nisa.nc_matmul(dst=sums[i], stationary=ones, moving=row[:, left:right], accumulate=True)


def store_rows(target, sums, added, function):
    """Store function(sums) + added of the PSUM tiles of some rows, which lie side by side."""
    rows, columns = target.shape
    other = None
    if added is not None:
        other = load(added, added.dtype)
    # With another summand the activation stays in float32, so that y is rounded once.
    active = nl.ndarray((rows, columns), dtype=target.dtype if other is None else nl.float32, buffer=nl.sbuf)
    first = 0
    for bank in sums:
        nisa.activation(dst=active[:, first : first + bank.shape[1]], op=function, data=bank)
        first += bank.shape[1]
    result = active
    if other is not None:
        result = nl.ndarray((rows, columns), dtype=target.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=active, data2=other, op=nl.add)
    nisa.dma_copy(dst=target, src=result)
