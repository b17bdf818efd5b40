"""What the tests of detectors share: a launch and what is found in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simulate
from simulate.check import Finding, detect, gathered


def findings(
    kernel: Callable[..., Any], *arguments: Any, target: str = "trn2", cores: int = 1
) -> list[Finding]:
    """What the detectors find in one launch on one rank."""
    with gathered() as seen:
        simulate.World(target, 1, cores).launch(kernel, [(arguments, {})])
    ((launch, evidence),) = seen.launches
    return detect(launch, evidence)


def codes(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """The codes of what is found."""
    return [finding.code for finding in findings(kernel, *arguments, **options)]
