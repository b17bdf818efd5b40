"""Documented names that the simulator does not carry out yet: calling one raises Unsupported with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from simulate.errors import Unsupported

NOT_YET: dict[str, dict[str, str]] = {
    "nki.isa": {},
    "nki.language": {},
    "nki.collectives": {},
}
"""By module: the name and why it cannot be had."""


def not_yet(module: str, name: str) -> Callable[..., NoReturn]:
    """A function that raises Unsupported when it is called; AttributeError for a name nobody documents."""
    reason = NOT_YET[module].get(name)
    if reason is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def unsupported(*_: Any, **__: Any) -> NoReturn:
        raise Unsupported("NKW-UNSUPPORTED", f"{module}.{name} cannot be simulated: {reason}")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.nki_operator = name  # type: ignore[attr-defined]
    return unsupported
