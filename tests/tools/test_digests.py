"""Digests of streams and launches change with what they stand for, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from model.layers.launch import FLOAT32, Launch, LeastWork, Value
from simulate import Mode
from tools.digests.launches import by_name, describe
from tools.digests.streams import digest

X = np.zeros((4, 8), np.float32)


def added(x, number=1.0):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=number)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    return _stored(x, tile)


def renamed(array, number=1.0):
    rows = nl.load(array)
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.add, operand0=number)

    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.multiply, operand0=2.0)
    return _stored(array, rows)


def other_rows(x):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile[0:3], data=tile[0:3], op0=nl.add, operand0=1.0)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    return _stored(x, tile)


def other_order(x):
    tile = nl.load(x)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    nisa.dma_copy(dst=out, src=tile)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    return out


def _stored(x, tile):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def digest_of(kernel, x=X):
    return digest(simulate.World("trn2").launch(kernel, [((x,), {})], mode=Mode.dry).streams)


def test_names_and_lines_leave_the_digest_of_a_stream_alone() -> None:
    assert digest_of(added) == digest_of(renamed)
    assert digest_of(added).startswith("4 ")


@pytest.mark.parametrize("kernel", [other_rows, other_order])
def test_operands_and_order_change_the_digest_of_a_stream(kernel) -> None:
    assert digest_of(kernel) != digest_of(added)
    assert digest_of(added, np.zeros((4, 9), np.float32)) != digest_of(added)


def test_a_launch_is_described_with_the_defaults_of_the_kernel() -> None:
    x, weight = (Value(name, shape, FLOAT32) for name, shape in (("x", (4, 8)), ("norm", (1, 8))))
    arguments = {"x": x, "weight": weight, "eps": 1e-5}
    short = Launch("rmsnorm", arguments, ("y",), LeastWork(0.0, 1.0), 4)
    complete = by_name(short)
    assert list(complete)[:3] == list(arguments) and len(complete) > 3
    assert describe(short) == describe(replace(short, arguments=complete))
    assert describe(short) != describe(replace(short, arguments={**arguments, "eps": 1e-6}))
