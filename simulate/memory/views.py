"""Functions of shapes and strides for views of tensors; strides count elements."""

from __future__ import annotations

from typing import Any


def count(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape; 1 for an empty tuple."""
    total = 1
    for extent in shape:
        total *= extent
    return total


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of a contiguous tensor of a shape, in which the last dim has stride 1."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether strides are those of a contiguous tensor; the strides of dims of size 1 do not count."""
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def touches_each_once(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements of a view, with its dims in some order, are a contiguous block, each element once."""
    if is_row_major(shape, strides):
        return True
    pairs = sorted(zip(strides, shape), reverse=True)
    return is_row_major(tuple(extent for _, extent in pairs), tuple(stride for stride, _ in pairs))


def replace_entry(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """Return a copy of a tuple with the entry at `index` replaced by `value`."""
    return values[:index] + (value,) + values[index + 1 :]


def drop_dim(
    shape: tuple[int, ...], strides: tuple[int, ...], dim: int, least_rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides without dim `dim`; if the rank is `least_rank` already, the dim stays with size 1."""
    if len(shape) <= least_rank:
        return replace_entry(shape, dim, 1), strides
    return shape[:dim] + shape[dim + 1 :], strides[:dim] + strides[dim + 1 :]


def resolve_sizes(sizes: tuple[int, ...], total: int) -> tuple[int, ...] | None:
    """Return sizes of which a single -1 is replaced so that their product is `total`; None if that is impossible.

    None also if there are two -1, another size below 1, or no -1 and another product.
    """
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        return None
    if -1 in sizes:
        known = -count(sizes)
        if total % known:
            return None
        return tuple(total // known if s == -1 else s for s in sizes)
    return sizes if count(sizes) == total else None


def regroup(
    shape: tuple[int, ...], strides: tuple[int, ...], new_shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides with which `new_shape` has the same elements in row-major order, None if no strides do."""
    # Runs of old dims that are contiguous with each other act as one dim; each new dim must lie within one run.
    runs: list[list[int]] = []
    for extent, stride in zip(shape, strides):
        if extent == 1:
            continue
        if runs and runs[-1][1] == extent * stride:
            runs[-1] = [runs[-1][0] * extent, stride]
        else:
            runs.append([extent, stride])
    new_strides: list[int] = []
    run_index, unassigned = 0, runs[0][0] if runs else 1
    for extent in new_shape:
        if extent == 1:
            new_strides.append(0)
            continue
        while unassigned == 1:
            run_index += 1
            unassigned = runs[run_index][0]
        if unassigned % extent:
            return None
        unassigned //= extent
        new_strides.append(runs[run_index][1] * unassigned)
    # A dim of size 1 gets the stride that a contiguous tensor would have, which keeps printed patterns readable.
    step = 1
    for dim in range(len(new_shape) - 1, -1, -1):
        if new_shape[dim] == 1:
            new_strides[dim] = step
        step = new_strides[dim] * new_shape[dim]
    return tuple(new_strides)


def find_named_sizes(
    pattern: tuple[Any, ...], shape: tuple[int, ...], fixed: dict[str, int]
) -> dict[str, int] | None:
    """Return the size of each name of a rearrange pattern, None if the pattern does not fit the shape.

    Args:
        pattern: A name, or a tuple of names whose sizes multiply to the dim's size, for each dim.
        shape: Shape of the tensor.
        fixed: Known sizes by name; in each tuple one name may be missing.
    """
    if len(pattern) != len(shape):
        return None
    sizes: dict[str, int] = {}
    for group, extent in zip(pattern, shape):
        if isinstance(group, str):
            sizes[group] = extent
            continue
        known = resolve_sizes(tuple(fixed.get(name, -1) for name in group), extent)
        if known is None:
            return None
        sizes.update(zip(group, known))
    return sizes
