"""Rotation of heads that the groups of columns of the PE array leave in one PSUM bank, for few rows.

The groups of `group_panels` leave row r of group g on partition g * width + r, [partition, column of the panel]. If all
panels have equally many whole heads, the scales and the rotation take the heads of all groups at once: one instruction
has 128 partitions and few columns, instead of few partitions and all columns. Heads that are not rotated, those of
values, are turned by an angle of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC, transfer
from nki_kernels.projection.grouped_product import choose_group_width
from nki_kernels.rope import combine_halves, gather
from nki_kernels.tiles import BANK, PARTITIONS, blocks, copy_bank

QUADRANT = PARTITIONS // 4
"""Partitions within which `nc_stream_shuffle` copies."""

LEAST_COLUMNS = 64
"""Columns of a moving operand, below which a matmul takes no less time."""

MOST_TIME = 1.5
"""How many times as long as panels that cut heads panels of whole heads may take."""


@dataclass
class HeadGroups(nl.NKIObject):
    """How heads lie in groups.

    width: columns of the PE array of a group. panels: groups that have heads. slots: heads of each. head: D.
    """

    width: int
    panels: int
    slots: int
    head: int

    @property
    def panel_width(self):
        """Columns of a panel."""
        return self.slots * self.head


def choose_panels(units, unit_columns, most, divides):
    """Return the number of panels, at most `most`, for which the matmuls of a K block take the least time; 0 if none.

    Panels have up to 512 columns.

    Args:
        units: number of units of columns, such as heads, that no panel cuts.
        unit_columns: columns of a unit.
        most: most panels.
        divides: whether the number has to divide the units.
    """
    best = 0
    for panels in range(1, most + 1):
        fits = blocks(units, panels) * unit_columns <= BANK and (not divides or units % panels == 0)
        if fits and (
            best == 0 or time_panels(units, unit_columns, panels) < time_panels(units, unit_columns, best)
        ):
            best = panels
    return best


def time_panels(units, unit_columns, panels):
    """Return the time of a K block's matmuls, one for each panel, as a number of columns that one group multiplies."""
    return max(panels * LEAST_COLUMNS, blocks(units, panels) * unit_columns)


@dataclass
class GroupOperands(nl.NKIObject):
    """Scales times cosines, and times sines, for both halves of heads: float32 [partition, slot, half, D/2] in SBUF."""

    cosines: nl.NkiTensor
    sines: nl.NkiTensor


def plan_head_groups(heads, columns, rows):
    """Return the HeadGroups for columns (first, end) of Heads and `rows` rows, at most 64; None if there are none.

    There are some only for heads that are rotated in full and neither normalised nor given a bias, if a number of
    groups divides them into panels whose products do not take much longer than those of other panels.
    """
    width = columns[1] - columns[0]
    if (
        heads.angles.cos is None
        or len(heads.norms) > 0
        or heads.bias is not None
        or heads.turned > heads.rotated
    ):
        return None
    if 2 * heads.angles.cos.shape[1] != heads.head or width % heads.head != 0:
        return None
    group_width, count = choose_group_width(rows), width // heads.head
    panels = choose_panels(count, heads.head, PARTITIONS // group_width, True)
    even = choose_panels(width, 1, PARTITIONS // group_width, False)
    if panels == 0 or time_panels(count, heads.head, panels) > MOST_TIME * time_panels(width, 1, even):
        return None
    return HeadGroups(group_width, panels, count // panels, heads.head)


def allocate_row_numbers(layout, rows):
    """Return a new tile for the row of the tables of each partition, int32 [partition, 1] in SBUF, 0 without a row."""
    row_numbers = nl.ndarray((layout.panels * layout.width, 1), dtype=nl.int32, buffer=nl.sbuf)
    if rows < layout.width:
        nisa.memset(dst=row_numbers, value=0)
    return row_numbers


def load_group_operands(heads, columns, layout, row_numbers, rows):
    """Load scales and angles for columns (first, end) of Heads; return three float32 tiles (scales, cosines, sines).

    They are in SBUF, scales [quadrant of 128 partitions, column of the panel] on the first partition of each quadrant,
    angles [partition, D/2]. Without scales the first is None. row_numbers: what `allocate_row_numbers` returned for
    `rows` rows; their positions are loaded into it.
    """
    lines = None
    if heads.scales is not None:
        lines = nl.ndarray((PARTITIONS, layout.panel_width), dtype=nl.float32, buffer=nl.sbuf)
        for partition in range(0, PARTITIONS, QUADRANT):
            start = columns[0] + partition // layout.width % layout.panels * layout.panel_width
            row = heads.scales[:, start : start + layout.panel_width]
            transfer(lines[partition : partition + 1, :], row, STATIC)
    positions = heads.angles.positions[heads.first_row : heads.first_row + rows, :]
    for panel in range(layout.panels):
        transfer(row_numbers[panel * layout.width : panel * layout.width + rows, :], positions, STATIC)
    return lines, gather(heads.angles.cos, row_numbers), gather(heads.angles.sin, row_numbers)


def scale_angles(loaded, heads, first, layout):
    """Return the GroupOperands of what `load_group_operands` returned. first: first column of the first panel."""
    lines, cosines, sines = loaded
    shape = (cosines.shape[0], layout.slots, 2, layout.head // 2)
    scales = None
    if lines is not None:
        scales = nl.ndarray(lines.shape, dtype=nl.float32, buffer=nl.sbuf)
        # Within each quadrant the first partition is copied to all, in one instruction for the four quadrants.
        nisa.nc_stream_shuffle(dst=scales, src=lines, shuffle_mask=[0] * QUADRANT)
        scales = scales[0 : shape[0], :].reshape_dim(1, shape[1:])
    scaled = []
    for angles, still in ((cosines, 1.0), (sines, 0.0)):
        spread = spread_angles(angles, still, heads, first, layout).expand_dim(2).broadcast(2, 2)
        product = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        if scales is None:
            nisa.tensor_copy(dst=product, src=spread)
        else:
            nisa.tensor_tensor(dst=product, data1=scales, data2=spread, op=nl.multiply)
        scaled.append(product)
    return GroupOperands(scaled[0], scaled[1])


def spread_angles(angles, still, heads, first, layout):
    """Return angles [partition, D/2] as [partition, slot, D/2] in SBUF, `still` for heads that are not rotated.

    first: first column of the first panel.
    """
    partitions, half = angles.shape
    spread = nl.ndarray((partitions, layout.slots, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(
        dst=spread, src=angles.expand_dim(1).broadcast(1, layout.slots), engine=nisa.engine.gpsimd
    )
    for panel in range(layout.panels):
        start = first + panel * layout.panel_width
        slot = max(0, min(layout.slots, (heads.rotated - start) // layout.head))
        if slot < layout.slots:
            rows = spread[panel * layout.width : (panel + 1) * layout.width, slot : layout.slots, :]
            nisa.memset(dst=rows, value=still, engine=nisa.engine.gpsimd)
    return spread


def finish_head_groups(heads, first, bank, row_scale, operands, layout, rows):
    """Scale and rotate the sums of all groups, and store them to the outputs of Heads.

    Args:
        heads: Heads.
        first: first column of the first panel.
        bank: sums in PSUM, [partition, column of the panel].
        row_scale: float32 [partition, 1] in SBUF, or None.
        operands: GroupOperands.
        layout: HeadGroups.
        rows: number of rows.
    """
    half = layout.head // 2
    finished = nl.ndarray(bank.shape, dtype=heads.outputs[0].dtype, buffer=nl.sbuf)
    halves = finished.reshape((bank.shape[0], layout.slots, 2, half))
    # Angles were multiplied by the scales ahead, so that two instructions read the sums and no other one scales them.
    products = []
    for angles in (operands.cosines, operands.sines):
        product = nl.ndarray(halves.shape, dtype=nl.float32, buffer=nl.sbuf)
        copy_bank(product, bank.reshape_dim(1, (layout.slots, 2, half)), 0, 1, row_scale, angles)
        products.append(product)
    combine_halves(halves, products[0], products[1])
    row = heads.first_row
    start = 0
    for output in heads.outputs:
        for panel in range(layout.panels):
            offset = first + panel * layout.panel_width - start
            column, end = max(0, offset), min(output.shape[1], offset + layout.panel_width)
            if column < end:
                partition = panel * layout.width
                source = finished[partition : partition + rows, column - offset : end - offset]
                transfer(output[row : row + rows, column:end], source, COMPILER)
        start += output.shape[1]
