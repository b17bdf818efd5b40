"""Python operators on tiles; each issues the instruction of the function of `nki.language` with its meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.beta1 import elementwise
from simulate.beta1.arithmetic import apply_binary, apply_unary, update_in_place
from simulate.beta1.tile import Tile


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    """Return the method for a binary operator, or with `swapped` the reflected method."""

    def method(self: Any, other: Any) -> Any:
        return apply_binary(name, other, self) if swapped else apply_binary(name, self, other)

    return method


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """Return the method for an in-place operator such as +=, which writes to the tile itself."""

    def method(self: Any, other: Any) -> Any:
        return update_in_place(name, self, other)

    return method


class OperatorTile(Tile):
    """Tile with Python's operators, as kernels see it; `==` and `!=` compare objects, for containers of tiles."""

    __slots__ = ()

    __add__, __radd__, __iadd__ = _binary("add"), _binary("add", True), _in_place("add")
    __sub__, __rsub__, __isub__ = _binary("subtract"), _binary("subtract", True), _in_place("subtract")
    __mul__, __rmul__, __imul__ = _binary("multiply"), _binary("multiply", True), _in_place("multiply")
    __truediv__, __rtruediv__, __itruediv__ = _binary("divide"), _binary("divide", True), _in_place("divide")
    __pow__ = _binary("power")
    __and__, __rand__ = _binary("bitwise_and"), _binary("bitwise_and", True)
    __or__, __ror__ = _binary("bitwise_or"), _binary("bitwise_or", True)
    __xor__, __rxor__ = _binary("bitwise_xor"), _binary("bitwise_xor", True)
    __lshift__, __rshift__ = _binary("left_shift"), _binary("right_shift")
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")

    def __neg__(self) -> Any:
        return _binary("multiply")(self, -1.0)

    def __invert__(self) -> Any:
        return apply_unary("invert", self)

    def broadcast_to(self, shape: Any, **_: Any) -> Any:
        """Return the tile repeated to `shape`: along free dims as a view, over partitions by a copy."""
        return elementwise.broadcast_to(self, tuple(shape))

    def astype(self, dtype: Any) -> Any:
        """Return a copy of the tile in another dtype."""
        return elementwise.copy(self, dtype=dtype)

    def __bool__(self) -> bool:
        """Return True for an HBM tensor, as `nl.load(bias) if bias else None` expects. Raises RuleViolation on chip."""
        if self.buffer.on_chip:
            raise RuleViolation(
                tile_is_no_condition, "a tile in `if`, `while`, `and` or `or`", hint="use mask= or nl.where"
            )
        return True


@rule("NKW-BETA1-CONDITION")
def tile_is_no_condition() -> None:
    """A tile has values at run time only and is no condition of Python.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
