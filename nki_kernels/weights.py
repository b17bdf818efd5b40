"""Loads of weights from HBM to SBUF: one function for each layout, and one step that converts elements.

The tile of a weight [K, N] is [partition, block, column], with C = ceil(K / 128) blocks. In *blocks* row k
lies on partition k % 128, in block k // 128. In *runs* it lies on partition k // C, in block k % C, as the
hidden states of a decode step do. The weight of one expert is loaded out of a stack [E, K, N], in runs or as
up to 128 of its rows, [row, column].

Kernels pass the record `WeightMatrix` on. A weight of 8 bits is stored as elements and scales, one for each
column: element [k, n] stands for elements[k, n] * scales[n]. Products take the elements alone, and the kernel
multiplies their sums by the scales as they leave PSUM. Elements of fp8 go to the Tensor engine as they are
where the rows have 16 bits; other elements are converted to the rows' dtype, which is exact. Weights of 4 bits
are two elements in a byte, with zero points, see `nibbles`. A weight may have a scale for each block of 128 rows and
128 columns instead, see `block_scales`: loads in blocks multiply its elements, unless products scale the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.block_scales import load_block_scales, widen_blocks
from nki_kernels.dma import STATIC, transfer
from nki_kernels.nibbles import NibbleMatrix, check_nibbles, load_nibbles_into, load_paired_runs_into
from nki_kernels.projection.block_loads import load_rows_into
from nki_kernels.scale_groups import check_group_scales, describe_nibbles, load_scaled_nibbles_into
from nki_kernels.tiles import PARTITIONS, blocks, count_block_partitions


@dataclass
class WeightMatrix(nl.NKIObject):
    """A weight [K, N] @ HBM, a part of one, or a stack [E, K, N] with a weight for each expert.

    scales: [1, N] float32 @ HBM, the number that each column of products is multiplied by; [E, 1, N] for a stack;
    None for a plain weight. nibbles: NibbleMatrix of a weight of 4 bits, whose elements are [packed rows, N]
    uint8; else None. block_scales: the number that multiplies each block of 128 rows and columns, float32; of a stack
    [E, ceil(K / 128), ceil(N / 128)] @ HBM, else [128, K block, column block] in SBUF; None without. scales_rows:
    whether products multiply their rows or sums by the block scales, so that loads leave the elements as they are.
    block_start: position of column 0 in its block.
    """

    elements: nl.NkiTensor
    scales: nl.NkiTensor | None = None
    nibbles: NibbleMatrix | None = None
    block_scales: nl.NkiTensor | None = None
    scales_rows: bool = False
    block_start: int = 0

    def count_rows(self):
        """Return K, the rows of the weight, each element counted that a byte holds."""
        return self.elements.shape[0] if self.nibbles is None else self.nibbles.depth

    def adds_zero_points(self):
        """Return whether products add the term of `projection.zero_points`: 4 bits with scales of columns."""
        return self.nibbles is not None and self.nibbles.scales is None

    def submatrix(self, rows, columns):
        """Return the WeightMatrix with rows (first, end) and columns (first, end) of this one, a view in HBM."""
        scales = None if self.scales is None else self.scales[:, columns[0] : columns[1]]
        first, end = rows
        nibbles = self.nibbles
        if nibbles is not None:
            first, end = nibbles.find_packed_rows(rows)
            nibbles = nibbles.submatrix(rows, columns)
        elements = self.elements[first:end, columns[0] : columns[1]]
        if self.block_scales is None:
            return WeightMatrix(elements, scales, nibbles)
        # Rows begin with a block.
        start, stop = self.block_start + columns[0], self.block_start + columns[1]
        block_scales = self.block_scales[
            :, first // PARTITIONS : blocks(end), start // PARTITIONS : blocks(stop)
        ]
        return WeightMatrix(elements, None, None, block_scales, self.scales_rows, start % PARTITIONS)


@dataclass
class ExpertIndex(nl.NKIObject):
    """Index of an expert in a stack of weights [E, …].

    number: the index, if it is known at compile time, else 0. tile: [1, 1] int32 in SBUF with the index, if
    it is known at run time only, else None.
    """

    number: int
    tile: nl.NkiTensor | None


def select_columns(weight, first, end):
    """Return the WeightMatrix with columns first … end - 1 of another one, a view in HBM; None for None."""
    return None if weight is None else weight.submatrix((0, weight.count_rows()), (first, end))


def wrap_matrix(elements, scales=None, nibbles=None, block_scales=None):
    """Return a WeightMatrix of an array [K, N] and its scales [1, N] or None, both @ HBM; None for None.

    nibbles: the NibbleMatrix of packed elements, or None. block_scales: [ceil(K / 128), ceil(N / 128)] @ HBM, which are
    loaded here, or None.
    """
    if elements is None:
        return None
    return WeightMatrix(
        elements, scales, nibbles, None if block_scales is None else load_block_scales(block_scales)
    )


def wrap_operand(name, elements, depth, scales, zeros, nibble_dtype, block_scales=None, most_blocks=0):
    """Return the WeightMatrix of a kernel's weight with `depth` rows, @ HBM; None for None.

    Raises AssertionError for scales and zero points that do not fit. `name` names the weight. block_scales and
    most_blocks are arguments of `check_scales`, the others those of `describe_nibbles`.
    """
    check_nibbles(elements, scales, zeros, nibble_dtype)
    nibbles = describe_nibbles(elements, depth, scales, zeros, nibble_dtype)
    if nibbles is not None and nibbles.scales is not None:
        check_scales(name, elements, None, block_scales, most_blocks)
        check_group_scales(name, elements, depth, scales)
        return WeightMatrix(elements, None, nibbles)
    check_scales(name, elements, scales, block_scales, most_blocks)
    return wrap_matrix(elements, scales, nibbles, block_scales)


def wrap_projection_operand(
    name, elements, depth, scales, zeros, nibble_dtype, block_scales=None, most_blocks=0
):
    """Return what `wrap_operand` returns, for a kernel that takes no scales of groups of rows, and refuse these."""
    check_scales(name, elements, scales, block_scales, most_blocks)
    return wrap_operand(name, elements, depth, scales, zeros, nibble_dtype, block_scales, most_blocks)


def check_scales(name, elements, scales, block_scales=None, most_blocks=0):
    """Refuse scales of a weight [K, N] that are not float32 [1, N], and wrong block scales; accept None for all.

    A weight has scales or block scales, see `check_block_scales`.
    """
    check_block_scales(name, elements, block_scales, most_blocks)
    if scales is not None:
        assert block_scales is None, f"{name} has scales and block scales; pass one of them"
        assert elements is not None, f"{name}_scales is given without {name}; leave it out"
        assert scales.shape == (1, elements.shape[1]) and scales.dtype == nl.float32, (
            f"{name}_scales is float32 [1, {elements.shape[1]}], one for each column of {name}, "
            f"not {scales.dtype} {scales.shape}"
        )


def check_block_scales(name, elements, scales, most_blocks):
    """Refuse block scales of a weight [K, N] that are not float32 [ceil(K / 128), ceil(N / 128)]; accept None for both.

    Also refuse elements that do not have 8 bits, and more than `most_blocks` scales. elements, scales: @ HBM.
    """
    if scales is not None:
        assert elements is not None, f"{name}_block_scales is given without {name}; leave it out"
        assert is_fp8(elements.dtype) or elements.dtype == nl.int8, (
            f"{name} with block scales is float8_e4m3, float8_e5m2 or int8, not {elements.dtype}"
        )
        shape = (blocks(elements.shape[0]), blocks(elements.shape[1]))
        assert scales.shape == shape and scales.dtype == nl.float32, (
            f"{name}_block_scales is float32 {shape}, one for each 128 rows and 128 columns of {name}, "
            f"not {scales.dtype} {scales.shape}"
        )
        count = shape[0] * shape[1]
        assert count <= most_blocks, (
            f"{name}_block_scales has {count} scales; at most {most_blocks} stay in SBUF: cut {name} over more ranks"
        )


def has_block_scales(weights):
    """Return whether one of a list of WeightMatrix has block scales."""
    count = 0
    for weight in weights:
        count += 0 if weight.block_scales is None else 1
    return count > 0


def occupies_vector(weight):
    """Return whether the Vector engine works on each loaded piece of a weight: it unpacks 4 bits or applies scales."""
    return weight.nibbles is not None or (weight.block_scales is not None and not weight.scales_rows)


def check_stack_scales(name, stack):
    """Refuse scales and block scales of a stack [E, K, N], a WeightMatrix, of other shapes and dtypes, or both at once.

    Scales are float32 [E, 1, N], block scales float32 [E, ceil(K / 128), ceil(N / 128)]. None is accepted.
    """
    if stack.block_scales is not None:
        experts, depth, columns = stack.elements.shape
        shape = (experts, blocks(depth), blocks(columns))
        assert stack.block_scales.shape == shape and stack.block_scales.dtype == nl.float32, (
            f"{name}_block_scales is float32 {shape}, one for each expert and 128 rows and columns of {name}, "
            f"not {stack.block_scales.dtype} {stack.block_scales.shape}"
        )
        assert stack.scales is None, f"{name} has scales and block scales; pass one of them"
    if stack.scales is not None:
        experts, _, columns = stack.elements.shape
        assert stack.scales.shape == (experts, 1, columns) and stack.scales.dtype == nl.float32, (
            f"{name}_scales is float32 [{experts}, 1, {columns}], one for each expert and column of {name}, "
            f"not {stack.scales.dtype} {stack.scales.shape}"
        )


def is_fp8(dtype):
    """Return whether a dtype has numbers of fp8, which the Tensor engine pairs with rows of 16 bits."""
    return is_e4m3(dtype) or dtype == nl.float8_e5m2


def is_e4m3(dtype):
    """Return whether a dtype is float8_e4m3, or float8_e4m3fn, which some chips multiply in its place."""
    return dtype == nl.float8_e4m3 or dtype == nl.float8_e4m3fn


def choose_operand_dtype(weights, dtype):
    """Return the dtype in which a product with rows of `dtype` takes the elements of a list of WeightMatrix.

    It is that of the elements if they have fp8 in common and the rows have 16 bits: the Tensor engine pairs
    these, and float32 with nothing else. Otherwise it is `dtype`, and loads convert elements to it or multiply them
    by block scales. All weights have 4 bits, or none has; nibbles become float8_e4m3 unless their NibbleMatrix says
    otherwise or has scales of groups.
    """
    elements = weights[0].elements.dtype
    if weights[0].nibbles is not None:
        takes_fp8 = weights[0].adds_zero_points() and weights[0].nibbles.as_fp8
        return nl.float8_e4m3 if takes_fp8 and dtype != nl.float32 else dtype
    if dtype == nl.float32 or not is_fp8(elements):
        return dtype
    for weight in weights:
        widens = weight.block_scales is not None and not weight.scales_rows
        if weight.elements.dtype != elements or widens:
            return dtype
    return elements


def is_plain(weight, dtype):
    """Return whether the elements of a WeightMatrix have `dtype` already, so that loaded ones need no `convert`."""
    return weight.elements.dtype == dtype


def convert(dst, elements, weight):
    """Write loaded elements of a weight to `dst` in dst's dtype; both are SBUF tiles of one shape.

    weight: the WeightMatrix they come from. Its scales are not applied: products apply them to their sums.
    """
    nisa.tensor_copy(dst=dst, src=elements)


def convert_blocks(dst, elements, weight, first_block):
    """Write loaded K blocks of a weight, from `first_block` on, to `dst` in dst's dtype, times its block scales if any.

    dst, elements: SBUF tiles [k in block, K block, column] with all columns of the WeightMatrix.
    """
    if weight.block_scales is None:
        convert(dst, elements, weight)
    else:
        depth = elements.shape[1]
        scales = weight.block_scales[:, first_block : first_block + depth, :]
        widen_blocks(dst, elements, scales, weight.block_start)


def load_blocks(weight, dtype, queue):
    """Load a WeightMatrix [K, N] into a new SBUF tile [k in block, block, column] of `dtype`, on a queue of `dma`.

    Row k lies on partition k % 128, in block k // 128.
    """
    depth, columns = weight.count_rows(), weight.elements.shape[1]
    result = nl.ndarray((min(PARTITIONS, depth), blocks(depth), columns), dtype=dtype, buffer=nl.sbuf)
    load_blocks_into(result, weight, queue)
    return result


def load_blocks_into(tile, weight, queue):
    """Load a WeightMatrix [K, N] into an SBUF tile [k in block, block, column], in its dtype, on a queue of `dma`.

    Row k lies on partition k % height, in block k // height, for a tile of `height` partitions. In a short
    last block the partitions without a row are not written. Nibbles with scales of groups are multiplied by them,
    unless the tile is float8_e4m3.
    """
    elements = weight.elements
    if weight.nibbles is not None and (weight.adds_zero_points() or tile.dtype == nl.float8_e4m3):
        load_nibbles_into(tile, elements, weight.nibbles.depth, queue)
        return
    if weight.nibbles is not None:
        load_scaled_nibbles_into(tile, elements, weight.nibbles, queue)
        return
    if is_plain(weight, tile.dtype):
        load_rows_into(tile, elements, queue)
        return
    raw = nl.ndarray(tile.shape, dtype=elements.dtype, buffer=nl.sbuf)
    load_rows_into(raw, elements, queue)
    full = elements.shape[0] // PARTITIONS
    if full > 0:
        convert_blocks(tile[:, 0:full, :], raw[:, 0:full, :], weight, 0)
    # Partitions behind the short block were not loaded, so its rows are converted apart.
    short = elements.shape[0] - full * PARTITIONS
    if short > 0:
        last = slice(full, full + 1)
        convert_blocks(tile[0:short, last, :], raw[0:short, last, :], weight, full)


def load_runs_into(tile, weight, first_block):
    """Load blocks `first_block` … of a WeightMatrix [K, N] in runs into an SBUF tile [partition, block, column].

    All blocks of the tile are filled, in its dtype. With C = ceil(K / 128), row p * C + b lies on partition
    p, in block b of the weight. Rows beyond K, which the last partition lacks, stay undefined: no product may
    read them. Weights of 4 bits lie in paired runs, see `nibbles`.
    """
    elements = weight.elements
    if weight.nibbles is not None:
        load_paired_runs_into(tile, elements, first_block, STATIC)
        return
    depth = elements.shape[0]
    count = blocks(depth)
    end_block = first_block + tile.shape[1]
    raw = tile
    if not is_plain(weight, tile.dtype):
        raw = nl.ndarray(tile.shape, dtype=elements.dtype, buffer=nl.sbuf)
    full = depth // count
    source = elements[0 : full * count, :].reshape_dim(0, (full, count))
    transfer(raw[0:full, :, :], source[:, first_block:end_block, :], STATIC)
    # The partition behind the full ones lacks some rows of its run, so a second DMA brings those that exist.
    last = min(end_block, depth - full * count)
    if last > first_block:
        first_row = full * count + first_block
        rows = elements[first_row : first_row + last - first_block, :]
        transfer(raw[full : full + 1, 0 : last - first_block, :], rows, STATIC)
    if not is_plain(weight, tile.dtype):
        convert_runs(tile, raw, weight, depth, first_block)


def convert_runs(tile, raw, weight, depth, first_block):
    """Convert loaded blocks of a weight in runs from `raw` to `tile`, both SBUF tiles [partition, block, column].

    In runs, row p * C + b of the weight lies on partition p, in block b, where C = ceil(depth / 128).
    Partitions without a row, beyond `depth` rows, are left out. first_block: the weight's block that block 0
    of the tiles holds.
    """
    for block in range(first_block, first_block + tile.shape[1]):
        used = count_block_partitions(depth, block, True)
        convert(tile[0:used, block - first_block, :], raw[0:used, block - first_block, :], weight)


def view_expert(array, expert, pattern, offset):
    """View elements of one expert of an array [E, …] @ HBM with one or two further dims, as `ap` does.

    expert: ExpertIndex. pattern: list of [step, count] as for `ap`. offset: first element, counted within the
    expert. An index that is known at run time only becomes a scalar offset.
    """
    elements = array.shape[1] if len(array.shape) == 2 else array.shape[1] * array.shape[2]
    if expert.tile is None:
        return array.ap(pattern=pattern, offset=expert.number * elements + offset)
    return array.ap(pattern=pattern, offset=offset, scalar_offset=expert.tile, indirect_dim=0)


def load_expert_runs(stack, expert, block_range, columns, dtype):
    """Load part of an expert's weight in runs into a new SBUF tile [partition, block, column] of `dtype`.

    With C = ceil(K / 128), row p * C + b of the weight lies on partition p, in block b. Rows beyond K, which
    the last partition lacks, stay undefined.

    Args:
        stack: WeightMatrix [E, K, N].
        expert: ExpertIndex.
        block_range, columns: ranges (first, end) of blocks and columns that are loaded.
        dtype: of the tile.
    """
    elements = stack.elements
    depth, pitch = elements.shape[1], elements.shape[2]
    first_block, end_block = block_range
    first_column, end_column = columns
    width = end_column - first_column
    count = blocks(depth)
    full = depth // count
    shape = (count_block_partitions(depth, 0, True), end_block - first_block, width)
    raw = nl.ndarray(shape, dtype=elements.dtype, buffer=nl.sbuf)
    pattern = [[count * pitch, full], [pitch, end_block - first_block], [1, width]]
    offset = first_block * pitch + first_column
    nisa.dma_copy(dst=raw[0:full, :, :], src=view_expert(elements, expert, pattern, offset))
    short = min(end_block, depth - full * count) - first_block
    if short > 0:
        pattern = [[count * pitch, 1], [pitch, short], [1, width]]
        source = view_expert(elements, expert, pattern, full * count * pitch + offset)
        nisa.dma_copy(dst=raw[full : full + 1, 0:short, :], src=source)
    if is_plain(stack, dtype):
        return raw
    result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    convert_runs(result, raw, stack, depth, first_block)
    return result


def load_expert_rows(stack, expert, first, end, dtype):
    """Load rows first … end - 1 of an expert's weight, at most 128, into a new SBUF tile [row, column] of `dtype`.

    stack: WeightMatrix [E, K, N]. expert: ExpertIndex.
    """
    elements = stack.elements
    columns = elements.shape[2]
    raw = nl.ndarray((end - first, columns), dtype=elements.dtype, buffer=nl.sbuf)
    pattern = [[columns, end - first], [1, columns]]
    nisa.dma_copy(dst=raw, src=view_expert(elements, expert, pattern, first * columns))
    if is_plain(stack, dtype):
        return raw
    result = nl.ndarray(raw.shape, dtype=dtype, buffer=nl.sbuf)
    convert(result, raw, stack)
    return result
