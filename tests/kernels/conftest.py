"""Makes the warning about a tolerated rule an error in all tests of this folder.

So a kernel of the package that breaks a rule which only warns fails its test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn the warning of a tolerated rule into an error in every test of this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error::simulate.run.launcher.ToleratedRule"))
