"""Tiles of a matrix: imported by the kernels, so that it has to travel with them."""

ROWS, COLUMNS = 128, 512


def tiles(shape):
    """Return the slices of each tile."""
    rows, columns = shape
    slices = []
    for row in range(0, rows, ROWS):
        for column in range(0, columns, COLUMNS):
            slices.append((slice(row, min(row + ROWS, rows)), slice(column, min(column + COLUMNS, columns))))
    return slices
