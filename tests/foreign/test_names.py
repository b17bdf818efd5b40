"""The survey of names on small files of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import simulate
from tests.foreign.names import main, missing, uses

PYTHON = """
import nki.isa as nisa, numpy as np
from nki.isa.constants import oob_mode as mode
from neuronxcc import nki
import nki.language

def kernel(nl):
    nisa.dma_copy(oob_mode=mode.skip)
    nisa.tensor_frobnicate(nl.nothing, np.nothing)
    nki.language.exp(0)
"""
PAGE = """
Title
=====

.. code-block:: python

   import nki.language as nl

Text in between.

.. code-block:: python

   x = nl.unheard_of(nl.add)

.. code-block:: console

   import nki.shell
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    simulate.install("simulate")
    (tmp_path / "a.py").write_text(PYTHON)
    (tmp_path / "page.rst").write_text(PAGE)
    (tmp_path / "page.md").write_text("```python\nimport nki\nnki.frobnicate()\n```\n")
    cells = [
        {"cell_type": "code", "source": ["import nki.isa\n", "nki.isa.memset"]},
        {"cell_type": "markdown"},
    ]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "broken.py").write_text("import nki.broken\ndef")
    return tmp_path


def test_uses_follow_imports_and_their_aliases(folder: Path) -> None:
    places_by_name = uses([folder])
    assert {
        "nki.isa.dma_copy",
        "nki.isa.constants.oob_mode.skip",
        "nki.isa.memset",
        "nki.language.add",
    } <= set(places_by_name)
    assert not any("nothing" in name or "shell" in name or "broken" in name for name in places_by_name)
    assert places_by_name["nki.isa.tensor_frobnicate"] == [f"{folder / 'a.py'}:9"]


def test_missing_names_are_those_that_do_not_resolve(folder: Path) -> None:
    assert sorted(missing(list(uses([folder])))) == [
        "nki.frobnicate",
        "nki.isa.tensor_frobnicate",
        "nki.language.unheard_of",
    ]


def test_the_report_counts_and_tells(folder: Path, capsys) -> None:
    assert main([str(folder)]) == 1
    assert "of them missing" in capsys.readouterr().out
    (folder / "a.py").unlink()
    (folder / "page.rst").unlink()
    (folder / "page.md").unlink()
    assert main([str(folder)]) == 0
