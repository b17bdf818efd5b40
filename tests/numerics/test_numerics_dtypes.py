"""Dtypes: names, storage, and every spelling a kernel or a host array may use."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from nkw.errors import InvalidArgument
from simulate import numerics
from simulate.numerics import DTYPES, DType, as_dtype

# NKI 0.6 dtype table: name, bytes, largest value.
TABLE = [
    ("bool_", 1, 1),
    ("int8", 1, 127),
    ("uint8", 1, 255),
    ("int16", 2, 32767),
    ("uint16", 2, 65535),
    ("int32", 4, 2147483647),
    ("uint32", 4, 4294967295),
    ("float16", 2, 65504),
    ("bfloat16", 2, 3.3895313892515355e38),
    ("tfloat32", 4, 3.4011621342146535e38),
    ("float32", 4, 3.4028234663852886e38),
    ("float8_e4m3", 1, 240),
    ("float8_e4m3fn", 1, 448),
    ("float8_e5m2", 1, 57344),
    ("float8_e8m0fnu", 1, 2.0**127),
    ("float8_e5m2_x4", 4, 57344),
    ("float8_e4m3fn_x4", 4, 448),
    ("float4_e2m1fn_x4", 2, 6),
]


@pytest.mark.parametrize(("name", "size", "largest"), TABLE)
def test_sizes_and_ranges_are_the_documented_ones(name: str, size: int, largest: float) -> None:
    dtype = DTYPES[name]
    assert dtype is getattr(numerics, name)
    assert (dtype.itemsize, dtype.storage.itemsize) == (size, size)
    assert dtype.max == largest


def test_table_holds_nothing_else() -> None:
    assert list(DTYPES) == [name for name, _, _ in TABLE]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_dtype_is_of_exactly_one_kind(dtype: DType) -> None:
    assert dtype.is_float + dtype.is_integer + dtype.is_packed == 1
    assert dtype.is_integer == ("int" in dtype or dtype == "bool_")
    assert dtype.is_packed == dtype.endswith("_x4")
    assert (dtype.packed_storage is not None) == dtype.is_packed


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_largest_value_is_that_of_the_storage(dtype: DType) -> None:
    element = dtype.packed_storage or dtype.storage
    if dtype.is_float or dtype.is_packed:
        largest = ml_dtypes.finfo(element).max
        assert dtype.max == float(largest) or dtype == "tfloat32"
    elif dtype != "bool_":
        assert dtype.max == np.iinfo(element).max


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_behaves_as_its_name(dtype: DType) -> None:
    assert dtype == str(dtype)
    assert hash(dtype) == hash(str(dtype))
    assert {str(dtype): 1}[dtype] == 1
    assert repr(dtype) == str(dtype)
    assert f"{dtype}" == str(dtype)
    assert type(str(dtype)) is str


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_survives_copying_and_pickling(dtype: DType) -> None:
    assert copy.copy(dtype) is dtype
    assert copy.deepcopy(dtype) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


def test_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="dtype int8 is constant; max cannot be set"):
        numerics.int8.max = 3
    with pytest.raises(AttributeError, match="dtype int8 is constant; max cannot be deleted"):
        del numerics.int8.max
    assert numerics.int8.max == 127


def test_numpy_accepts_the_names_it_knows() -> None:
    for dtype in DTYPES.values():
        if not dtype.is_packed and dtype not in ("tfloat32", "bool_"):
            assert np.dtype(dtype) == dtype.storage


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_names_and_dtypes_resolve_to_the_one_object(dtype: DType) -> None:
    assert as_dtype(dtype) is dtype
    assert as_dtype(str(dtype)) is dtype


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("bool", "bool_"),
        (bool, "bool_"),
        (np.bool_, "bool_"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (np.dtype("<i4"), "int32"),
        (np.uint8, "uint8"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (ml_dtypes.float8_e4m3, "float8_e4m3"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (ml_dtypes.float8_e8m0fnu, "float8_e8m0fnu"),
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.half, "float16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.int32, "int32"),
        (torch.uint8, "uint8"),
        (torch.bool, "bool_"),
    ],
    ids=str,
)
def test_types_of_other_libraries_resolve(value: object, name: str) -> None:
    assert as_dtype(value) is DTYPES[name]


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (np.float64, "float32"),
        (float, "float32"),
        ("float64", "float32"),
        (torch.float64, "float32"),
        (int, "int32"),
        (np.dtype("int64"), "int32"),
        (torch.int64, "int32"),
        (np.uint64, "uint32"),
    ],
    ids=str,
)
def test_refuses_64_bit_types(value: object, instead: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        as_dtype(value)
    assert refusal.value.code == "NKW-DTYPE"
    assert refusal.value.message == (
        f"{value!r} is a 64-bit type; NeuronCores have no 64-bit types, use {instead}"
    )


@pytest.mark.parametrize(
    "value",
    ["fp32", "float4_e2m1fn", "", None, 3, [], object, np.dtype("S3"), np.complex64, torch.complex64],
    ids=str,
)
def test_refuses_what_is_no_dtype(value: object) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        as_dtype(value)
    assert refusal.value.code == "NKW-DTYPE"
    assert refusal.value.message == f"{value!r} is no dtype of a NeuronCore; pass one of {', '.join(DTYPES)}"


FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_float]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kept_as_float32_it_is_the_same_dtype_to_a_kernel(dtype: DType) -> None:
    kept = dtype.stored_as_float32()
    assert kept == dtype
    assert (kept.itemsize, kept.max, kept.is_float) == (dtype.itemsize, dtype.max, True)
    assert kept.storage == np.float32
    assert kept.stored_as_float32() is kept
    assert pickle.loads(pickle.dumps(kept)) is kept
    assert as_dtype(kept) is kept


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if not dtype.is_float], ids=str)
def test_refuses_to_keep_other_dtypes_as_float32(dtype: DType) -> None:
    with pytest.raises(InvalidArgument, match=f"{dtype} is no floating-point dtype"):
        dtype.stored_as_float32()
