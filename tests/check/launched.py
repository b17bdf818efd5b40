"""Helpers of the tests of detectors: a launch and its findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simulate
from simulate.check import Finding, detect, gathered


def findings(
    kernel: Callable[..., Any], *arguments: Any, target: str = "trn2", cores: int = 1
) -> list[Finding]:
    """Return the findings of the detectors about one launch on one rank."""
    with gathered() as seen:
        simulate.World(target, 1, cores).launch(kernel, [(arguments, {})])
    ((launch, evidence),) = seen.launches
    return detect(launch, evidence)


def codes(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Return the codes of the findings."""
    return [finding.code for finding in findings(kernel, *arguments, **options)]
