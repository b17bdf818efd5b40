"""`nki.simulator`: the entry that frameworks call to run a kernel on the simulated core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulate.kernel import as_kernel


def simulate_kernel(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    lnc: int = 1,
) -> Any:
    """Run a kernel or a plain function on `lnc` physical cores of one logical core, and return its outputs.

    The reference does not document it. Its parameters are those that public callers pass; `lnc` may be left out.

    Raises:
        InvalidArgument: `lnc` is not 1 or 2.
    """
    return as_kernel(func)[lnc](*args, **(kwargs or {}))


__all__ = ["simulate_kernel"]
