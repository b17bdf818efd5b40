"""`NkiTensor`: a storage seen through a shape, element strides and an element offset, and its views.

A view never copies. On chip, dim 0 is the partition dim and a tensor keeps at least two dims; in HBM at least one. The
stride of the partition dim is reported in elements like any stride: for a fresh tile it is the free size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nkw.errors import OutOfBounds, RuleViolation
from simulate.memory import indirection, views
from simulate.memory.indexing import fill_ellipsis, normalise_index, normalise_slice
from simulate.memory.layout import ByteView, build_slice_key, find_sliced, store_sliced
from simulate.memory.tensor_bytes import TensorBytes
from simulate.memory.view_rules import (
    ap_steps_one_partition,
    broadcast_free_unit_dim,
    dynamic_free_dim,
    index_within_tensor,
    indirect_dim_exists,
    on_chip_offset_is_32_bit,
    one_dynamic_offset,
    partition_dim_stays_first,
    reshape_is_a_view,
    reshape_keeps_elements,
    squeeze_unit_dim,
    vector_select_in_hbm,
    view_needs_contiguous_bytes,
)
from simulate.numerics import DType, as_dtype


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Run-time component of a view's address.

    Without a `group`, index i moves the view by i * step elements; valid indices are 0 to extent - 1. With a `group`,
    the index tile contains free-dim offsets instead, a list for each group of `group` partitions. Offset i of the list
    is in row i % group of the group's rows, column i // group.

    Attributes:
        index: SBUF tile with the indices: (P, 1), a row index for each partition, or (1, 1), one index for the whole
            access.
        step: Elements by which an index of 1 moves the view.
        extent: Number of valid indices.
        per_partition: Whether each partition has an index of its own.
        group: Partitions that share a list of offsets, as in a view by `.indirect`; 0 for all other views.
    """

    index: NkiTensor
    step: int
    extent: int
    per_partition: bool
    group: int = 0


class NkiTensor(TensorBytes):
    """Tensor in SBUF, PSUM or HBM, or a view of one."""

    __slots__ = ()

    dynamic: Dynamic | None
    assign: ClassVar[Callable[[NkiTensor, Any, Any], None]]
    """Function that issues the copy of `tensor[key] = …`; `simulate.nki.assignment` sets it."""

    def __dir__(self) -> list[str]:
        """Return the names of the attributes that a tensor has on a chip too, without those of the simulator only."""
        return list(_DOCUMENTED)

    @property
    def base_tensor(self) -> NkiTensor:
        """Tensor over the whole storage, with the shape and dtype of its allocation; public MX kernels use it."""
        storage = self.storage
        return NkiTensor.from_storage(storage.shape, storage.dtype, storage)

    @property
    def data(self) -> NkiTensor:
        """The tensor itself, so that code may treat tensors and grids alike (0.7)."""
        return self

    def or_outside(self) -> NkiTensor:
        """Return this view itself, or an equal `OutsideTensor` if the view reaches outside its storage."""
        try:
            self.check_bounds()
        except OutOfBounds:
            return OutsideTensor.from_storage(self.shape, self.dtype, self.storage, self.strides, self.offset)
        return self

    def _view(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        dynamic: Dynamic | None = None,
    ) -> NkiTensor:
        if self.dynamic is not None and self.dynamic.group:
            indirection.indirect_view_is_final(self)
        tensor = NkiTensor.__new__(NkiTensor)
        tensor._set_view(shape, dtype, self.storage, strides, offset, dynamic)
        return tensor

    def _with_layout(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> NkiTensor:
        return self._view(shape, self.dtype, strides, offset, self.dynamic)

    def __getitem__(self, key: Any) -> NkiTensor:
        if self.dynamic is not None or type(self) is not NkiTensor:
            return self._slice_view(key)
        cache_key = build_slice_key(self.layout, key)
        layout = None if cache_key is None else find_sliced(cache_key)
        if layout is None:
            try:
                view = self._slice_view(key)
            except OutOfBounds as error:
                error.operands = {"tensor": self.describe()}
                raise
            if cache_key is not None and type(view) is NkiTensor:
                store_sliced(cache_key, view.layout)
            return view
        view = NkiTensor.__new__(NkiTensor)
        view._set_layout(layout, self.storage, None)
        return view

    def _slice_view(self, key: Any) -> NkiTensor:
        keys = key if type(key) is tuple else (key,)
        shape, strides = self.shape, self.strides
        if Ellipsis in keys:
            keys = fill_ellipsis(keys, len(shape))
        if len(keys) > len(shape):
            raise OutOfBounds(
                index_within_tensor, f"{len(keys)} indices for shape {shape}", hint="give one index per dim"
            )
        on_chip = self.storage.buffer.on_chip
        new_shape: list[int] = []
        new_strides: list[int] = []
        offset = self.offset
        dropped = 0
        rank = len(shape)
        least = 2 if on_chip else 1
        for dim, extent in enumerate(shape):
            stride = strides[dim]
            if dim >= len(keys):
                new_shape.append(extent)
                new_strides.append(stride)
                continue
            dim_key = keys[dim]
            if type(dim_key) is slice:
                start, end, step = normalise_slice(dim_key, extent, dim)
                offset += start * stride
                new_shape.append((end - start + step - 1) // step)
                new_strides.append(stride * step)
                continue
            index = normalise_index(dim_key, extent, dim)
            offset += index * stride
            keep = (on_chip and dim == 0) or rank - dropped <= least
            if keep:
                new_shape.append(1)
                new_strides.append(stride)
            else:
                dropped += 1
        view = self._with_layout(tuple(new_shape), tuple(new_strides), offset)
        # A core without work may take an empty slice, which is refused when an instruction uses it.
        return view if 0 not in new_shape else view.or_outside()

    def __setitem__(self, key: Any, value: Any) -> None:
        NkiTensor.assign(self, key, value)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Return a view of the elements start, start + step, … below `end` of dim `dim`; 0 <= start <= end <= size.

        Raises:
            OutOfBounds: The dim does not exist, or the slice leaves it.
        """
        dim = self._dim(dim)
        keys: list[Any] = [slice(None)] * self.ndim
        keys[dim] = slice(start, end, step)
        return self[tuple(keys)]

    def select(self, dim: int, index: int | NkiTensor) -> NkiTensor:
        """Return a view of the elements at one index of a dim, which is dropped.

        The dim stays with size 1 if too few dims would remain: two on chip, one in HBM.

        Args:
            dim: Number of the dim.
            index: A Python int; or a register, a scalar or a (1, 1) tile, whose value is read at run time.

        Raises:
            OutOfBounds: The dim does not exist, or a Python index leaves it.
            RuleViolation: A run-time index of the partition dim on chip, or a second run-time index.
        """
        dim = self._dim(dim)
        index = _get_cell(index)
        if isinstance(index, NkiTensor):
            if dim == 0 and self.buffer.on_chip:
                dynamic_free_dim(self.describe())
            shape, strides = views.drop_dim(self.shape, self.strides, dim, self._least_rank)
            dynamic = self._check_dynamic(Dynamic(index, self.strides[dim], self.shape[dim], False))
            return self._view(shape, self.dtype, strides, self.offset, dynamic)
        offset = self.offset + normalise_index(index, self.shape[dim], dim) * self.strides[dim]
        shape, strides = views.drop_dim(self.shape, self.strides, dim, self._least_rank)
        return self._with_layout(shape, strides, offset)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Return a view of the rows of an HBM tensor whose indices along dim 0 are in a (P, 1) tile; dim 0 becomes P.

        The indices are read at run time, by the instruction that uses the view.

        Raises:
            RuleViolation: The dim is not 0, the tensor is on chip, or it has a run-time index already.
        """
        if dim != 0 or self.buffer.on_chip:
            raise RuleViolation(
                vector_select_in_hbm, f"dim {dim} of {self.describe()}", hint="index dim 0 of an HBM tensor"
            )
        dynamic = self._check_dynamic(Dynamic(vector_offset, self.strides[0], self.shape[0], True))
        shape = (vector_offset.shape[0], *self.shape[1:])
        return self._view(shape, self.dtype, (0, *self.strides[1:]), self.offset, dynamic)

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Return a view with the dims in another order, as numpy.transpose; on chip the partition dim stays first.

        Raises:
            RuleViolation: `dims` is no permutation, or moves the partition dim.
        """
        order = tuple(dims)
        if sorted(order) != list(range(self.ndim)) or (self.buffer.on_chip and order[0] != 0):
            raise RuleViolation(
                partition_dim_stays_first, f"permute{order} of {self.describe()}", hint="keep 0 first on chip"
            )
        return self._with_layout(
            tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.offset
        )

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Return a view in which dim `dim`, of size 1, is repeated `size` times (stride 0).

        Raises:
            OutOfBounds: The dim does not exist.
            RuleViolation: The dim has another size than 1, or is the partition dim on chip.
        """
        dim = self._dim(dim)
        if self.shape[dim] != 1 or (dim == 0 and self.buffer.on_chip):
            raise RuleViolation(
                broadcast_free_unit_dim,
                f"dim {dim} of {self.describe()}",
                hint=f"load the row with nl.load(row.broadcast(0, {size})), row being the (1, N) tensor in HBM"
                if dim == 0 and self.shape[0] == 1
                else "broadcast a free dim of size 1; partitions are broadcast by nc_stream_shuffle or matmul",
            )
        return self._with_layout(
            views.replace_entry(self.shape, dim, size), views.replace_entry(self.strides, dim, 0), self.offset
        )

    def expand_dim(self, dim: int) -> NkiTensor:
        """Return a view with a new dim of size 1 before dim `dim`, or at the end if `dim` is the number of dims.

        Raises:
            RuleViolation: The dim is out of range, or 0 on chip, where the partition dim stays first.
        """
        if not (1 if self.buffer.on_chip else 0) <= dim <= self.ndim:
            raise RuleViolation(partition_dim_stays_first, f"expand_dim({dim}) of {self.describe()}")
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._with_layout(
            self.shape[:dim] + (1,) + self.shape[dim:],
            self.strides[:dim] + (stride,) + self.strides[dim:],
            self.offset,
        )

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Return a view without dim `dim`, which has size 1.

        Raises:
            OutOfBounds: The dim does not exist.
            RuleViolation: The dim has another size or is the partition dim on chip, or too few dims would remain.
        """
        dim = self._dim(dim)
        if self.shape[dim] != 1 or (dim == 0 and self.buffer.on_chip) or self.ndim == self._least_rank:
            raise RuleViolation(squeeze_unit_dim, f"squeeze_dim({dim}) of {self.describe()}")
        shape, strides = views.drop_dim(self.shape, self.strides, dim, self._least_rank)
        return self._with_layout(shape, strides, self.offset)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Return a view in which dim `dim` is split into the sizes of `shape`; one size may be -1.

        Raises:
            OutOfBounds: The dim does not exist.
            RuleViolation: The number of elements changes, or on chip the number of partitions.
        """
        dim = self._dim(dim)
        sizes = views.resolve_sizes(tuple(shape), self.shape[dim])
        if sizes is None or (dim == 0 and self.buffer.on_chip and sizes[0] != self.shape[0]):
            raise RuleViolation(
                reshape_keeps_elements, f"reshape_dim({dim}, {tuple(shape)}) of {self.describe()}"
            )
        inner = tuple(stride * self.strides[dim] for stride in views.row_major(sizes))
        return self._with_layout(
            self.shape[:dim] + sizes + self.shape[dim + 1 :],
            self.strides[:dim] + inner + self.strides[dim + 1 :],
            self.offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Return a view in which dims start_dim to end_dim (inclusive) are joined into one.

        Raises:
            OutOfBounds: A dim does not exist.
            RuleViolation: Strides cannot join the dims, which are not contiguous, or they include the partition dim on
                chip.
        """
        first, last = self._dim(start_dim), self._dim(end_dim)
        sizes, strides = self.shape[first : last + 1], self.strides[first : last + 1]
        joined = views.regroup(sizes, strides, (views.count(sizes),))
        if first > last or joined is None or (first == 0 and last > 0 and self.buffer.on_chip):
            raise RuleViolation(
                reshape_is_a_view,
                f"flatten_dims({start_dim}, {end_dim}) of {self.describe()}, strides {self.strides}",
            )
        return self._with_layout(
            self.shape[:first] + (views.count(sizes),) + self.shape[last + 1 :],
            self.strides[:first] + joined + self.strides[last + 1 :],
            self.offset,
        )

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """Return a view of the same elements in another shape, of which one size may be -1; on chip shape[0] is fixed.

        Raises:
            RuleViolation: The number of elements or of partitions changes, or strides cannot express the shape.
        """
        sizes = views.resolve_sizes(tuple(shape), self.size)
        if sizes is None:
            raise RuleViolation(reshape_keeps_elements, f"size mismatch: {self.describe()} to {tuple(shape)}")
        if self.buffer.on_chip:
            if sizes[0] != self.shape[0] or len(sizes) < 2:
                raise RuleViolation(
                    partition_dim_stays_first, f"reshape of partition dim: {self.describe()} to {sizes}"
                )
            free = views.regroup(self.shape[1:], self.strides[1:], sizes[1:])
            strides = None if free is None else (self.strides[0], *free)
        else:
            strides = views.regroup(self.shape, self.strides, sizes)
        if strides is None:
            raise RuleViolation(
                reshape_is_a_view,
                f"non-contiguous layout: {self.describe()}, strides {self.strides}, to {sizes}",
            )
        return self._with_layout(sizes, strides, self.offset)

    def rearrange(
        self,
        src_pattern: tuple[Any, ...],
        dst_pattern: tuple[Any, ...],
        fixed_sizes: dict[str, int] | None = None,
    ) -> NkiTensor:
        """Return a view whose dims are split, permuted and joined by name, as einops.rearrange does.

        Args:
            src_pattern: A name for each dim of the tensor, or a nested tuple of names into which the dim is split.
            dst_pattern: The same names in the new order; a nested tuple of names becomes one dim.
            fixed_sizes: Sizes of names; in each nested tuple of `src_pattern` one name may be missing.

        Raises:
            RuleViolation: The patterns do not fit the shape or each other, or strides cannot express the result.
        """
        sizes = views.find_named_sizes(src_pattern, self.shape, fixed_sizes or {})
        names = [n for group in src_pattern for n in ((group,) if isinstance(group, str) else group)]
        target_names = [n for group in dst_pattern for n in ((group,) if isinstance(group, str) else group)]
        if sizes is None or sorted(names) != sorted(target_names):
            raise RuleViolation(
                reshape_keeps_elements, f"rearrange {src_pattern} -> {dst_pattern} of {self.describe()}"
            )
        split = self
        for dim in range(len(src_pattern) - 1, -1, -1):
            group = src_pattern[dim]
            if not isinstance(group, str):
                split = split.reshape_dim(dim, [sizes[n] for n in group])
        moved = split.permute([names.index(n) for n in target_names])
        for dim, group in enumerate(dst_pattern):
            if not isinstance(group, str):
                moved = moved.flatten_dims(dim, dim + len(group) - 1)
        return moved

    def view(self, dtype: Any) -> NkiTensor:
        """Return a view of the same bytes as elements of another dtype; the last dim scales by the ratio of the sizes.

        Raises:
            RuleViolation: The last dim is not contiguous, or its bytes, a stride or the offset do not divide by the new
                size.
        """
        target = as_dtype(dtype)
        old, new = self.dtype.storage.itemsize, target.storage.itemsize
        if old == new:
            return self._view(self.shape, target, self.strides, self.offset, self.dynamic)
        row, strides = self.shape[-1] * old, tuple(s * old for s in self.strides)
        fits = row % new == 0 and all(s % new == 0 for s in (*strides[:-1], self.offset * old))
        if self.dynamic is not None or self.strides[-1] != 1 or not fits:
            raise RuleViolation(
                view_needs_contiguous_bytes,
                f"{self.describe()}, strides {self.strides}, offset {self.offset}, as {target}",
            )
        return self._view(
            (*self.shape[:-1], row // new),
            target,
            (*(s // new for s in strides[:-1]), 1),
            self.offset * old // new,
        )

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Return a (P, num_elem) view of the elements at free-dim offsets that an index tile has at run time (gen4).

        Offsets count elements of the flattened free dims [not documented]. Offset i is index[i % G, i // G] within each
        group of G partitions, all of which use it; G is 16, on the Tensor engine 32. num_elem is index.size by default.
        The view cannot be sliced or reshaped.

        Raises:
            RuleViolation: The tensor, the index or the count breaks a rule of tensor indirection.
        """
        shape = self.shape[0], indirection.count_offsets(self, index, num_elem)
        dynamic = self._check_dynamic(Dynamic(index, 1, self.free_size, True, indirection.GROUP))
        return self._view(shape, self.dtype, (self.strides[0], 0), self.offset, dynamic)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: NkiTensor | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """Return a view by its access pattern: element (i0 … in) is storage element offset + sum(step_k * i_k).

        The guide measures `offset` from the start of the storage; the API stub says that None inherits the view's
        offset and an integer is added to it. Both agree on a fresh tensor, and the stub is followed here.

        A pattern may reach outside the storage: the instruction that uses it then raises OutOfBounds. Kernels make the
        pattern of a last, partial tile before they find that there is nothing to do.

        Args:
            pattern: [step, num] pairs in elements, the outermost dim first; on chip the first steps over partitions by
                the storage's free size, or by the free size of this view if its rows are contiguous.
            offset: Elements added to the offset of this view.
            scalar_offset: Register or (1, 1) tile with one index along `indirect_dim`, read at run time.
            vector_offset: (P, 1) tile with a row index for each row of the pattern, read at run time; HBM tensors only.
            indirect_dim: Dim of this view whose stride scales the run-time index.
            dtype: Dtype of the elements that pattern and offset count; None for this tensor's.

        Raises:
            RuleViolation: The pattern or the run-time offsets break a rule of access patterns.
        """
        base = self if dtype is None else self._retyped(as_dtype(dtype))
        start = base.offset + (0 if offset is None else operator.index(offset))
        shape = tuple(operator.index(num) for _, num in pattern)
        strides = tuple(operator.index(step) for step, _ in pattern)
        dynamic = base.dynamic
        if scalar_offset is not None and vector_offset is not None:
            raise RuleViolation(one_dynamic_offset, "both scalar_offset and vector_offset")
        if not 0 <= indirect_dim < len(base.shape):
            indirect_dim_exists(indirect_dim, self.describe())
        if vector_offset is not None:
            if indirect_dim != 0 or self.buffer.on_chip:
                raise RuleViolation(vector_select_in_hbm, f"indirect_dim {indirect_dim} of {self.describe()}")
            row = views.count(base.shape[1:])
            dynamic = base._check_dynamic(Dynamic(vector_offset, row, base.shape[0], True))
            strides = (0, *strides[1:])
        elif scalar_offset is not None:
            if indirect_dim == 0 and self.buffer.on_chip:
                dynamic_free_dim(self.describe())
            step = views.count(base.shape[indirect_dim + 1 :])
            dynamic = base._check_dynamic(
                Dynamic(_get_cell(scalar_offset), step, base.shape[indirect_dim], False)
            )
        if self.buffer.on_chip:
            strides = self._convert_partition_step(shape, strides, base, start - base.offset)
        return self._view(shape, base.dtype, strides, start, dynamic).or_outside()

    def _retyped(self, dtype: DType) -> NkiTensor:
        """Return the storage from this view's offset on as elements of `dtype`: row-major, this view's last dim scaled.

        Raises RuleViolation if the offset or the storage is no whole number of such elements.
        """
        old, new = self.dtype.storage.itemsize, dtype.storage.itemsize
        offset = self.offset * old
        if offset % new or self.storage.nbytes % new:
            raise RuleViolation(view_needs_contiguous_bytes, f"{self.describe()} as {dtype}")
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        return self._view(shape, dtype, views.row_major(shape), offset // new)

    def _convert_partition_step(
        self, shape: tuple[int, ...], strides: tuple[int, ...], base: NkiTensor, offset: int
    ) -> tuple[int, ...]:
        """Return the strides of a pattern on chip with the storage's step over partitions, its free size.

        The documentation knows that step alone. Decode kernels of nki-library, which run on the chip, make patterns of
        a view from the view's shape: they step by its own free size. So that step is taken too, where the view's rows
        are contiguous and the pattern, which begins `offset` elements behind the view, stays inside of a row.

        Raises:
            RuleViolation: The pattern has several partitions and another step.
        """
        free = self.storage.nbytes // self.storage.shape[0] // base.dtype.storage.itemsize
        if shape[0] <= 1 or strides[0] == free:
            return strides
        row_elements = views.count(base.shape[1:])
        last = offset + sum(step * (num - 1) for step, num in zip(strides[1:], shape[1:]))
        if (
            strides[0] == row_elements
            and 0 <= last < row_elements
            and views.is_row_major(base.shape[1:], base.strides[1:])
        ):
            return (free, *strides[1:])
        raise RuleViolation(
            ap_steps_one_partition,
            f"first pair [{strides[0]}, {shape[0]}] on {self.describe()}",
            limit=f"partition step {free}",
            hint=f"make the first pair [{free}, number of partitions]",
        )

    def _check_dynamic(self, dynamic: Dynamic) -> Dynamic:
        if self.dynamic is not None:
            raise RuleViolation(one_dynamic_offset, f"a second run-time index on {self.describe()}")
        if self.buffer.on_chip and dynamic.index.dtype == "int64":
            raise RuleViolation(
                on_chip_offset_is_32_bit,
                f"an int64 offset of {self.describe()}",
                hint="load it from an int32 tensor",
            )
        return dynamic

    @property
    def _least_rank(self) -> int:
        return 2 if self.buffer.on_chip else 1

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise OutOfBounds(
                index_within_tensor, f"dim {dim} of {self.describe()}", limit=f"{self.ndim} dims"
            )
        return dim % self.ndim


_DOCUMENTED = (
    *(
        "ap",
        "base_tensor",
        "broadcast",
        "buffer",
        "data",
        "dtype",
        "expand_dim",
        "flatten_dims",
        "get_pattern",
    ),
    *(
        "indirect",
        "is_contiguous",
        "is_indirect",
        "name",
        "ndim",
        "offset",
        "permute",
        "rearrange",
        "reinterpret_cast",
    ),
    *(
        "reshape",
        "reshape_dim",
        "select",
        "shape",
        "size",
        "slice",
        "squeeze_dim",
        "strides",
        "vector_select",
        "view",
    ),
)
"""Attributes of tensors that the reference of NKI documents, and `base_tensor`, which public kernels use."""


def _get_cell(index: Any) -> Any:
    """Return the tensor that has a run-time index: the (1, 1) cell of a register or scalar, a tensor unchanged."""
    return getattr(index, "cell", index)


class OutsideTensor(NkiTensor):
    """View that reaches outside its storage: kernels may make and narrow it, but not read or write it."""

    __slots__ = ()

    def _view(self, *args: Any, **kwargs: Any) -> NkiTensor:  # type: ignore[override]
        return super()._view(*args, **kwargs).or_outside()

    @property
    def uncounted_array(self) -> np.ndarray:
        """Array of the elements, which do not exist: reading it raises OutOfBounds."""
        self.check_bounds()
        raise AssertionError("an OutsideTensor lies inside its storage")

    def byte_view(self) -> ByteView:
        """Raise OutOfBounds, because such a view has no bytes."""
        self.check_bounds()
        raise AssertionError("an OutsideTensor lies inside its storage")
