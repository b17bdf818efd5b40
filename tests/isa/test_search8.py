"""max8, nc_find_index8 and nc_match_replace8 against searches over Python lists, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.isa.reference import STORAGE, as_float64, assert_same, rounded, sample
from tests.isa.tiles import PSUM, TARGETS, Fresh, Given, execute, healthy, plan, refuses, tile

SHAPES = [(1, 8), (127, 9), (128, 3, 11), (5, 4096)]
DTYPES = ["float32", "bfloat16", "int32", "uint8"]
_MISSING = {"uint16": 0xFFFF, "uint32": 0xFFFFFFFF}


def _rows(array: np.ndarray) -> list[list[float]]:
    return as_float64(array).reshape(array.shape[0], -1).tolist()


def _data(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return rows with many equal values."""
    spread = np.random.default_rng(11).integers(0, 40, shape)
    return np.where(spread < 30, spread % 7, sample(dtype, shape).astype(np.float64)).astype(STORAGE[dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_max8_gives_the_largest_in_descending_order(dtype: str, shape: tuple[int, ...]) -> None:
    data = _data(dtype, shape)
    expected = np.array([sorted(row, reverse=True)[:8] for row in _rows(data)])
    assert_same(execute("trn2", "max8", dst=Fresh((shape[0], 8)), src=data)["dst"], expected)
    narrow = execute("trn1", "max8", dst=Fresh((shape[0], 8), "bfloat16"), src=Given(data))["dst"]
    assert_same(narrow, rounded(expected, "bfloat16"))


def test_nan_counts_as_the_largest() -> None:
    data = np.arange(20, dtype=np.float32).reshape(2, 10)
    data[0, [3, 5]] = np.nan, -np.inf
    done = execute("trn2", "max8", dst=Fresh((2, 8)), src=data)["dst"]
    assert_same(done, np.array([[np.nan, 9, 8, 7, 6, 4, 2, 1], [19, 18, 17, 16, 15, 14, 13, 12]]))


def _find(row: list[float], wanted: list[float], missing: int) -> list[int]:
    taken: set[int] = set()
    indices = []
    for value in wanted:
        index = next((i for i, x in enumerate(row) if x == value and i not in taken), missing)
        taken.add(index)
        indices.append(index)
    return indices


@pytest.mark.parametrize("index", ["uint16", "uint32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nc_find_index8_takes_successive_occurrences(dtype: str, shape: tuple[int, ...], index: str) -> None:
    data = _data(dtype, shape)
    values = _data("float32", (shape[0], 8))
    values[:, :4] = as_float64(data).reshape(shape[0], -1)[:, 2:6]
    expected = [
        _find(row, wanted, _MISSING[index]) for row, wanted in zip(_rows(data), values.astype(float).tolist())
    ]
    done = execute("trn2", "nc_find_index8", dst=Fresh((shape[0], 8), index), data=data, vals=values)["dst"]
    assert done.tolist() == expected


def test_the_maxima_of_a_row_are_found_again_and_all_differ() -> None:
    data = _data("bfloat16", (128, 200))
    largest = execute("trn1", "max8", dst=Fresh((128, 8)), src=data)["dst"]
    indices = execute("trn1", "nc_find_index8", dst=Fresh((128, 8), "uint32"), data=data, vals=largest)["dst"]
    assert_same(np.take_along_axis(data, indices.astype(np.int64), axis=1), largest)
    assert all(len(set(row)) == 8 for row in indices.tolist())


def test_a_value_that_is_missing_gives_all_ones() -> None:
    data = np.array([[1, 2, 2, np.nan, 5, 6, -0.0, 8]], np.float32)
    values = np.array([[2, 2, 2, 9, np.nan, 0.0, 1, 1]], np.float32)
    for index, ones in _MISSING.items():
        done = execute("trn2", "nc_find_index8", dst=Fresh((1, 8), index), data=data, vals=values)["dst"]
        assert done.tolist() == [[1, 2, ones, ones, ones, 6, 0, ones]]


def _match(row: list[float], wanted: list[float], imm: float, missing: int) -> tuple[list[float], list[int]]:
    replaced, left = list(row), [True] * len(row)
    indices = [missing] * 8
    for slot in reversed(range(8)):
        index = next((i for i, x in enumerate(row) if x == wanted[slot] and left[i]), None)
        if index is not None:
            replaced[index], left[index], indices[slot] = imm, False, index
    return replaced, indices


@pytest.mark.parametrize("imm", [-1.5, 3.0, float("-inf")])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nc_match_replace8_serves_slots_from_the_last(dtype: str, shape: tuple[int, ...], imm: float) -> None:
    data = _data(dtype, shape)
    values = _data("float32", (shape[0], 8))
    pairs = [
        _match(row, wanted, imm, 0xFFFFFFFF)
        for row, wanted in zip(_rows(data), values.astype(float).tolist())
    ]
    done = execute(
        "trn2",
        "nc_match_replace8",
        dst=Fresh(shape, "float32"),
        data=data,
        vals=values,
        imm=imm,
        dst_idx=Fresh((shape[0], 8), "uint32"),
    )
    assert_same(done["dst"].reshape(shape[0], -1), np.array([replaced for replaced, _ in pairs]))
    assert done["dst_idx"].tolist() == [indices for _, indices in pairs]


def test_the_published_example_of_nc_match_replace8() -> None:
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    values = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    done = execute(
        "trn2",
        "nc_match_replace8",
        dst=Fresh((1, 11)),
        data=data,
        vals=values,
        imm=0.0,
        dst_idx=Fresh((1, 8), "uint16"),
    )
    assert done["dst_idx"].tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert done["dst"].tolist() == [[1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0]]


def test_what_was_replaced_is_not_matched_again_and_dst_idx_is_optional() -> None:
    data = np.array([[5, 1, 2, 3, 4, 6, 7, 9]], np.float32)
    values = np.full((1, 8), 5, np.float32)
    done = execute(
        "trn2", "nc_match_replace8", dst=Fresh((1, 8)), data=Given(data, PSUM), vals=values, imm=5.0
    )
    assert done["dst"].tolist() == data.tolist()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "operand"), [("max8", "src"), ("nc_find_index8", "data")])
@pytest.mark.parametrize("elements", [7, 8, 9, 16383, 16384, 16385])
def test_the_number_of_elements_searched(target: str, name: str, operand: str, elements: int) -> None:
    call = healthy(name, **{operand: tile((8, elements), "bfloat16")})
    if 8 <= elements <= 16384:
        plan(target, name, **call)
    else:
        refuses("NKW-SEARCH-SIZE", target, name, **call)


@pytest.mark.parametrize(("name", "operand"), [("max8", "src"), ("nc_find_index8", "data")])
def test_a_searched_tile_has_up_to_three_dims(name: str, operand: str) -> None:
    plan("trn2", name, **healthy(name, **{operand: tile((8, 4, 4))}))
    refuses("NKW-SEARCH-SIZE", "trn2", name, **healthy(name, **{operand: tile((8, 4, 2, 2))}))


@pytest.mark.parametrize(
    ("name", "changes", "code"),
    [
        ("max8", {"dst": tile((8, 7))}, "NKW-SEARCH-EIGHT"),
        ("max8", {"dst": tile((8, 9))}, "NKW-SEARCH-EIGHT"),
        ("max8", {"dst": tile((7, 8))}, "NKW-SEARCH-EIGHT"),
        ("nc_find_index8", {"vals": tile((8, 7))}, "NKW-SEARCH-EIGHT"),
        ("nc_find_index8", {"dst": tile((8, 9), "uint32")}, "NKW-SEARCH-EIGHT"),
        ("nc_find_index8", {"dst": tile((8, 8), "int32")}, "NKW-DTYPE-ALLOWED"),
        ("nc_find_index8", {"dst": tile((8, 8))}, "NKW-DTYPE-ALLOWED"),
        ("nc_match_replace8", {"vals": tile((7, 8))}, "NKW-SEARCH-EIGHT"),
        ("nc_match_replace8", {"dst_idx": tile((8, 9), "uint16")}, "NKW-SEARCH-EIGHT"),
        ("nc_match_replace8", {"dst_idx": tile((8, 8), "uint8")}, "NKW-DTYPE-ALLOWED"),
        ("nc_match_replace8", {"dst": tile((8, 15))}, "NKW-ELEMENTS-AGREE"),
        ("nc_match_replace8", {"imm": None}, "NKW-NUMBER"),
        ("nc_match_replace8", {"imm": tile((8, 1))}, "NKW-NUMBER"),
        ("nc_match_replace8", {"imm": 1e39}, "NKW-FLOAT32-RANGE"),
    ],
)
def test_refusals_of_the_searches(name: str, changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", name, **healthy(name, **changes))
    for index in ("uint16", "uint32"):
        if name == "nc_find_index8":
            plan("trn2", name, **healthy(name, dst=tile((8, 8), index)))
        elif name == "nc_match_replace8":
            plan("trn2", name, **healthy(name, dst_idx=tile((8, 8), index)))
