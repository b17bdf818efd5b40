"""Rows of 8 bits for products of fp8 weights: each row is divided by a scale of its own, and rounded to their dtype.

    scale = max(|row|) / largest;   quantised = row * (1 / scale)

The largest number is 240 beside weights of float8_e4m3, 448 beside those of float8_e4m3fn.

Rows [row, H] are rounded to their own dtype before they are rounded to fp8. The intermediate of a feed-forward block
lies transposed, [f in block, block, row], and is rounded to fp8 at once. Its scale is that of a rank's columns, or of
the columns of all ranks, see `row_maxima`. The
first product is linear in the scale of its rows, so gate is multiplied by it before the activation. Up's scale is
left out of the intermediate, and multiplies the row of the last product with the intermediate's own scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import exchange_tiles
from nki_kernels.norms.row_tiles import RowNorm, compute_row_statistics, normalise
from nki_kernels.projection.row_maxima import reduce_maximum, share_maxima
from nki_kernels.tiles import PARTITIONS, blocks, filled, identity, ranges
from nki_kernels.weights import is_e4m3

QUANTISATION_STAGES = 3
"""Stages in which an intermediate is quantised, without the stage in which ranks share row maxima."""

DIVIDED_BLOCKS, DIVIDED_ELEMENTS = 4, 512
"""Least blocks of an intermediate, and elements on a partition, that one instruction divides."""

LEAST = 1.0e-30
"""Least magnitude of a row that counts: a row of zeros has this divided by the largest number as its scale."""


@dataclass
class RowQuantiser(nl.NKIObject):
    """Scales of all rows so far, and the operands that bring columns of numbers to all partitions.

    columns: for each row tile a float32 column [row, 1] in SBUF, what its quantised rows are multiplied by.
    diagonals: for each row tile the diagonal matrix of its column, float32 [row, row] in SBUF. identity, ones:
    float32 [rows of a tile, rows of a tile] and [rows of a tile, 128] in SBUF, or None where no column is brought to
    all partitions; then there are no diagonals. scratch: two SBUF tiles [row, H], which magnitudes overwrite in turn.
    element: float8_e4m3 or float8_e4m3fn, in which rows are multiplied. shared_maxima: for each row tile the largest
    magnitudes of its rows over all ranks, columns [row, 1] in SBUF; None if rows are measured.
    """

    columns: list
    diagonals: list
    identity: nl.NkiTensor | None
    ones: nl.NkiTensor | None
    scratch: list
    element: object
    shared_maxima: list | None = None

    def build_diagonal(self, column):
        """Return the diagonal matrix of a float32 column [row, 1] in SBUF as a new SBUF tile [row, row]."""
        height = column.shape[0]
        diagonal = nl.ndarray((height, height), dtype=nl.float32, buffer=nl.sbuf)
        unit = self.identity[0:height, 0:height]
        nisa.tensor_scalar(dst=diagonal, data=unit, op0=nl.multiply, operand0=column)
        return diagonal

    def measure(self, tile, index):
        """Write the magnitudes of row tile number `index`, an SBUF tile [row, H], to a scratch tile.

        Does nothing if the ranks share the row maxima.
        """
        if self.shared_maxima is None:
            nisa.activation(dst=self.view_scratch(tile, index), op=nl.abs, data=tile)

    def divide(self, tile, index):
        """Divide the measured row tile number `index`, an SBUF tile [row, H], by its scales, in place; append them."""
        if self.shared_maxima is None:
            largest = reduce_maximum(self.view_scratch(tile, index))
        else:
            # `index` counts the row tiles of a group, `columns` those of all groups.
            largest = self.shared_maxima[len(self.columns)]
        scale, inverse = compute_scale(largest, find_largest(self.element))
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=inverse)
        self.columns.append(scale)
        if self.identity is not None:
            self.diagonals.append(self.build_diagonal(scale))

    def view_scratch(self, tile, index):
        """Return the scratch tile of row tile number `index`, a view of the shape of `tile`."""
        return self.scratch[index % 2][0 : tile.shape[0], :]

    def spread(self, diagonals):
        """Return the diagonals of matrices, one after the other, on all partitions: float32 [128, rows] in SBUF."""
        rows = 0
        for diagonal in diagonals:
            rows += diagonal.shape[0]
        bank = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
        first = 0
        for diagonal in diagonals:
            height = diagonal.shape[0]
            # A column has one number beside zeros, so the sum over its partitions is the number itself.
            nisa.nc_matmul(
                dst=bank[:, first : first + height], stationary=self.ones[0:height, :], moving=diagonal
            )
            first += height
        spread_numbers = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=spread_numbers, op=nl.copy, data=bank)
        return spread_numbers


@dataclass
class SpreadFactors(nl.NKIObject):
    """Factors of the rows of a product on all partitions, as `RowFactors` has them: float32 [128, row] in SBUF."""

    factors: nl.NkiTensor

    def compute(self):
        """Return `factors`."""
        return self.factors


@dataclass
class IntermediateQuantiser(nl.NKIObject):
    """The intermediates of a row group on their way to fp8, in stages between which other products run.

    Each stage waits for another engine. So products that do not need the intermediates are issued in between.

    quantiser: RowQuantiser. intermediates: SBUF tiles [f in block, block, row]: of this core, and of the other core
    if there is one. inner: columns of each of them. row_ranges: ranges (first, end) of rows, one for each row tile.
    columns: for each row tile a float32 column by which the scales are multiplied, or None. exchanges: whether the
    other core has other columns of the same rows; both cores then take the larger scale. stage: number of stages
    that are issued. replica_group: the ranks that share row maxima, or None.

    magnitudes: UnitMagnitudes of the first of the intermediates, if its units were measured as they were computed, else
    None before the first stage. largest: [partition, row] in SBUF after the first stage. shared_maxima: for each row
    tile the largest magnitudes of its rows over all ranks, float32 columns [row, 1] in SBUF; None if ranks share none.
    scales: for each row tile a float32 column [row, 1] in SBUF after the last stage but one; diagonals: for each row
    tile the diagonal matrix of 1 / scale, before `columns` multiply it. results: fp8 tiles of the shape of the
    intermediates after the last stage.
    """

    quantiser: RowQuantiser
    intermediates: list
    inner: int
    row_ranges: list
    columns: list | None
    exchanges: bool
    stage: int
    largest: nl.NkiTensor | None
    diagonals: list
    scales: list
    results: list
    replica_group: ncc.ReplicaGroup | None = None
    shared_maxima: list | None = None
    magnitudes: UnitMagnitudes | None = None

    def count_stages(self):
        """Return the number of stages: one more if the ranks share row maxima."""
        return count_quantisation_stages(self.replica_group)

    def advance(self):
        """Issue the next stage, if there is one."""
        remaining = self.count_stages() - self.stage
        if self.stage == 0:
            if self.magnitudes is None:
                self.magnitudes = UnitMagnitudes(self.inner, self.intermediates[0].shape[1])
                self.magnitudes.add(self.intermediates[0], 0)
            self.largest = self.magnitudes.fold()
            if self.exchanges:
                exchanged = exchange_tiles(self.largest)
                nisa.tensor_tensor(dst=self.largest, data1=self.largest, data2=exchanged, op=nl.maximum)
        elif remaining == 3:
            self.shared_maxima = share_maxima(self.reduce_row_tiles(), self.replica_group)
        elif remaining == 2:
            self.compute_scales()
        elif remaining == 1:
            factors = self.quantiser.spread(self.diagonals)
            for intermediate in self.intermediates:
                quantised = divide_intermediate(intermediate, self.inner, factors, self.quantiser.element)
                self.results.append(quantised)
        self.stage += 1

    def compute_scales(self):
        """Compute the scale of each row and its inverse from the largest magnitudes."""
        for index in range(len(self.row_ranges)):
            if self.shared_maxima is None:
                column = self.reduce_row_tile(index)
            else:
                column = self.shared_maxima[index]
            scale, inverse = compute_scale(column, find_largest(self.quantiser.element))
            if self.columns is not None:
                nisa.tensor_tensor(dst=scale, data1=scale, data2=self.columns[index], op=nl.multiply)
            self.scales.append(scale)
            self.diagonals.append(self.quantiser.build_diagonal(inverse))

    def reduce_row_tiles(self):
        """Return the largest magnitudes of the rows of all row tiles, as `reduce_row_tile` returns those of one."""
        columns = []
        for index in range(len(self.row_ranges)):
            columns.append(self.reduce_row_tile(index))
        return columns

    def reduce_row_tile(self, index):
        """Return the largest magnitude of each row of a row tile, a new float32 column [row, 1] in SBUF."""
        first, end = self.row_ranges[index]
        shape = (end - first, self.largest.shape[0])
        bank = nl.ndarray(shape, dtype=self.largest.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=self.largest[:, first:end])
        column = nl.ndarray((end - first, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=column, op=nl.maximum, data=bank, axis=1)
        return column

    def finish(self):
        """Issue all stages that remain; return the fp8 tiles and the scales, a column for each row tile."""
        while self.stage < self.count_stages():
            self.advance()
        return self.results, self.scales


def count_quantisation_stages(replica_group):
    """Return the number of stages of an IntermediateQuantiser; replica_group: the ranks that share row maxima."""
    return QUANTISATION_STAGES if replica_group is None else QUANTISATION_STAGES + 1


def find_largest(element):
    """Return the largest number of float8_e4m3, 240, or of float8_e4m3fn, 448, for the dtype `element`."""
    return 240.0 if element == nl.float8_e4m3 else 448.0


def check_row_weight(name, elements, scales):
    """Raise AssertionError unless a weight @ HBM is float8_e4m3 or int8 with scales; `name` names it in the message."""
    is_accepted = is_e4m3(elements.dtype) or elements.dtype == nl.int8
    assert is_accepted and scales is not None, (
        f"quantises_rows takes a {name} of float8_e4m3 or int8 with scales; it is {elements.dtype} "
        f"{'without' if scales is None else 'with'} scales; leave quantises_rows out"
    )


def create_row_quantiser(rows, hidden, dtype, element, spreads=True):
    """Return a RowQuantiser without scales for row tiles of up to `rows` rows of `hidden` elements of `dtype`.

    element: float8_e4m3 or float8_e4m3fn, in which rows are multiplied. spreads: whether the scales are brought to all
    partitions; without, the RowQuantiser has no operands for that.
    """
    scratch = []
    for _ in range(2):
        scratch.append(nl.ndarray((rows, hidden), dtype=dtype, buffer=nl.sbuf))
    if not spreads:
        return RowQuantiser([], [], None, None, scratch, element)
    ones = filled((rows, PARTITIONS), 1.0)
    return RowQuantiser([], [], identity(rows, nl.float32), ones, scratch, element)


def compute_scale(largest, limit):
    """Return scales and their inverses, float32 columns [row, 1] in SBUF, of the largest magnitudes of rows.

    largest: column [row, 1] in SBUF or PSUM, of any float dtype. limit: the number that the largest magnitude becomes.
    """
    scale = nl.ndarray(largest.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=scale, data=largest, op0=nl.maximum, operand0=LEAST, op1=nl.multiply, operand1=1.0 / limit
    )
    inverse = nl.ndarray(largest.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=scale)
    return scale, inverse


@dataclass
class RowPreparation(nl.NKIObject):
    """The row tiles of a group, which are normalised and divided by their scales in steps.

    In a step each tile takes another of four stages, so that no engine waits for a result of the same step: the
    statistics of its rows, their norm, their magnitudes, and the division.

    quantiser: RowQuantiser or StaticQuantiser, to which scales are appended. tiles, results: SBUF tiles [row, H], the
    rows as they are loaded and as they are divided. norm: RowNorm, or None. copies: whether results are other tiles
    than `tiles`. statistics: RowStatistics of the tiles so far. step: number of steps that are issued. first_row: index
    of the first row among the rows of all images. norms: for each tile so far its RowNorm, None once it is applied.
    """

    quantiser: RowQuantiser
    tiles: list
    results: list
    norm: RowNorm | None
    copies: bool
    statistics: list
    norms: list
    step: int = 0
    first_row: int = 0

    def count_steps(self):
        """Return the number of all steps: 0 without tiles."""
        return len(self.tiles) + 3 if len(self.tiles) > 0 else 0

    def count_ready(self):
        """Return how many tiles, from the first on, are divided by their scales."""
        return max(0, min(len(self.tiles), self.step - 3))

    def advance_until(self, step):
        """Issue the steps before number `step` that are not issued yet."""
        while self.step < step:
            self.issue_step()
            self.step += 1

    def issue_step(self):
        """Issue step number `step`: tile `step` takes the first stage, the tile before it the second, and so on."""
        count = len(self.tiles)
        if self.step < count and self.norm is not None:
            tile = self.tiles[self.step]
            first_row = self.first_row + self.step * self.tiles[0].shape[0]
            self.norms.append(self.norm.select(first_row, tile.shape[0]))
            self.statistics.append(compute_row_statistics(tile, self.norms[self.step]))
        index = self.step - 1
        if index >= 0 and index < count:
            if self.norm is not None:
                normalise(self.results[index], self.tiles[index], self.statistics[index], self.norms[index])
                self.norms[index] = None
            elif self.copies:
                nisa.tensor_copy(dst=self.results[index], src=self.tiles[index])
        index = self.step - 2
        if index >= 0 and index < count:
            self.quantiser.measure(self.results[index], index)
        index = self.step - 3
        if index >= 0:
            self.quantiser.divide(self.results[index], index)


class UnitMagnitudes(nl.NKIObject):
    """The largest magnitudes of an intermediate, unit by unit.

    `inner` are the columns of the intermediate; elements behind them are not read. A unit has `count` blocks, fewer in
    the last one. `largest` is [f in block, block of a unit, row] in SBUF, the largest magnitudes of the blocks of all
    units so far; None before the first unit.

    GpSimd takes the maxima while the Tensor engine computes the next unit, so that nothing but `fold` follows the last
    one. Few rows are measured all at once, by the Scalar engine.
    """

    def __init__(self, inner, count):
        self.inner, self.count = inner, count
        self.largest = None

    def add(self, intermediate, first_column):
        """Take the unit from `first_column` on of an SBUF tile [f in block, block, row] into account."""
        height, _, rows = intermediate.shape
        first = first_column // height
        end = min(first + self.count, blocks(self.inner, height))
        full = min(end, self.inner // height)
        shape = (height, end - first, rows)
        magnitudes = nl.ndarray(shape, dtype=intermediate.dtype, buffer=nl.sbuf)
        runs = [(first, full, height)] if full > first else []
        if end > full:
            runs.append((full, end, self.inner - full * height))
        if self.largest is None and end > full:
            nisa.memset(dst=magnitudes[:, full - first :, :], value=0.0)
        for start, stop, used in runs:
            units = magnitudes[0:used, start - first : stop - first, :]
            if rows <= PARTITIONS // 2:
                nisa.activation(dst=units, op=nl.abs, data=intermediate[0:used, start:stop, :])
            else:
                nisa.tensor_scalar(
                    dst=units, data=intermediate[0:used, start:stop, :], op0=nl.abs, operand0=0.0
                )
            if self.largest is not None:
                largest = self.largest[0:used, start - first : stop - first, :]
                nisa.tensor_tensor(
                    dst=largest, data1=largest, data2=units, op=nl.maximum, engine=choose_spare_engine()
                )
        if self.largest is None:
            self.largest = magnitudes

    def fold(self):
        """Return the largest magnitude of each row on each partition, a view [f in block, row] of `largest`."""
        count = self.largest.shape[1]
        while count > 1:
            half = count // 2
            # The upper half of the blocks meets the lower half, until one block is left.
            nisa.tensor_tensor(
                dst=self.largest[:, 0:half, :],
                data1=self.largest[:, 0:half, :],
                data2=self.largest[:, count - half : count, :],
                op=nl.maximum,
            )
            count -= half
        return self.largest[:, 0, :]


def choose_spare_engine():
    """Return GpSimd, or on gen2, where it excludes the Vector engine from SBUF, the Vector engine."""
    return nisa.engine.vector if nisa.get_nc_version() == nisa.nc_version.gen2 else nisa.engine.gpsimd


def divide_intermediate(intermediate, inner, factors, element):
    """Return an intermediate times the factors of its rows as a new fp8 tile [f in block, block, row] in SBUF.

    factors: float32 [128, row] in SBUF. inner: columns of the intermediate. element: dtype of the result.
    """
    quantised = nl.ndarray(intermediate.shape, dtype=element, buffer=nl.sbuf)
    engines = [nisa.engine.vector, choose_spare_engine()]
    turn = 0
    at_once = max(DIVIDED_BLOCKS, blocks(DIVIDED_ELEMENTS, intermediate.shape[2]))
    for first, end, used in list_filled_blocks(intermediate, inner):
        # The product takes block after block, so that it begins with the first ones.
        for start, stop in ranges(first, end, at_once):
            nisa.tensor_tensor(
                dst=quantised[0:used, start:stop, :],
                data1=intermediate[0:used, start:stop, :],
                data2=factors[0:used, :].expand_dim(1).broadcast(1, stop - start),
                op=nl.multiply,
                engine=engines[turn % 2],
            )
            turn += 1
    return quantised


def list_filled_blocks(intermediate, inner):
    """Return (first block, end, partitions) of the full blocks of an intermediate, and of a short last one.

    intermediate: SBUF tile [f in block, block, row], `inner` columns of which are filled.
    """
    height, count, _ = intermediate.shape
    full = inner // height
    runs = []
    if full > 0:
        runs.append((0, full, height))
    if count > full:
        runs.append((full, count, max(1, inner - full * height)))
    return runs


def quantise_rows_reference(
    rows: np.ndarray, element: np.dtype, dtype: np.dtype, divided_dtype: np.dtype | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows in fp8 with a scale for each: elements and scales [..., 1], both of the dtype of `rows`.

    Args:
        rows: [..., columns], float32 or float64.
        element: float8_e4m3 or float8_e4m3fn.
        dtype: to which they are rounded before they are divided.
        divided_dtype: to which divided rows are rounded before they are rounded to fp8; None for no such rounding.
    """
    stored = rows.astype(dtype).astype(rows.dtype)
    largest, limit = np.abs(stored).max(axis=-1, keepdims=True), find_largest(element)
    scales = np.maximum(largest, rows.dtype.type(LEAST)) * rows.dtype.type(1.0 / limit)
    divided = stored * (1 / scales)
    if divided_dtype is not None:
        divided = divided.astype(divided_dtype).astype(rows.dtype)
    return np.clip(divided, -limit, limit).astype(element).astype(rows.dtype), scales
