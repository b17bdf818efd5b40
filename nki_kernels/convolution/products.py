"""Convolutions as products: every pack of taps of a block of channels adds one matmul to a tile in PSUM.

Two orders. `convolve` has the weights stationary and the image moving, so its results lie as images do, with the
channels on the partitions. `convolve_rows` has the image stationary, so that a result is a row of channels.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.cells import Part, groups_of, place_sums, read_together, shortest_side
from nki_kernels.convolution.packing import WEIGHT_BYTES, load_packed, load_weights, packed
from nki_kernels.convolution.windows import boxes, boxes_in, sizes_of, stripe_sizes, tap, tile_sizes, whole
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, load, ranges


def held_outputs(pack, w, dtype):
    """Output channels whose weights [taps, C, O] stay in SBUF: all, or a multiple of 128."""
    taps, channels, outputs = w.shape
    each = pack.matmuls * item_bytes(dtype)
    most = WEIGHT_BYTES // each
    if most >= outputs:
        return outputs
    assert most >= PARTITIONS, (
        f"{taps} taps of {channels} channels take {each * PARTITIONS} bytes of a partition for 128 outputs, "
        f"more than {WEIGHT_BYTES}"
    )
    return most // PARTITIONS * PARTITIONS


def chosen_pack(x, w, windows, shortest):
    """The pack of taps for images and weights; the windows take its steps."""
    pack = packed(windows, x.shape[1], w.shape[2], x.dtype, shortest)
    pack.lay_out(windows)
    return pack


def convolve(y, x, w, bias, windows, function):
    """Store function(convolution + bias) to y [N, O, H', W']; w [taps, C, O], bias [1, O] or None."""
    outputs = w.shape[2]
    pack = chosen_pack(x, w, windows, shortest_side())
    each = len(pack.blocks) * item_bytes(x.dtype)
    tile = tile_sizes(windows, each)
    beside = groups_of(pack.width(outputs))
    sizes = stripe_sizes(windows, tile, each, pack.groups, beside)
    stripes = boxes(whole(windows), sizes)
    pack.groups = min(pack.groups, len(stripes))
    loads = ranges(0, len(stripes), pack.groups)
    across = y.permute((1, 0, 2, 3))
    for left, right in ranges(0, outputs, held_outputs(pack, w, x.dtype)):
        following = load_packed(x, windows, stripes[loads[0][0] : loads[0][1]], pack)
        held = load_weights(w[:, :, left:right], windows.window, pack, x.dtype)
        added = bias_columns(bias, left, right, pack, boxes_in(sizes, tile))
        for number in range(len(loads)):
            own, regions = stripes[loads[number][0] : loads[number][1]], following
            if number + 1 < len(loads):
                ahead = loads[number + 1]
                following = load_packed(x, windows, stripes[ahead[0] : ahead[1]], pack)
            for first, end in ranges(0, right - left):
                column = added[first // PARTITIONS] if bias is not None else None
                banks = banks_of(own, tile, pack, (first, end))
                size = (pack.side, pack.width(end - first))
                for group, last in ranges(0, len(banks), ACCUMULATOR_BANKS):
                    sums = summed(banks[group:last], regions, windows, held, pack, size)
                    for i in range(last - group):
                        results = across[left:right]
                        store_activated(results, banks[group + i], sums[i], function, column, i % 2 == 1)


def banks_of(stripes, tile, pack, outputs):
    """The parts of stripes in groups of rows, for some outputs, by the PSUM bank that holds their sums.

    Those of one stripe lie in the groups of columns of one bank: of several images, parts of one form.
    """
    width = pack.width(outputs[1] - outputs[0])
    places, steps = [], 0
    for stripe in stripes:
        own = boxes(stripe, tile)
        places.append(own)
        steps = max(steps, blocks(len(own), groups_of(width)))
    banks = []
    for step in range(steps):
        for row in range(len(stripes)):
            own = places[row]
            each = blocks(len(own), groups_of(width))
            parts = []
            for number in range(step, len(own) if step < each else 0, each):
                position = (row * pack.side, len(parts) * width)
                parts.append(Part(stripes[row], own[number], outputs, position, pack.side))
            if len(parts) > 0:
                banks.append(parts)
    return banks


def bias_columns(bias, left, right, pack, tiles):
    """The bias of output channels left … right, a column for every 128; none without a bias.

    A short column is repeated for each group of columns of the array that a tile of a stripe, of so many, may lie in.
    """
    columns = []
    if bias is not None:
        for first, end in ranges(left, right):
            column = load(bias[:, first:end].permute((1, 0)), nl.float32)
            width, height = pack.width(end - first), end - first
            beside = min(groups_of(width), tiles)
            if beside > 1:
                once = column
                column = nl.ndarray(((beside - 1) * width + height, 1), dtype=nl.float32, buffer=nl.sbuf)
                for group in range(beside):
                    nisa.tensor_copy(dst=column[group * width : group * width + height], src=once)
            columns.append(column)
    return columns


def summed(banks, regions, windows, held, pack, size):
    """The sums over taps and channels of parts, in a PSUM tile for each list of them; size: of tiles of the array."""
    tiles = []
    for parts in banks:
        tiles.append(place_sums(parts))
    begun = False
    for block in range(len(regions)):
        for row in range(pack.steps[0]):
            for column in range(pack.steps[1]):
                at = (row * pack.rows, column * pack.columns)
                used = pack.used(windows.window, block, at)
                for parts in banks:
                    for part in parts:
                        first = part.position[0]
                        end = first + min(used, part.rows)
                        nisa.nc_matmul(
                            dst=part.sums,
                            stationary=held[block][first:end, row, column, part.outputs[0] : part.outputs[1]],
                            moving=tap(
                                regions[block][first:end], windows, part.stripe, part.box, at[0], at[1]
                            ),
                            accumulate=begun,
                            tile_position=part.position,
                            tile_size=size,
                        )
                begun = True
    return tiles


def of_box(y, box):
    """The part of images [channel, image, row, column] that a box is."""
    return y[:, box[0][0] : box[0][1], box[1][0] : box[1][1], box[2][0] : box[2][1]]


def store_activated(results, parts, bank, function, bias, by_vector):
    """Store function(sums + bias) of the parts of a PSUM tile to [output, image, row, column] of HBM.

    The bias is a column or None. Without a function the Vector engine may add it.
    """
    for sums, first, together in read_together(parts, bank):
        column = bias[first : first + sums.shape[0]] if bias is not None else None
        result = nl.ndarray(sums.shape, dtype=results.dtype, buffer=nl.sbuf)
        if function != nl.copy or not by_vector:
            nisa.activation(dst=result, op=function, data=sums, bias=column)
        elif bias is None:
            nisa.tensor_copy(dst=result, src=sums, engine=nisa.engine.vector)
        else:
            nisa.tensor_scalar(dst=result, data=sums, op0=nl.add, operand0=column)
        for part in together:
            target = of_box(results[part.outputs[0] : part.outputs[1]], part.box)
            at = part.position[1] - first
            for image in range(target.shape[1]):
                nisa.dma_copy(dst=target[:, image], src=result[at : at + part.width, image])


def convolve_rows(y, x, w, bias, added, windows, function):
    """Store function(convolution + bias) + added to y [N, T, O], for images of one row; added [T, O] or None."""
    outputs = w.shape[2]
    pack = chosen_pack(x, w, windows, PARTITIONS)
    each = len(pack.blocks) * item_bytes(x.dtype)
    _, _, most = tile_sizes(windows, each)
    tile = (1, 1, min(most, PARTITIONS))
    stripes = boxes(whole(windows), stripe_sizes(windows, tile, each))
    ones = None
    if bias is not None:
        ones = nl.ndarray((1, tile[2]), dtype=x.dtype, buffer=nl.sbuf)
        nisa.memset(dst=ones, value=1.0)
    for left, right in ranges(0, outputs, held_outputs(pack, w, x.dtype)):
        following = load_packed(x, windows, stripes[0:1], pack)
        held = load_weights(w[:, :, left:right], windows.window, pack, x.dtype)
        row = load(bias[:, left:right], x.dtype) if bias is not None else None
        for number in range(len(stripes)):
            stripe, regions = stripes[number], following
            if number + 1 < len(stripes):
                following = load_packed(x, windows, stripes[number + 1 : number + 2], pack)
            for box in boxes(stripe, tile):
                start, end = box[2]
                for first, last in ranges(0, right - left, ACCUMULATOR_BANKS * BANK):
                    panels = ranges(first, last, BANK)
                    sums = summed_rows(box, regions, windows, stripe, held, pack, panels)
                    if bias is not None:
                        add_row(sums, panels, ones[:, 0 : end - start], row)
                    columns = (left + first, left + last)
                    other = added[start:end, columns[0] : columns[1]] if added is not None else None
                    store_rows(y[box[0][0], start:end, columns[0] : columns[1]], sums, other, function)


def summed_rows(box, regions, windows, stripe, held, pack, panels):
    """The sums over taps and channels of the rows of a box, in a PSUM tile for each range of outputs of `panels`."""
    rows = sizes_of(box)[2]
    sums = []
    for left, right in panels:
        sums.append(nl.ndarray((rows, right - left), dtype=nl.float32, buffer=nl.psum))
    begun = False
    for block in range(len(regions)):
        for column in range(pack.steps[1]):
            at = column * pack.columns
            used = pack.used(windows.window, block, (0, at))
            stationary = tap(regions[block][0:used], windows, stripe, box, 0, at)
            for i in range(len(panels)):
                left, right = panels[i]
                nisa.nc_matmul(
                    dst=sums[i],
                    stationary=stationary,
                    moving=held[block][0:used, 0, column, left:right],
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
    active = nl.ndarray((rows, columns), dtype=target.dtype if other is None else nl.float32, buffer=nl.sbuf)
    at = 0
    for each in sums:
        nisa.activation(dst=active[:, at : at + each.shape[1]], op=function, data=each)
        at += each.shape[1]
    result = active
    if other is not None:
        result = nl.ndarray((rows, columns), dtype=target.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=active, data2=other, op=nl.add)
    nisa.dma_copy(dst=target, src=result)
