"""Convolutions as products: every pack of taps of a block of channels adds one matmul to a tile in PSUM.

Two orders. `convolve` has the weights stationary and the image moving, so its results lie as images do, with the
channels on the partitions. `convolve_rows` has the image stationary, so that a result is a row of channels. Packs,
steps and groups are those of convolution/packing.py; boxes, stripes and regions those of convolution/windows.py.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.cells import (
    OutputBox,
    allocate_boxes,
    count_groups,
    find_shortest_side,
    split_reads,
)
from nki_kernels.convolution.moments import ResultMoments, count_image_tiles
from nki_kernels.convolution.packing import (
    WEIGHT_BYTES,
    choose_pack,
    create_single_pack,
    load_packed,
    load_weights,
)
from nki_kernels.convolution.windows import (
    choose_stripe_sizes,
    choose_tile_sizes,
    count_boxes,
    cover_results,
    measure_box,
    split_box,
    view_tap,
)
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import ACCUMULATOR_BANKS, BANK, PARTITIONS, blocks, filled, load, ranges


def count_resident_outputs(pack, w, dtype):
    """Return the number of output channels whose weights [taps, C, O] stay in SBUF: all, or a multiple of 128.

    Raises: AssertionError if weights of 128 outputs take more than WEIGHT_BYTES of a partition.
    """
    taps, channels, outputs = w.shape
    output_bytes = pack.matmuls * item_bytes(dtype)
    most = WEIGHT_BYTES // output_bytes
    if most >= outputs:
        return outputs
    assert most >= PARTITIONS, (
        f"{taps} taps of {channels} channels take {output_bytes * PARTITIONS} bytes of a partition for 128 outputs, "
        f"more than {WEIGHT_BYTES}; use a smaller window or fewer channels"
    )
    return most // PARTITIONS * PARTITIONS


def lay_out_pack(x, w, windows, shortest, single=False):
    """Return the pack of taps for images x and w [taps, C, O]; set `windows` to the regions that it loads.

    `shortest` is the side of the smallest tile of the PE array that the pack may use. A pack with `single` has one tap.
    """
    choose = create_single_pack if single else choose_pack
    pack = choose(windows, w.shape[1], w.shape[2], x.dtype, shortest)
    windows.lay_out(pack)
    return pack


def convolve(y, x, w, bias, windows, function, added=None, norm=None, moments=None):
    """Store function(convolution + bias) + added of images x [N, C, H, W] to y [N, O, H', W'], all in HBM.

    Images of one row may be given as rows x [N, W, C] for windows of one element.

    Args:
        w: weights [taps, C, O], with the taps of a window row by row.
        bias: [1, O] or None.
        function: activation such as `nl.gelu`; `nl.copy` for none.
        added: [N, O, H', W'] or None.
        norm: `InputNorm` of x, or None.
        moments: [N, O, 2] float32 @ HBM, which takes mean and variance of each channel of y; or None.
    """
    outputs = w.shape[2]
    pack = lay_out_pack(x, w, windows, find_shortest_side(), norm is not None)
    tile, stripes, most_boxes = plan_stripes(windows, pack, outputs, x.dtype)
    loads = ranges(0, len(stripes), pack.groups)
    across = y.permute((1, 0, 2, 3))
    summands = added.permute((1, 0, 2, 3)) if added is not None else None
    factors = norm.load_factors(pack) if norm is not None else None
    measured = None
    for left, right in ranges(0, outputs, count_resident_outputs(pack, w, x.dtype)):
        following = load_normalised(x, windows, stripes[loads[0][0] : loads[0][1]], pack, norm, factors)
        if moments is not None:
            most = count_image_tiles(stripes, tile, windows.images)
            measured = ResultMoments(moments, (left, right), most)
        weights = load_weights(w[:, :, left:right], windows.window, pack, x.dtype)
        bias_columns = load_bias_columns(bias, left, right, pack, most_boxes)
        for number in range(len(loads)):
            stripe_group, regions = stripes[loads[number][0] : loads[number][1]], following
            if number + 1 < len(loads):
                ahead = loads[number + 1]
                following = load_normalised(x, windows, stripes[ahead[0] : ahead[1]], pack, norm, factors)
            for first, end in ranges(0, right - left):
                bias_column = bias_columns[first // PARTITIONS] if bias is not None else None
                banks = plan_banks(stripe_group, tile, pack, (first, end))
                size = (pack.side, pack.find_width(end - first))
                for group, last in ranges(0, len(banks), ACCUMULATOR_BANKS):
                    residuals = []
                    for i in range(group, last if added is not None else group):
                        residuals.append(load_boxes(summands[left:right], banks[i]))
                    sums = sum_taps(banks[group:last], regions, windows, weights, pack, size)
                    for i in range(last - group):
                        results, output_boxes = across[left:right], banks[group + i]
                        epilogue = (function, bias_column, measured)
                        if added is not None:
                            store_sum(results, output_boxes, sums[i], epilogue, residuals[i])
                        else:
                            # The Scalar engine has the images to normalise. Boxes that share a bank take an
                            # instruction each, which is too many for the Vector engine.
                            by_vector = (norm is not None and len(output_boxes) == 1) or i % 2 == 1
                            store_activated(results, output_boxes, sums[i], epilogue, by_vector)
        if measured is not None:
            measured.store()


def load_normalised(x, windows, stripes, pack, norm, factors):
    """Return what `load_packed` returns, normalised and activated if there is an `InputNorm` with its factors."""
    regions = load_packed(x, windows, stripes, pack)
    if norm is not None:
        norm.apply(regions, factors, windows, stripes, pack)
    return regions


def plan_stripes(windows, pack, outputs, dtype):
    """Return how the results of `convolve` are divided, and limit the groups of `pack` to the number of stripes.

    Args:
        windows: `Windows`, laid out by the pack.
        pack: Pack of taps.
        outputs: number of output channels.
        dtype: of the images.

    Returns:
        The sizes (images, rows, columns) of a PSUM tile, the list of stripes, and the number of tiles of a stripe.
    """
    element_bytes = len(pack.blocks) * item_bytes(dtype)
    tile = choose_tile_sizes(windows, element_bytes)
    tiles_together = count_groups(pack.find_width(outputs))
    sizes = choose_stripe_sizes(windows, tile, element_bytes, pack.groups, tiles_together)
    stripes = split_box(cover_results(windows), sizes)
    pack.limit_groups(len(stripes))
    return tile, stripes, count_boxes(sizes, tile)


def plan_banks(stripes, tile, pack, outputs):
    """Return for each PSUM bank the list of `OutputBox` whose sums it holds, in the order of the matmuls.

    The stripes lie in the groups of partitions, in order. Each is cut into boxes of at most `tile` (images, rows,
    columns). The boxes in one bank are of one stripe, side by side in its groups of columns.

    Args:
        outputs: (first, end) of the outputs, at most 128, counted from the first output of the weights in SBUF.
    """
    width = pack.find_width(outputs[1] - outputs[0])
    stripe_boxes, steps = [], 0
    for stripe in stripes:
        stripe_boxes.append(split_box(stripe, tile))
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


def load_bias_columns(bias, left, right, pack, tiles):
    """Load the bias of outputs left … right - 1 as a list of float32 columns @ SBUF, one for every 128 outputs.

    Without a bias the list is empty. A short column is repeated for each group of columns of the array that a box may
    lie in: its width in the array apart, at most `tiles` times.

    Args:
        bias: [1, O] @ HBM or None.
        tiles: number of boxes of one stripe.
    """
    columns = []
    if bias is not None:
        for first, end in ranges(left, right):
            column = load(bias[:, first:end].permute((1, 0)), nl.float32)
            width, height = pack.find_width(end - first), end - first
            count = min(count_groups(width), tiles)
            if count > 1:
                once = column
                column = nl.ndarray(((count - 1) * width + height, 1), dtype=nl.float32, buffer=nl.sbuf)
                for group in range(count):
                    nisa.tensor_copy(dst=column[group * width : group * width + height], src=once)
            columns.append(column)
    return columns


def sum_taps(banks, regions, windows, weights, pack, size):
    """Return the sums over all taps and channels: one PSUM tile, float32, for each list in `banks`.

    A tile is [output, image, row, column].

    Args:
        banks: lists of `OutputBox`, see `plan_banks`.
        regions: what `load_packed` returns, one tile for each block of channels.
        weights: what `load_weights` returns.
        size: (rows, columns) of a tile of the PE array.
    """
    tiles = []
    for output_boxes in banks:
        tiles.append(allocate_boxes(output_boxes, nl.float32, nl.psum))
    begun = False
    for block in range(len(regions)):
        for row in range(pack.steps[0]):
            for column in range(pack.steps[1]):
                position = (row * pack.rows, column * pack.columns)
                used = pack.count_used(windows.window, block, position)
                # Banks come innermost, so that the array keeps the weights of a step for all of them.
                for i in range(len(banks)):  # i: bank
                    for target in banks[i]:
                        first, (left, right) = target.position[0], target.outputs
                        end = first + min(used, target.rows)
                        nisa.nc_matmul(
                            dst=target.view(tiles[i]),
                            stationary=weights[block][first:end, row, column, left:right],
                            moving=view_tap(
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
    """View a box ((first, end) of images, of rows, of columns) of y [channel, image, row, column]."""
    return y[:, box[0][0] : box[0][1], box[1][0] : box[1][1], box[2][0] : box[2][1]]


def store_activated(results, output_boxes, bank, epilogue, by_vector):
    """Store function(sums + bias) of the boxes of a PSUM tile to `results` [output, image, row, column] @ HBM.

    `epilogue` has the activation `function`, `bias`, a float32 column with the partitions of the tile or None, and
    `ResultMoments` or None. If `by_vector` and the function is `nl.copy`, the Vector engine adds the bias, else the
    Scalar engine.
    """
    function, bias, measured = epilogue
    for sums, first, together in split_reads(output_boxes, bank):
        column = bias[first : first + sums.shape[0]] if bias is not None else None
        result = nl.ndarray(sums.shape, dtype=results.dtype, buffer=nl.sbuf)
        if function != nl.copy or not by_vector:
            nisa.activation(dst=result, op=function, data=sums, bias=column)
        elif bias is None:
            nisa.tensor_copy(dst=result, src=sums, engine=nisa.engine.vector)
        else:
            nisa.tensor_scalar(dst=result, data=sums, op0=nl.add, operand0=column)
        store_boxes(results, together, result, first, measured)


def store_sum(results, output_boxes, bank, epilogue, residuals):
    """Store function(sums + bias) + residuals of the boxes of a PSUM tile to `results` [output, image, row, column].

    The sum is rounded once. Without an activation the Vector engine adds both summands in one instruction.

    Args:
        results: y @ HBM.
        output_boxes: the boxes in `bank`.
        bank: the sums of products.
        epilogue: that of `store_activated`.
        residuals: a tile of `load_boxes`.
    """
    function, bias, measured = epilogue
    reads, summands = split_reads(output_boxes, bank), split_reads(output_boxes, residuals)
    for index in range(len(reads)):
        sums, first, together = reads[index]
        residual = summands[index][0]
        column = bias[first : first + sums.shape[0]] if bias is not None else None
        result = nl.ndarray(sums.shape, dtype=results.dtype, buffer=nl.sbuf)
        if function == nl.copy and bias is not None:
            nisa.scalar_tensor_tensor(
                dst=result, data=sums, op0=nl.add, operand0=column, op1=nl.add, operand1=residual
            )
        elif function == nl.copy:
            nisa.tensor_tensor(dst=result, data1=sums, data2=residual, op=nl.add)
        else:
            active = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=active, op=function, data=sums, bias=column)
            nisa.tensor_tensor(dst=result, data1=active, data2=residual, op=nl.add)
        store_boxes(results, together, result, first, measured)


def load_boxes(images, output_boxes):
    """Load what lies in boxes of images [output, image, row, column] @ HBM into a new tile of `allocate_boxes`."""
    tile = allocate_boxes(output_boxes, images.dtype, nl.sbuf)
    for output_box in output_boxes:
        source = select_box(images[output_box.outputs[0] : output_box.outputs[1]], output_box.box)
        target = output_box.view(tile)
        for image in range(source.shape[1]):
            nisa.dma_copy(dst=target[:, image], src=source[:, image])
    return tile


def store_boxes(results, output_boxes, tile, first, measured):
    """Store boxes of `tile`, whose first partition is number `first` of a tile of `allocate_boxes`, to `results`.

    `measured` is `ResultMoments` that take their statistics, or None.
    """
    for output_box in output_boxes:
        target = select_box(results[output_box.outputs[0] : output_box.outputs[1]], output_box.box)
        start = output_box.position[1] - first
        box_results = tile[start : start + output_box.count_outputs()]
        for image in range(target.shape[1]):
            nisa.dma_copy(dst=target[:, image], src=box_results[:, image])
        if measured is not None:
            measured.add(output_box, box_results)


def convolve_rows(y, x, w, bias, added, windows, function):
    """Store function(convolution + bias) + added to y [N, T, O], for images of one row; all in HBM.

    Args:
        x: images [N, C, 1, L].
        w: weights [taps, C, O].
        bias: [1, O] or None.
        added: [T, O], which is added to every image's results, or None.
        function: activation such as `nl.gelu`; `nl.copy` for none.
    """
    outputs = w.shape[2]
    pack = lay_out_pack(x, w, windows, PARTITIONS)
    element_bytes = len(pack.blocks) * item_bytes(x.dtype)
    _, _, most = choose_tile_sizes(windows, element_bytes)
    tile = (1, 1, min(most, PARTITIONS))
    stripes = split_box(cover_results(windows), choose_stripe_sizes(windows, tile, element_bytes))
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
            for box in split_box(stripe, tile):
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
    """Return the sums over all taps and channels for a box of one row: one PSUM tile for each panel of outputs.

    A tile is [row of y, output] float32. `panels` are ranges (first, end) of at most 512 outputs, counted from the
    first output of the weights in SBUF. `stripe` is the box whose region is in `regions`.
    """
    rows = measure_box(box)[2]
    sums = []
    for left, right in panels:
        sums.append(nl.ndarray((rows, right - left), dtype=nl.float32, buffer=nl.psum))
    begun = False
    for block in range(len(regions)):
        for column in range(pack.steps[1]):
            column_position = column * pack.columns
            used = pack.count_used(windows.window, block, (0, column_position))
            stationary = view_tap(regions[block][0:used], windows, stripe, box, 0, column_position)
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
    """Add a row [1, outputs] @ SBUF to every row of the sums, by a product with `ones` [1, rows].

    `sums` are PSUM tiles; tile i gets the columns of the row in range i of `panels`.
    """
    for i in range(len(panels)):
        left, right = panels[i]
        nisa.nc_matmul(dst=sums[i], stationary=ones, moving=row[:, left:right], accumulate=True)


def store_rows(target, sums, added, function):
    """Store function(sums) + added to `target` [row, column] @ HBM; `sums` are PSUM tiles of columns side by side.

    `added` is [row, column] @ HBM or None.
    """
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
