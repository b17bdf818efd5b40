"""iota and affine_select: affine values computed one by one in Python integers."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np
import pytest

from simulate.hardware import hardware
from simulate.isa import Engine
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import launch
from tests.isa.reference import (
    FLOATS,
    INTEGERS,
    STORAGE,
    as_float64,
    assert_same,
    assert_same_bits,
    every_bit_pattern,
    rounded,
    sample,
)
from tests.isa.tiles import PSUM, TARGETS, Fresh, execute, healthy, plan, refuses, tile


def _values(partitions: int, pattern: list[list[int]], offset: int, multiplier: int) -> np.ndarray:
    rows = []
    for p in range(partitions):
        row = []
        for indices in itertools.product(*(range(num) for _, num in pattern)):
            value = offset + p * multiplier + sum(i * step for i, (step, _) in zip(indices, pattern))
            row.append((value + 2**31) % 2**32 - 2**31)
        rows.append(row)
    return np.array(rows, np.int64)


CASES = [
    (1, [[1, 5]], 0, 0),
    (127, [[1, 7]], 3, 1),
    (128, [[-2, 9]], -5, 3),
    (5, [[10, 2], [1, 3]], 100, -7),
    (4, [[100, 2], [0, 2], [-1, 3], [7, 2]], 1, 1000),
    (3, [[2**30, 4], [1, 2]], 2**31 - 1, 2**31 - 1),
    (128, [[1, 1]], -(2**31), -(2**31)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["int32", "float32", "uint32", "bfloat16", "uint8", "int16"])
def test_iota_writes_affine_values(dtype: str, case: tuple[int, list[list[int]], int, int]) -> None:
    _, pattern, offset, multiplier = case
    values = _values(*case)
    done = execute(
        "trn1",
        "iota",
        dst=Fresh(values.shape, dtype),
        pattern=pattern,
        offset=offset,
        channel_multiplier=multiplier,
    )["dst"]
    assert_same(done, values if dtype == "int32" else rounded(rounded(values, "float32"), dtype))


def test_partitions_count_from_the_first_of_the_destination() -> None:
    def kernel():
        table = nl.zeros((128, 2), nl.int32)
        nisa.iota(dst=table[64:96], pattern=[[1, 2]], channel_multiplier=10)
        out = nl.ndarray((128, 2), nl.int32, nl.shared_hbm)
        nl.store(out, table)
        return out

    done = launch(kernel, [((), {})], hardware("trn2")).outputs[0]
    assert done[64].tolist() == [0, 1] and done[95].tolist() == [310, 311]
    assert not done[:64].any() and not done[96:].any()


@pytest.mark.parametrize("start", [-(2**31), -1, 0, 2**24 + 1, 2**31 - 1])
def test_the_offset_may_be_a_register(start: int) -> None:
    def kernel(word, data):
        offset = nisa.register_alloc()
        nisa.register_load(offset, nl.load(word))
        counted = nl.ndarray((3, 4), nl.int32)
        nisa.iota(dst=counted, pattern=[[1, 4]], offset=offset, channel_multiplier=4)
        selected = nl.ndarray((3, 4), nl.bfloat16)
        nisa.affine_select(
            dst=selected,
            pattern=[[-1, 4]],
            channel_multiplier=0,
            on_true_tile=nl.load(data),
            on_false_value=0.0,
            cmp_op=nl.greater,
            offset=offset,
        )
        outs = [nl.ndarray((3, 4), t.dtype, nl.shared_hbm) for t in (counted, selected)]
        nl.store(outs[0], counted)
        nl.store(outs[1], selected)
        return tuple(outs)

    arguments = (np.array([[start]], np.int32), np.ones((3, 4), np.float32))
    counted, selected = launch(kernel, [(arguments, {})], hardware("trn2")).outputs[0]
    assert_same(counted, _values(3, [[1, 4]], start, 4))
    assert_same(selected, (_values(3, [[-1, 4]], start, 0) > 0).astype(float))


COMPARISONS = {
    "equal": operator.eq,
    "not_equal": operator.ne,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "less": operator.lt,
    "less_equal": operator.le,
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_selected_elements_keep_their_bits(name: str, dtype: str) -> None:
    data = every_bit_pattern(dtype, (127, 3, 5))
    chosen = COMPARISONS[name](_values(127, [[5, 3], [1, 5]], 40, -1), 0).reshape(data.shape)
    done = execute(
        "trn1",
        "affine_select",
        dst=Fresh(data.shape, dtype),
        pattern=[[5, 3], [1, 5]],
        channel_multiplier=-1,
        on_true_tile=data,
        on_false_value=3.0,
        cmp_op=getattr(nl, name),
        offset=40,
    )["dst"]
    expected = np.where(chosen, data, np.array(3, STORAGE[dtype]))
    assert_same_bits(done, expected)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "bfloat16"), ("int32", "float32"), ("bfloat16", "int8")]
)
def test_different_dtypes_go_through_float32(source: str, target: str) -> None:
    data = sample(source, (8, 9))
    chosen = _values(8, [[-1, 9]], 0, 1) >= 0
    done = execute(
        "trn2",
        "affine_select",
        dst=Fresh((8, 9), target),
        pattern=[[-1, 9]],
        channel_multiplier=1,
        on_true_tile=data,
        on_false_value=-1.7,
        cmp_op=nl.greater_equal,
    )["dst"]
    fill = rounded(np.array(float(np.float32(-1.7))), target)
    assert_same(done, np.where(chosen, rounded(as_float64(data), target), fill))


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -3.4028234663852886e38, 0, 1])
def test_the_other_elements_get_the_value(value: float) -> None:
    done = execute(
        "trn2",
        "affine_select",
        dst=Fresh((2, 4)),
        pattern=[[0, 4]],
        channel_multiplier=1,
        on_true_tile=np.ones((2, 4), np.float32),
        on_false_value=value,
    )["dst"]
    assert_same(done, np.array([[1] * 4, [value] * 4], np.float64))


@pytest.mark.parametrize("n", [1, 16, 127, 128])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_an_identity_matrix_is_made_of_it(n: int, dtype: str) -> None:
    def kernel():
        out = nl.ndarray((n, n), dtype, nl.shared_hbm)
        nl.store(out, nl.shared_identity_matrix(n, dtype=dtype))
        return out

    assert_same(launch(kernel, [((), {})], hardware("trn1")).outputs[0], np.eye(n))


@pytest.mark.parametrize("name", ["iota", "affine_select"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"pattern": [[1, 7]]}, "NKW-AFFINE-COUNT"),
        ({"pattern": [[1, 9]]}, "NKW-AFFINE-COUNT"),
        ({"pattern": [[1, 2], [1, 2], [1, 2]]}, None),
        ({"pattern": [[1, 2], [1, 2], [1, 2], [1, 1]]}, None),
        ({"pattern": [[1, 2], [1, 2], [1, 2], [1, 1], [1, 1]]}, "NKW-AFFINE-PATTERN"),
        ({"pattern": []}, "NKW-AFFINE-PATTERN"),
        ({"pattern": [[1, 0]]}, "NKW-AFFINE-PATTERN"),
        ({"pattern": [[1, -8]]}, "NKW-AFFINE-PATTERN"),
        ({"pattern": [1, 8]}, "NKW-AFFINE-PATTERN"),
        ({"pattern": [[1, 8, 1]]}, "NKW-AFFINE-PATTERN"),
        ({"pattern": [[1.0, 8]]}, "NKW-AFFINE-PATTERN"),
        ({"pattern": 8}, "NKW-AFFINE-PATTERN"),
        ({"pattern": ((np.int64(1), np.int32(8)),)}, None),
        ({"pattern": [[2**31 - 1, 8]]}, None),
        ({"pattern": [[2**31, 8]]}, "NKW-AFFINE-INT32"),
        ({"offset": 2**31 - 1}, None),
        ({"offset": 2**31}, "NKW-AFFINE-INT32"),
        ({"offset": -(2**31)}, None),
        ({"offset": -(2**31) - 1}, "NKW-AFFINE-INT32"),
        ({"offset": 0.0}, "NKW-AFFINE-INT32"),
        ({"offset": tile((1, 1), "int32")}, "NKW-AFFINE-INT32"),
        ({"channel_multiplier": 2**31}, "NKW-AFFINE-INT32"),
        ({"channel_multiplier": None}, "NKW-AFFINE-INT32"),
        ({"dst": tile((8, 8), buffer=PSUM)}, "NKW-BUFFER"),
    ],
)
def test_patterns_and_offsets(name: str, changes: dict[str, Any], code: str | None) -> None:
    call = healthy(name, **changes)
    if code is None:
        assert plan("trn2", name, **call).engine is Engine.gpsimd
    else:
        refuses(code, "trn2", name, **call)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"cmp_op": nl.add}, "NKW-AFFINE-COMPARISON"),
        ({"cmp_op": nl.logical_and}, "NKW-AFFINE-COMPARISON"),
        ({"cmp_op": "equal"}, "NKW-OPERATOR"),
        ({"on_false_value": None}, "NKW-NUMBER"),
        ({"on_false_value": 1e39}, "NKW-FLOAT32-RANGE"),
        ({"on_true_tile": tile((8, 8), buffer=PSUM)}, "NKW-BUFFER"),
        ({"on_true_tile": tile((8, 9))}, "NKW-ELEMENTS-AGREE"),
        ({"on_true_tile": tile((9, 8))}, "NKW-PARTITIONS-AGREE"),
    ],
)
def test_refusals_of_affine_select(target: str, changes: dict[str, Any], code: str) -> None:
    refuses(code, target, "affine_select", **healthy("affine_select", **changes))
