"""Fixtures for all tests: garbage collection, environment variables, and a small trained model."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import simulate

simulate.install()  # any test file can be run alone, also one that imports `nki` before anything of ours

gc.disable()  # modules and thousands of collected tests are no garbage, and would be searched again and again

STORIES260K = "NKW_STORIES260K"
_OURS = ("NKI_", "NKW_", "NEURON_")


def pytest_collection_finish() -> None:
    """Turn garbage collection on, without the objects that exist already, which makes it faster during tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """Restore variables such as NKW_* after each test, because commands set the chip and the kind of replay there."""
    before = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    yield
    for name in [name for name in os.environ if name.startswith(_OURS)]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """Return the folder of the smallest trained Llama, 260,032 parameters; skip the test if it is not available."""
    shared_folder = Path(__file__).resolve().parents[2] / "shared" / "data" / "models" / "stories260K"
    folder = Path(os.environ.get(STORIES260K) or shared_folder)
    if not (folder / "config.json").is_file():
        pytest.skip(f"no stories260K in {folder}; {STORIES260K} names its folder")
    return folder
