"""The base class of all objects of the language, and the count of values that Python read."""

from __future__ import annotations

from typing import Any

from nkw.errors import InvalidArgument

_FIELDS = "__annotations__"
_NO_FIELD = ("ClassVar", "InitVar", "KW_ONLY")


class ValueReads:
    """Counts how often Python read a value; a kernel that reads one may depend on data.

    The simulator reads values through `uncounted_array` and `uncounted_float32`, which do not count.
    """

    count = 0


VALUE_READS = ValueReads()


class NKIObject:
    """Base of the objects a kernel may carry: tensors, instructions, and the user's own parameter classes.

    A class without an `__init__` gets the one that the language guide describes, with or without `@dataclass`: its
    annotated fields in order, by position or keyword, with the defaults of the class, else None; then
    `__post_init__`. A plain attribute of the class (`rows = 4`) is a field too, after the annotated ones. Raises
    InvalidArgument for more values than fields.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotated = cls.__dict__.get(_FIELDS, {})
        if cls.__module__.partition(".")[0] != "simulate":
            # A field without a value is None, with `@dataclass` as without; the simulator's own say what they need.
            for name, said in annotated.items():
                if not hasattr(cls, name) and not any(word in str(said) for word in _NO_FIELD):
                    setattr(cls, name, None)
        plain = {n: Any for n, value in vars(cls).items() if n not in annotated and _is_field(n, value)}
        if plain:
            cls.__annotations__ = {**annotated, **plain}

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = list(
            dict.fromkeys(n for c in reversed(type(self).__mro__) for n in c.__dict__.get(_FIELDS, ()))
        )
        if len(values) > len(fields):
            raise InvalidArgument(
                "NKW-OBJECT",
                f"{type(self).__name__} has the fields {fields}; {len(values)} values were given",
            )
        given = {**dict(zip(fields, values)), **named}
        for name in dict.fromkeys([*fields, *given]):
            setattr(self, name, given[name] if name in given else getattr(type(self), name, None))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Called when all fields are set; does nothing unless a class defines it."""


def _is_field(name: str, value: object) -> bool:
    """Whether a class attribute is the default of a field, and no method, property or private name."""
    shared = isinstance(value, (list, dict, set))  # which a dataclass refuses as a default
    return not (name.startswith("_") or callable(value) or hasattr(value, "__get__") or shared)
