"""Reports of kernels that a notebook defines name the cell and its line."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

CELL = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def copied(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.dma_copy(dst=out, src=tile)
    return out
"""


@pytest.mark.slow
def test_a_profile_and_an_error_name_the_cell_and_its_line() -> None:
    pytest.importorskip("IPython.core.interactiveshell")
    code = textwrap.dedent(
        f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(colors="NoColor")
        shell.run_cell("import simulate; simulate.install('simulate')", store_history=True)
        shell.run_cell({CELL!r}, store_history=True)
        shell.run_cell("copied(np.ones((4, 4), np.float32))", store_history=True)
        shell.run_cell("from simulate.profile import profile; from simulate.profile.text import text")
        shell.run_cell("launch = simulate.launch(copied.func, [((np.ones((4, 4), np.float32),), {{}})])")
        shell.run_cell("print(text(profile(launch.streams, launch.hardware)))", store_history=True)
        shell.run_cell("copied(np.ones((129, 4), np.float32))", store_history=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "dma_copy In [2]:10" in done.stdout, done.stdout + done.stderr
    assert "  at In [2]:9 in copied" in done.stdout
    assert "ipython-input" not in done.stdout and "/tmp/" not in done.stdout
