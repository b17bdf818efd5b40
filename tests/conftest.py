"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import simulate

simulate.install()  # any test file can be run alone, also one that imports `nki` before anything of ours

STORIES260K = "NKW_STORIES260K"


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """The smallest trained Llama, 260,032 parameters in a Hugging Face folder; it is not part of the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "models" / "stories260K"
    folder = Path(os.environ.get(STORIES260K) or beside)
    if not (folder / "config.json").is_file():
        pytest.skip(f"no stories260K in {folder}; {STORIES260K} names its folder")
    return folder
