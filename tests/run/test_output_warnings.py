"""`run` warns of outputs that are not finite where the arguments are; `check` names the instruction."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulate.cli import main

SCRIPT = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def powers(x):
    tile = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.activation(dst=tile, op=nl.exp, data=tile)
    out = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def masked(x):
    tile = nl.full(x.shape, float("-inf"), nl.float32)
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


for value in {values}:
    {kernel}(np.full((2, 4), value, np.float32))
"""
WARNING = "warning: an output (2, 4) bfloat16 of powers contains 0 NaN and 8 infinite elements"


@pytest.mark.parametrize(
    ("kernel", "values", "warnings"),
    [
        ("powers", "[88.0]", 0),
        ("powers", "[89.0]", 1),
        ("powers", "[89.0, 1.0, 90.0]", 1),
        ("powers", "[1.0, 89.0]", 1),
        ("powers", "[float('inf'), float('nan')]", 0),
        ("masked", "[1.0]", 0),
    ],
)
def test_run_warns_once_for_each_kernel_whose_outputs_are_not_finite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kernel: str, values: str, warnings: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(values=values, kernel=kernel))
    assert main(["run", str(script)]) == 0
    written = capfd.readouterr().err
    assert written.count(WARNING) == written.count("warning:") == warnings
    assert written.count(f"nkw check {script} names the instruction") == warnings
