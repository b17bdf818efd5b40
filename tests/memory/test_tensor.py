"""NkiTensor's views, held against numpy's own views of the same numbers."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from nkw.errors import OutOfBounds, RuleViolation
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.numerics import as_dtype


def tensor(
    shape: tuple[int, ...], dtype: str = "int32", region: MemoryRegion = MemoryRegion.private_hbm
) -> NkiTensor:
    element = as_dtype(dtype)
    numbers = np.arange(np.prod(shape), dtype=np.int64).astype(element.storage).reshape(shape)
    return NkiTensor(shape, element, Storage(shape, element, region, "x", array=numbers))


def tile(shape: tuple[int, ...], dtype: str = "int32") -> NkiTensor:
    return tensor(shape, dtype, MemoryRegion.sbuf)


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.parametrize(
    "key",
    [
        np.s_[:],
        np.s_[3],
        np.s_[-1],
        np.s_[1:5],
        np.s_[::2],
        np.s_[1:6:3, 2:],
        np.s_[..., 1],
        np.s_[2, ..., 0:3],
        np.s_[:, 1],
        np.s_[-3:-1],
        (slice(0, 2), slice(1, 3), slice(2, 4)),
    ],
)
def test_hbm_indexing_is_numpys(key: object) -> None:
    assert np.array_equal(tensor((7, 4, 5))[key].array, numbers((7, 4, 5))[key])


def test_a_slice_made_again_is_the_same_view_of_another_tensor() -> None:
    first, second = tensor((7, 4, 5)), tensor((7, 4, 5))
    for _ in range(2):
        for base in (first, second):
            view = base[1:6:3, 2:]
            assert view.storage is base.storage and view.dtype is base.dtype
            assert np.array_equal(view.array, numbers((7, 4, 5))[1:6:3, 2:])
            assert np.array_equal(view[:, 1].array, numbers((7, 4, 5))[1:6:3, 3])


def test_a_slice_known_for_one_dtype_or_memory_is_not_taken_for_another() -> None:
    narrow, wide, on_chip = tensor((4, 6), "int16"), tensor((4, 6)), tile((4, 6))
    for base in (narrow, wide, on_chip):
        assert base[1:3, 2:4].dtype is base.dtype
        assert np.array_equal(base[1:3, 2:4].array, numbers((4, 6))[1:3, 2:4])
    assert wide[1].shape == (6,) and on_chip[1].shape == (1, 6)


def test_indices_that_equal_a_known_one_but_are_none_are_refused() -> None:
    """1.0 == 1, and a slice that was looked up before must not let it pass."""
    base = tensor((7, 4))
    assert base[1].shape == (4,) and base[1:2].shape == (1, 4)
    for key in (1.0, np.s_[1.0:2], np.s_[1:2.0], np.s_[1:2:1.0], (1, 2.0)):
        with pytest.raises(OutOfBounds):
            base[key]
    assert base[np.int64(1)].shape == (4,) and base[np.int64(1) : np.uint8(2)].shape == (1, 4)


def test_shapes_and_strides_are_ints_of_python_whatever_they_were_given_as() -> None:
    view = tensor((8, 6)).reshape((np.int64(4), np.int32(12)))[:, np.int64(2) : np.int64(5)]
    assert [type(n) for n in (*view.shape, *view.strides, view.offset)] == [int] * 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_view_lies_as_the_view_does(copied) -> None:
    view = tensor((7, 4, 5))[1:6:3, 2:]
    other = copied(view)
    assert (other.shape, other.strides, other.offset, other.dtype) == (
        view.shape,
        view.strides,
        view.offset,
        view.dtype,
    )
    assert np.array_equal(other[1:].array, view[1:].array)
    assert other.byte_view() == view.byte_view() and other.layout.rows == view.layout.rows


def test_hbm_keeps_one_dim() -> None:
    assert tensor((7, 4))[2, 3].shape == (1,)
    assert tensor((7, 4))[2, 3].array[0] == 11


def test_on_chip_int_on_the_partition_dim_keeps_it() -> None:
    data = numbers((64, 64, 64))
    on_chip = tile((64, 64, 64))
    for key, shape in (((0, 0, 10), (1, 1)), ((slice(None), 0, 10), (64, 1)), ((slice(None), 0), (64, 64))):
        view = on_chip[key]
        assert view.shape == shape
        assert np.array_equal(view.array.ravel(), np.ravel(data[key]))


@pytest.mark.parametrize("end", [1, 127, 128])
def test_accepts_slices_up_to_the_size(end: int) -> None:
    assert tile((128, 8))[0:end].shape == (end, 8)


@pytest.mark.parametrize(
    "key", [np.s_[0:129], np.s_[128], np.s_[-129], np.s_[128:129], np.s_[6:5], np.s_[0:4:-1]]
)
def test_refuses_indices_outside(key: object) -> None:
    with pytest.raises(OutOfBounds) as refused:
        tile((128, 8))[key]
    assert refused.value.code == "NKW-INDEX"
    assert isinstance(refused.value, IndexError)


def test_refuses_more_indices_than_dims() -> None:
    with pytest.raises(OutOfBounds, match="3 indices for shape"):
        tile((128, 8))[0, 0, 0]


def test_refuses_a_tensor_as_index() -> None:
    with pytest.raises(OutOfBounds, match="run-time indices go through"):
        tile((128, 8))[tile((1, 1))]


def random_view(rng: np.random.Generator, view: NkiTensor, data: np.ndarray) -> tuple[NkiTensor, np.ndarray]:
    """Take one random step of view and of the numpy array that it must equal."""
    step = rng.integers(6)
    dim = int(rng.integers(view.ndim))
    if step == 0:
        order = rng.permutation(view.ndim)
        return view.permute(tuple(int(d) for d in order)), data.transpose(order)
    if step == 1:
        start = int(rng.integers(view.shape[dim]))
        end = int(rng.integers(start + 1, view.shape[dim] + 1))
        stride = int(rng.integers(1, 3))
        keys = tuple(slice(start, end, stride) if d == dim else slice(None) for d in range(view.ndim))
        return view.slice(dim, start, end, stride), data[keys]
    if step == 2 and view.ndim < 5:
        return view.expand_dim(dim), np.expand_dims(data, dim)
    if step == 3 and view.ndim > 1:
        index = int(rng.integers(view.shape[dim]))
        return view.select(dim, index), np.take(data, index, axis=dim)
    if step == 4 and view.shape[dim] == 1:
        shape = tuple(3 if d == dim else s for d, s in enumerate(view.shape))
        return view.broadcast(dim, 3), np.broadcast_to(data, shape)
    divisors = [d for d in range(1, view.shape[dim] + 1) if view.shape[dim] % d == 0]
    if view.ndim < 5:
        inner = int(rng.choice(divisors))
        shape = view.shape[:dim] + (view.shape[dim] // inner, inner) + view.shape[dim + 1 :]
        return view.reshape_dim(dim, (-1, inner)), data.reshape(shape)
    return view, data


def test_random_chains_of_views_equal_numpys() -> None:
    rng = np.random.default_rng(7)
    for _ in range(400):
        shape = tuple(int(s) for s in rng.integers(1, 7, size=rng.integers(1, 5)))
        view, data = tensor(shape), numbers(shape)
        for _ in range(5):
            view, data = random_view(rng, view, data)
            assert view.shape == data.shape
            assert np.array_equal(view.array, data)
            view.check_bounds()


def test_reshape_follows_strides_where_they_can_express_it() -> None:
    data = numbers((6, 4, 5))
    view = tensor((6, 4, 5))
    assert np.array_equal(view.reshape((24, 5)).array, data.reshape(24, 5))
    assert np.array_equal(view[:, 0:2].reshape((6, 10)).array, data[:, 0:2].reshape(6, 10))
    assert np.array_equal(view[:, :, 0:2].reshape((24, 2)).array, data[:, :, 0:2].reshape(24, 2))
    with pytest.raises(RuleViolation, match="non-contiguous layout") as refused:
        view[:, :, 0:2].reshape((48,))
    assert refused.value.code == "NKW-RESHAPE-LAYOUT"


def test_reshape_refuses_another_number_of_elements() -> None:
    with pytest.raises(RuleViolation, match="size mismatch"):
        tensor((6, 4)).reshape((5, 5))


def test_on_chip_reshape_keeps_the_partition_dim() -> None:
    assert tile((128, 6)).reshape((128, 2, 3)).shape == (128, 2, 3)
    with pytest.raises(RuleViolation, match="partition dim"):
        tile((128, 6)).reshape((64, 12))


def test_on_chip_permute_and_broadcast_keep_the_partition_dim() -> None:
    assert tile((8, 2, 3)).permute((0, 2, 1)).shape == (8, 3, 2)
    with pytest.raises(RuleViolation, match="NKW-PARTITION-FIRST"):
        tile((8, 2, 3)).permute((1, 0, 2))
    assert tile((8, 1)).broadcast(1, 5).shape == (8, 5)
    with pytest.raises(RuleViolation, match="NKW-BROADCAST"):
        tile((1, 8)).broadcast(0, 5)


def test_rearrange_splits_permutes_and_joins() -> None:
    data = numbers((6, 8))
    view = tensor((6, 8)).rearrange((("a", "b"), "c"), ("b", "a", "c"), {"b": 3})
    assert np.array_equal(view.array, data.reshape(2, 3, 8).transpose(1, 0, 2))
    joined = tensor((6, 8)).rearrange(("a", ("b", "c")), (("a", "b"), "c"), {"c": 4})
    assert np.array_equal(joined.array, data.reshape(12, 4))


def test_access_pattern_is_offset_plus_steps() -> None:
    view = tensor((16, 32)).ap([[64, 7], [2, 16]], offset=33)
    expected = [[33 + 64 * i + 2 * j for j in range(16)] for i in range(7)]
    assert np.array_equal(view.array, expected)


def test_access_pattern_of_step_zero_repeats_in_hbm() -> None:
    view = tensor((1, 8)).ap([[0, 4], [1, 8]])
    assert np.array_equal(view.array, np.broadcast_to(np.arange(8), (4, 8)))


@pytest.mark.parametrize(("count", "fits"), [(7, True), (8, True), (9, False)])
def test_access_pattern_is_used_inside_the_storage_only(count: int, fits: bool) -> None:
    view = tensor((8, 4)).ap([[4, count], [1, 4]])
    assert view.shape == (count, 4)
    for use in (lambda: view.array, view.float32, view.byte_view, lambda: repr(view)):
        if fits:
            use()
        else:
            with pytest.raises(OutOfBounds, match="NKW-BOUNDS"):
                use()


def test_a_part_of_an_access_pattern_that_lies_inside_can_be_used() -> None:
    view = tensor((8, 4)).ap([[4, 9], [1, 4]])
    assert np.array_equal(view[:8].array, numbers((8, 4)))
    with pytest.raises(OutOfBounds, match="elements 4 to 35"):
        view[1:].byte_view()


def test_on_chip_access_pattern_steps_over_partitions_by_the_free_size() -> None:
    assert tile((16, 32)).ap([[32, 8], [1, 32]]).shape == (8, 32)
    with pytest.raises(RuleViolation, match=r"make the first pair \[32, number of partitions\]"):
        tile((16, 32)).ap([[64, 8], [1, 32]])


def test_access_pattern_of_a_view_may_step_by_the_free_size_of_the_view() -> None:
    """Rows 4 to 11, columns 8 to 23: the pattern names rows of 16 elements, where the storage has 32."""
    view = tile((16, 32))[4:12, 8:24]
    expected = numbers((16, 32))[4:12, 8:24]
    assert np.array_equal(view.ap([[16, 8], [1, 16]]).array, expected)
    assert np.array_equal(view.ap([[32, 8], [1, 16]]).array, expected)
    assert np.array_equal(view.ap([[16, 3], [2, 4]], offset=9).array, expected[:3, 9:16:2])
    refused = (
        dict(pattern=[[16, 8], [1, 16]], offset=1),  # would leave the rows of the view
        dict(pattern=[[16, 8], [1, 16]], offset=16),
        dict(pattern=[[8, 8], [1, 8]]),
    )
    for arguments in refused:
        with pytest.raises(RuleViolation, match=r"make the first pair \[32, number of partitions\]"):
            view.ap(**arguments)
    with pytest.raises(RuleViolation, match="first pair"):
        tile((16, 32))[:, 0:32:2].ap([[16, 8], [1, 16]])  # its rows are not contiguous


def test_dtype_view_scales_the_last_dim() -> None:
    words = tensor((4, 8), "uint32")
    halves = words.view("uint16")
    assert halves.shape == (4, 16)
    assert np.array_equal(halves.array, words.array.view(np.uint16))
    assert np.array_equal(words.view("uint8").view("uint32").array, words.array)
    with pytest.raises(RuleViolation, match="NKW-VIEW-DTYPE"):
        tensor((4, 7), "uint8").view("uint32")


def test_whole_means_every_element_once() -> None:
    x = tensor((4, 4))
    assert x.covers_storage and x.permute((1, 0)).covers_storage and x[:, :].covers_storage
    assert not x[0:3].covers_storage
    assert not x.ap([[1, 4], [1, 4]]).covers_storage


def test_get_pattern_and_contiguity() -> None:
    on_chip = tile((128, 4, 8))
    assert on_chip.get_pattern() == [[32, 128], [8, 4], [1, 8]]
    assert on_chip[0:64].is_contiguous()
    assert not on_chip[:, :, 0:4].is_contiguous()


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + t,
        lambda t: -t,
        lambda t: bool(t[:1, :1]),
        lambda t: float(t),
        lambda t: t < t,
        lambda t: 2 * t,
    ],
)
def test_refuses_python_operators(use: object) -> None:
    with pytest.raises(RuleViolation) as refused:
        use(tile((8, 8)))  # type: ignore[operator]
    assert refused.value.code == "NKW-TENSOR-OPERATOR"


def test_a_tensor_is_true_for_being_there() -> None:
    assert tile((8, 8)) and tile((8, 8))[:1] and tensor((1, 1))


def test_a_view_knows_the_tensor_it_was_made_of() -> None:
    words = tensor((4, 8), "uint32")
    base = words.view("uint16")[1:3].reshape((32,)).base_tensor
    assert (base.shape, base.dtype, base.offset) == ((4, 8), "uint32", 0)
    assert np.array_equal(base.array, words.array)


def test_an_empty_part_may_be_named_and_not_used() -> None:
    view = tensor((8, 4))[3:3]
    assert view.shape == (0, 4)
    with pytest.raises(OutOfBounds, match=r"shape \(0, 4\)"):
        view.byte_view()
    for start, end in ((4, 3), (8, 9), (9, 9)):
        with pytest.raises(OutOfBounds, match="NKW-INDEX"):
            tensor((8, 4))[start:end]


def test_refuses_assignment() -> None:
    with pytest.raises(RuleViolation, match="NKW-MUTATION"):
        tile((8, 8))[0:4] = 1


def test_printing_shows_values_and_says_what_is_unwritten() -> None:
    assert "[[0 1]" in repr(tile((2, 2)))
    element = as_dtype("float32")
    fresh = NkiTensor((2, 2), element, Storage((2, 2), element, MemoryRegion.sbuf, "y"))
    assert repr(fresh) == "<y (2, 2) float32 in sbuf, not fully written>"
