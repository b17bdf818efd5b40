"""`nki.typing`: annotations for kernel parameters, which change nothing in the simulator."""

from __future__ import annotations

from typing import Any


class _Annotation(type):
    def __getitem__(cls, shape: Any) -> Any:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        return type(cls.__name__, (cls,), {"shape": sizes})


class tensor(metaclass=_Annotation):
    """`tensor[d0, d1]` annotates a parameter with a shape; it changes nothing."""

    shape: tuple[Any, ...] = ()


class mutable_tensor(tensor):
    """Annotation of a parameter that the kernel may write; the simulator updates any input in place."""
