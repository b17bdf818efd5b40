"""Rows of 8 bits with a static scale, one number that all rows of a product share and that a checkpoint has.

    quantised = clip(row, least * scale, largest * scale) * (1 / scale)

Least and largest are the limits of a checkpoint's numbers: -128 and 127 of int8, -448 and 448 of float8_e4m3fn. Chips
that compute in float8_e4m3, which ends at 240, take twice the scale and half of the limits. Where several weights
multiply the same rows, the largest of their scales counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.projection.quantised_rows import QUANTISATION_STAGES, list_filled_blocks
from nki_kernels.tiles import PARTITIONS, load_repeated


@dataclass
class StaticScale(nl.NKIObject):
    """Static scale of the rows of one product, on every partition: float32 columns [128, 1] in SBUF.

    scale, inverse: the scale and 1 / scale. lower, upper: the least and the largest number that is not clipped.
    """

    scale: nl.NkiTensor
    inverse: nl.NkiTensor
    lower: nl.NkiTensor
    upper: nl.NkiTensor

    def clip(self, tile):
        """Limit an SBUF tile [partition, …] to the numbers from `lower` to `upper`, in place."""
        used = tile.shape[0]
        nisa.tensor_scalar(
            dst=tile,
            data=tile,
            op0=nl.minimum,
            operand0=self.upper[0:used, :],
            op1=nl.maximum,
            operand1=self.lower[0:used, :],
        )

    def divide(self, dst, tile):
        """Write an SBUF tile [partition, …] divided by the scale to another one in SBUF, in its dtype."""
        nisa.activation(dst=dst, op=nl.copy, data=tile, scale=self.inverse[0 : tile.shape[0], :])


@dataclass
class StaticQuantiser(nl.NKIObject):
    """Quantiser of the rows of a feed-forward block by static scales, in the place of a RowQuantiser.

    rows, intermediate: StaticScale of the rows of the first and of the last product. columns: for each row tile the
    scale of its rows, float32 [row, 1] in SBUF.
    """

    rows: StaticScale
    intermediate: StaticScale
    columns: list

    def measure(self, tile, index):
        """Limit the row tile number `index`, an SBUF tile [row, H], to the range of its scale, in place."""
        self.rows.clip(tile)

    def divide(self, tile, index):
        """Divide the row tile number `index`, an SBUF tile [row, H], in place, and append its scale to `columns`."""
        self.rows.divide(tile, tile)
        self.columns.append(self.rows.scale[0 : tile.shape[0], :])

    def multiply_weight_scales(self, scales):
        """Multiply scales of the columns of gate and up by the scale of the rows, in place.

        scales: float32 SBUF tiles [f in block, block], or None.
        """
        for tile in scales:
            if tile is not None:
                operand = self.rows.scale[0 : tile.shape[0], :]
                nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=operand)


@dataclass
class StaticIntermediates(nl.NKIObject):
    """The intermediates of a row group on their way to 8 bits, as `IntermediateQuantiser` has them.

    scale: StaticScale. intermediates: SBUF tiles [f in block, block, row]. inner: columns of each of them. dtype: of
    the results. row_ranges: ranges (first, end) of rows, one for each row tile. stage: number of stages that are
    issued. results: tiles of the shape of the intermediates after the last stage.
    """

    scale: StaticScale
    intermediates: list
    inner: int
    dtype: object
    row_ranges: list
    stage: int
    results: list

    def advance(self):
        """Issue the next stage, if there is one: all intermediates are clipped in the first, divided in the last."""
        if self.stage == 0:
            for intermediate in self.intermediates:
                for first, end, used in list_filled_blocks(intermediate, self.inner):
                    self.scale.clip(intermediate[0:used, first:end, :])
        elif self.stage == QUANTISATION_STAGES - 1:
            for intermediate in self.intermediates:
                quantised = nl.ndarray(intermediate.shape, dtype=self.dtype, buffer=nl.sbuf)
                for first, end, used in list_filled_blocks(intermediate, self.inner):
                    self.scale.divide(quantised[0:used, first:end, :], intermediate[0:used, first:end, :])
                self.results.append(quantised)
        self.stage += 1

    def finish(self):
        """Issue all stages that remain; return the quantised tiles and the scales, a column for each row tile."""
        while self.stage < QUANTISATION_STAGES:
            self.advance()
        scales = []
        for first, end in self.row_ranges:
            scales.append(self.scale.scale[0 : end - first, :])
        return self.results, scales


def find_static_limits(dtype):
    """Return the least and the largest number of rows with a static scale in a dtype, that of the weights."""
    if dtype == nl.int8:
        return -128.0, 127.0
    largest = 224.0 if dtype == nl.float8_e4m3 else 448.0
    return -largest, largest


def check_input_scales(weights, scales, quantises_rows):
    """Raise AssertionError unless static scales of rows are float32 [1, 1], of all weights or of none.

    weights, scales: lists of arrays @ HBM, each maybe None. quantises_rows: whether rows are quantised, as scales need.
    """
    scale_count = 0
    for index in range(len(weights)):
        scale = scales[index]
        if scale is not None:
            scale_count += 1
            assert weights[index] is not None and quantises_rows, (
                "an input scale is given without its weight or without quantises_rows; leave it out"
            )
            assert scale.shape == (1, 1) and scale.dtype == nl.float32, (
                f"an input scale is float32 (1, 1), not {scale.dtype} {scale.shape}"
            )
    for index in range(len(weights)):
        assert weights[index] is None or (scales[index] is not None) == (scale_count > 0), (
            "some weights have an input scale and some have none; pass one for each weight, or none at all"
        )


def load_static_quantiser(scales, dtype):
    """Return the StaticQuantiser of a feed-forward block with weights of `dtype`.

    scales: static scales of the rows of gate, up and down, float32 [1, 1] @ HBM; that of gate may be None.
    """
    return StaticQuantiser(load_static_scale(scales[0:2], dtype), load_static_scale(scales[2:3], dtype), [])


def load_static_scale(scales, dtype):
    """Return the StaticScale of rows that weights of `dtype` multiply.

    scales: their static scales, a list of float32 [1, 1] @ HBM, of which the largest counts; None is left out.
    """
    scale = None
    for source in scales:
        if source is not None:
            column = load_repeated(source, PARTITIONS)
            if scale is not None:
                nisa.tensor_tensor(dst=column, data1=column, data2=scale, op=nl.maximum)
            scale = column
    inverse = nl.ndarray(scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=scale)
    bounds = []
    for limit in find_static_limits(dtype):
        bound = nl.ndarray(scale.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=bound, data=scale, op0=nl.multiply, operand0=limit)
        bounds.append(bound)
    return StaticScale(scale, inverse, bounds[0], bounds[1])


def static_rows_reference(
    rows: np.ndarray,
    scale: np.ndarray,
    element: np.dtype,
    dtype: np.dtype,
    divided_dtype: np.dtype | None = None,
) -> np.ndarray:
    """Return rows [..., columns] rounded to fp8 with a static scale, times this scale, in their own dtype.

    Args:
        rows: float32 or float64.
        scale: [1, 1].
        element: float8_e4m3 or float8_e4m3fn.
        dtype: to which rows are rounded before and after they are clipped.
        divided_dtype: to which divided rows are rounded before they are rounded to fp8; None for no such rounding.
    """
    least, largest = find_static_limits(element)
    factor = scale.astype(rows.dtype)
    stored = rows.astype(dtype).astype(rows.dtype)
    divided = np.clip(stored, least * factor, largest * factor).astype(dtype).astype(rows.dtype) * (
        1 / factor
    )
    if divided_dtype is not None:
        divided = divided.astype(divided_dtype).astype(rows.dtype)
    return divided.astype(element).astype(rows.dtype) * factor
