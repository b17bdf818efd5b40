"""RMSNorm and LayerNorm of row tiles, with one row on each partition, and of the heads of their rows.

A row tile is [row, H] with up to 128 rows. The Scalar engine reduces each row to its statistics, the Vector engine
scales the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.image_rows import list_image_runs, load_image_rows
from nki_kernels.norms.norm import Norm, compute_inverse_root
from nki_kernels.tiles import PARTITIONS, blocks, broadcast_row, filled

SCRATCH_ELEMENTS = 2048
"""Elements per partition of the scratch tile for the terms of a row sum."""

STATISTICS = 512
"""Elements of which bn_stats takes the mean and the variance (nl.tile_size.bn_stats_fmax)."""


@dataclass
class RowNorm(nl.NKIObject):
    """Operands of a norm in SBUF, repeated on every partition that a row tile uses.

    weight: [row, H], offset included; None for a LayerNorm whose weight and bias are applied to transposed rows, see
    `blocks`. bias: [row, H] for LayerNorm, None for RMSNorm. eps: [row, 1] float32. scratch: [row, SCRATCH_ELEMENTS or
    H], which row sums overwrite with their terms; None without a weight. images: ImageNorms, from which
    `select` takes weight and bias, both None here; None if all rows have the same ones.
    """

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    eps: nl.NkiTensor
    scratch: nl.NkiTensor | None
    images: ImageNorms | None = None

    def select(self, first_row, rows):
        """Return the RowNorm of a tile of `rows` rows from `first_row` on, counted among the rows of all images."""
        return self if self.images is None else self.images.select(first_row, rows, self.eps, self.scratch)


@dataclass
class ImageNorms(nl.NKIObject):
    """Weights and biases of a LayerNorm that differ from image to image, see `image_rows`.

    norm: Norm with a row for each image. image_rows: rows of an image. kept: the RowNorm that was selected last, if all
    its rows are of one image, and kept_image the number of this image; else empty and -1.
    """

    norm: Norm
    image_rows: int
    kept: list
    kept_image: int = -1

    def select(self, first_row, rows, eps, scratch):
        """Return the RowNorm of a tile, as `RowNorm.select` does; rows of one image after the other load it once."""
        runs = list_image_runs(first_row, rows, self.image_rows)
        image = runs[0][2] if len(runs) == 1 and runs[0][3] == 1 else -1
        if image >= 0 and image == self.kept_image:
            return self.kept[0]
        if image >= 0:
            # Later tiles of the image may have more rows.
            height = eps.shape[0]
            row = self.norm.weight[image : image + 1, :]
            weight = broadcast_row(row, height, nl.float32, self.norm.offset)
            bias_row = self.norm.bias[image : image + 1, :]
            bias = broadcast_row(bias_row, height, self.norm.bias.dtype, 0.0)
        else:
            loaded = load_image_rows(self.norm.weight, first_row, rows, self.image_rows)
            weight = nl.ndarray(loaded.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=weight, data=loaded, op0=nl.add, operand0=self.norm.offset)
            bias = load_image_rows(self.norm.bias, first_row, rows, self.image_rows)
        row_norm = RowNorm(weight, bias, eps, scratch)
        self.kept, self.kept_image = [row_norm], image
        return row_norm


@dataclass
class RowStatistics(nl.NKIObject):
    """Statistics of each row of a tile, [row, 1] float32: -mean, which RMSNorm lacks; and 1 / rms or 1 / std."""

    negative_mean: nl.NkiTensor | None
    rstd: nl.NkiTensor


def allocate_row_scratch(rows, hidden, dtype):
    """Allocate the SBUF tile that row sums overwrite with their terms: [rows, at most SCRATCH_ELEMENTS]."""
    return nl.ndarray((rows, min(hidden, SCRATCH_ELEMENTS)), dtype=dtype, buffer=nl.sbuf)


def load_norm(norm, scratch, dtype, tokens=0):
    """Load a `Norm` with a weight from HBM as a `RowNorm`, repeated on as many partitions as `scratch` has rows.

    If it has a row for each of several images, nothing is loaded before `RowNorm.select`.

    With an offset, weight + offset is float32; without, the weight is in `dtype`, as the bias is. eps is
    float32.

    Args:
        scratch: result of `allocate_row_scratch`, which the RowNorm keeps.
        tokens: rows of all images, where the norm may have a row for each image.
    """
    rows = scratch.shape[0]
    if norm.count_images() > 1:
        images = ImageNorms(norm, tokens // norm.count_images(), [])
        return RowNorm(None, None, filled((rows, 1), norm.eps), scratch, images)
    weight = broadcast_row(norm.weight, rows, dtype if norm.offset == 0.0 else nl.float32, norm.offset)
    bias = None if norm.bias is None else broadcast_row(norm.bias, rows, dtype, 0.0)
    return RowNorm(weight, bias, filled((rows, 1), norm.eps), scratch)


def compute_row_statistics(tile, norm):
    """Return the `RowStatistics` of each row of a tile [row, H]; the Scalar engine computes them.

    With a bias in `norm` they are -mean and 1 / std (LayerNorm), else None and 1 / rms. norm: `RowNorm`,
    whose scratch is overwritten.
    """
    rows, columns = tile.shape
    sums = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    negative_mean = None
    if norm.bias is not None:
        negative_mean = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        sum_rows(sums, nl.copy, tile, None, norm.scratch)
        nisa.tensor_scalar(dst=negative_mean, data=sums, op0=nl.multiply, operand0=-1.0 / columns)
    sum_rows(sums, nl.square, tile, negative_mean, norm.scratch)
    return RowStatistics(negative_mean, compute_inverse_root(sums, 1.0 / columns, norm.eps))


def normalise(dst, tile, statistics, norm):
    """Write the normalised rows of `tile` [row, H] to `dst`, in dst's dtype; `dst` may be the tile itself.

    RMSNorm is tile * rstd * weight, LayerNorm (tile - mean) * rstd * weight + bias. The Vector engine
    computes in float32 and rounds at the end.

    Args:
        statistics: result of `compute_row_statistics` for the tile. norm: `RowNorm`.
    """
    rows, columns = tile.shape
    if norm.bias is None:
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=tile,
            op0=nl.multiply,
            operand0=statistics.rstd,
            op1=nl.multiply,
            operand1=norm.weight[0:rows, :],
        )
        return
    # Pieces keep the float32 intermediate of LayerNorm at 8 KiB per partition for every H.
    for first in range(0, columns, SCRATCH_ELEMENTS):
        last = min(columns, first + SCRATCH_ELEMENTS)
        weighted = nl.ndarray((rows, last - first), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=weighted,
            data=tile[:, first:last],
            op0=nl.add,
            operand0=statistics.negative_mean,
            op1=nl.multiply,
            operand1=norm.weight[0:rows, first:last],
        )
        nisa.scalar_tensor_tensor(
            dst=dst[:, first:last],
            data=weighted,
            op0=nl.multiply,
            operand0=statistics.rstd,
            op1=nl.add,
            operand1=norm.bias[0:rows, first:last],
        )


def sum_rows(dst, op, tile, shift, scratch):
    """Write sum(op(element + shift)) of each row of `tile` [row, H] to `dst` [row, 1], on the Scalar engine.

    Sums are taken in float32.

    Args:
        op: function of an activation instruction, such as nl.square.
        shift: [row, 1] float32 in SBUF, or None for 0.
        scratch: [rows, SCRATCH_ELEMENTS or H], overwritten with the terms of the sum.
    """
    rows, columns = tile.shape
    for first in range(0, columns, SCRATCH_ELEMENTS):
        last = min(columns, first + SCRATCH_ELEMENTS)
        # The Scalar engine's registers carry the sum from piece to piece, and only the last piece reads them out.
        command = nisa.reduce_cmd.reset_reduce if first == 0 else nisa.reduce_cmd.reduce
        nisa.activation(
            dst=scratch[0:rows, 0 : last - first],
            op=op,
            data=tile[:, first:last],
            bias=shift,
            reduce_op=nl.add,
            reduce_res=dst if last == columns else None,
            reduce_cmd=command,
        )


def sum_squares(terms, rows):
    """Return the sum of the squares of each row of a tile [row, H]: [row, 1] float32 in SBUF, by one instruction.

    terms: tile of the shape of `rows`, overwritten with the squares.
    """
    sums = nl.ndarray((rows.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=terms,
        op=nl.square,
        data=rows,
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return sums


def compute_inverse_rms(rows, eps):
    """Return 1 / sqrt(mean of squares + eps) of each row of a tile [row, H]: [row, 1] float32 in SBUF.

    eps: a column [row or more, 1] float32 in SBUF.
    """
    # The squares may be bfloat16: their sum is taken in float32 before they are rounded, and nothing reads them.
    sums = sum_squares(nl.ndarray(rows.shape, dtype=nl.bfloat16, buffer=nl.sbuf), rows)
    return compute_inverse_root(sums, 1.0 / rows.shape[1], eps)


def normalise_rms(tile, weight, eps):
    """Return each row of `tile` [row, H] over its root mean square, times `weight` [row, H].

    The result is a new SBUF tile of tile's dtype. eps: a number, added to the mean of the squares.
    """
    normalised = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    sums = sum_squares(normalised, tile)
    scale = compute_inverse_root(sums, 1.0 / tile.shape[1], filled((tile.shape[0], 1), eps))
    nisa.scalar_tensor_tensor(
        dst=normalised, data=tile, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=weight
    )
    return normalised


def standardise(dst, rows, eps):
    """Write each row of a tile [row, H] minus its mean, over its standard deviation, to `dst`, maybe the tile itself.

    eps: a column [row or more, 1] float32 in SBUF, added to the variance.
    """
    count, width = rows.shape
    groups = blocks(width, STATISTICS)
    statistics = nl.ndarray((count, 6 * groups), dtype=nl.float32, buffer=nl.sbuf)
    for group in range(groups):
        columns = rows[:, group * STATISTICS : min(width, (group + 1) * STATISTICS)]
        nisa.bn_stats(dst=statistics[:, 6 * group : 6 * group + 6], data=columns)
    moments = nl.ndarray((count, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=moments, data=statistics)
    scale = compute_inverse_root(moments[:, 1:2], 1.0, eps)
    nisa.tensor_scalar(
        dst=dst, data=rows, op0=nl.subtract, operand0=moments[:, 0:1], op1=nl.multiply, operand1=scale
    )


def normalise_heads(tile, weight, head, eps):
    """Divide each head of a float32 tile [row, heads * D] by its root mean square, in place, and weight it.

    Args:
        weight: factors [row, D] in SBUF, the same for all heads, or None for 1.
        head: D, elements of a head.
        eps: a column [row or more, 1] float32 in SBUF, added to the mean of the squares.
    """
    rows, width = tile.shape
    count = width // head
    heads = tile.reshape((rows, count, head))
    products = nl.ndarray(heads.shape, dtype=nl.float32, buffer=nl.sbuf)
    if rows == PARTITIONS:
        # In a prompt the Vector engine would hold up the products.
        nisa.activation(dst=products, op=nl.square, data=heads)
    else:
        nisa.tensor_tensor(dst=products, data1=heads, data2=heads, op=nl.multiply)
    squares = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=squares, op=nl.add, data=products, axis=2)
    scale = compute_inverse_root(squares, 1.0 / head, eps)
    factor = scale.reshape((rows, count, 1)).broadcast(2, head)
    if weight is None:
        nisa.tensor_tensor(dst=heads, data1=heads, data2=factor, op=nl.multiply)
        return
    nisa.tensor_tensor(dst=products, data1=heads, data2=factor, op=nl.multiply)
    repeated = weight.reshape((rows, 1, head)).broadcast(1, count)
    nisa.tensor_tensor(dst=heads, data1=products, data2=repeated, op=nl.multiply)
