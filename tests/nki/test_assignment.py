"""`tile[key] = other` issues a copy: on chip by an engine, from or to HBM by a DMA."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.errors import RuleViolation

X = np.arange(32 * 8, dtype=np.float32).reshape(32, 8)


def launched(kernel: Any) -> Any:
    return simulate.World("trn2").launch(kernel, [((X,), {})])


def issued(launch: Any) -> list[str]:
    return [event.op for event in launch.streams[0]]


def test_a_tile_is_assigned_by_an_engine_and_hbm_by_a_dma() -> None:
    def kernel(x):
        tile = nl.ndarray((32, 8), dtype=nl.float32)
        half = nl.ndarray((32, 4), dtype=nl.bfloat16)
        out = nl.ndarray((32, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        tile[...] = x
        half[:] = tile[:, 0:4]
        tile[:, 4:8] = half
        tile[0] = x[1]
        out[:, 2:8] = tile[:, 2:8]
        out[:, 0:2] = x[:, 0:2]
        return out

    done = launched(kernel)
    expected = np.hstack([X[:, :4], X[:, :4]])
    expected[0, 2:] = X[1, 2:]
    assert np.array_equal(done.outputs[0], expected)
    assert issued(done) == ["dma_copy", *["tensor_copy"] * 2, *["dma_copy"] * 3]
    first = kernel.__code__.co_firstlineno
    assert [event.where.line - first for event in done.streams[0]] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("columns", [7, 8])
def test_both_sides_have_as_many_elements(columns: int) -> None:
    def kernel(x):
        tile = nl.load(x)
        tile[...] = tile[:, 0:columns]
        return x

    if columns == 8:
        assert issued(launched(kernel)) == ["dma_copy", "tensor_copy"]
    else:
        with pytest.raises(RuleViolation, match="NKW-ELEMENTS-AGREE"):
            launched(kernel)


@pytest.mark.parametrize("value", [0.0, 1, None, X, [1.0]], ids=lambda value: type(value).__name__)
def test_anything_but_a_tensor_is_refused(value: Any) -> None:
    def kernel(x):
        tile = nl.load(x)
        tile[...] = value
        return x

    with pytest.raises(RuleViolation, match="NKW-MUTATION") as refused:
        launched(kernel)
    seen, _, because = refused.value.seen.partition(";")
    assert seen.startswith(
        f"an assignment of {type(value).__name__} to tile (32, 8) float32 in sbuf (allocated at "
    )
    assert because.endswith("exists until level 0.3; NKI_LEVEL is 0.7") == isinstance(value, (int, float))


def test_the_handle_of_an_instruction_is_refused() -> None:
    def kernel(x):
        tile = nl.load(x)
        tile[...] = nisa.tensor_copy(dst=tile, src=tile)
        return x

    with pytest.raises(RuleViolation, match="an assignment of NkiInstruction"):
        launched(kernel)
