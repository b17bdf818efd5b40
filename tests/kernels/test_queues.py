"""Queues of DMAs: arguments of `nisa.dma_copy` as the reference allows them, by chip and dtypes, values unchanged."""

from __future__ import annotations

import ast
from pathlib import Path

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import nki_kernels
from nki_kernels.dma import COMPILER, SCALAR, STATIC, SYNC, queue_for, transfer
from simulate import Mode, World
from simulate.isa.enums import Engine

FOLDER = Path(nki_kernels.__file__).parent
X = np.arange(128 * 8, dtype=np.float32).reshape(128, 8) % 256  # exact in bfloat16
QUEUES = {"STATIC": STATIC, "SCALAR": SCALAR, "SYNC": SYNC, "COMPILER": COMPILER}


@pytest.mark.slow
def test_kernels_choose_dge_modes_and_trigger_engines_in_one_file() -> None:
    """So no kernel passes an engine without hwdge, or a dge_mode that the reference does not list for a transpose."""
    calls = [
        f"{path.relative_to(FOLDER)}:{node.lineno}"
        for path in sorted(FOLDER.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("nisa.dma_copy", "nisa.dma_transpose")
        and (len(node.args) > 2 or {"engine", "dge_mode", None} & {keyword.arg for keyword in node.keywords})
    ]
    (only,) = calls
    assert only.startswith("dma.py:")


def copies(x, names, dtype):
    """Copy x to SBUF and back once for each queue, and append what `queue_for` chose."""
    out = nl.ndarray((len(names), *x.shape), x.dtype, buffer=nl.shared_hbm)
    for number in range(len(names)):
        tile = nl.ndarray(x.shape, dtype, buffer=nl.sbuf)
        transfer(tile, x, QUEUES[names[number]])
        transfer(out[number], tile, QUEUES[names[number]])
    return out


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16], ids=["equal", "cast"])
def test_a_transfer_uses_its_queue_where_chip_and_dtypes_allow_it(target: str, dtype: object) -> None:
    names = tuple(QUEUES)
    done = World(target).launch(copies, [((X, names, dtype), {})])
    np.testing.assert_array_equal(done.outputs[0], np.broadcast_to(X, (len(names), *X.shape)))
    assert done.tolerated == ()
    triggers = [stream.event(i).trigger for stream in done.streams for i in range(len(stream))]
    default = [Engine.sync, Engine.gpsimd]
    hardware = target != "trn1" and dtype == nl.float32
    expected = {"SCALAR": [Engine.scalar] * 2, "SYNC": [Engine.sync] * 2} if hardware else {}
    assert triggers == [trigger for name in names for trigger in expected.get(name, default)]


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_a_queue_becomes_the_compilers_choice_where_it_does_not_apply(target: str) -> None:
    seen = []

    def kernel(x):
        same = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        other = nl.ndarray(x.shape, nl.bfloat16, buffer=nl.sbuf)
        for name in QUEUES:
            seen.append((name, queue_for(same, x, QUEUES[name]), queue_for(other, x, QUEUES[name])))
        nisa.dma_copy(dst=same, src=x)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=same)
        return out

    World(target).launch(kernel, [((X,), {})], mode=Mode.dry)
    by_hardware = COMPILER if target == "trn1" else None
    assert seen == [
        (name, by_hardware or queue if name in ("SCALAR", "SYNC") else queue, COMPILER)
        for name, queue in QUEUES.items()
    ]
