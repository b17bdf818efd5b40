"""Base class of all objects of the language, and the counter of reads of tensor elements by Python."""

from __future__ import annotations

from typing import Any

from nkw.errors import InvalidArgument

_FIELDS = "__annotations__"
_NO_FIELD = ("ClassVar", "InitVar", "KW_ONLY")


class ValueReads:
    """Counter of reads of tensor elements by a kernel's Python; a kernel that reads any may depend on data.

    Such a launch cannot be replayed. The simulator reads elements through `uncounted_array` and `uncounted_float32`,
    which do not count.
    """

    count = 0


VALUE_READS = ValueReads()


class NKIObject:
    """Base of the objects that a kernel may carry: tensors, instructions, and the user's own parameter classes.

    A class without an `__init__` gets the constructor that the language guide describes, with or without `@dataclass`.
    It takes the annotated fields in order, by position or keyword, and then calls `__post_init__`. A missing argument
    gets the default of the class, else None. A plain attribute of the class (`rows = 4`) is a field too, after the
    annotated ones.

    Raises:
        InvalidArgument: The constructor gets more positional arguments than there are fields.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotated = cls.__dict__.get(_FIELDS, {})
        if cls.__module__.partition(".")[0] != "simulate":
            # A field without a default is None, with and without `@dataclass`; classes of the simulator set theirs.
            for name, annotation in annotated.items():
                if not hasattr(cls, name) and not any(word in str(annotation) for word in _NO_FIELD):
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
                f"{type(self).__name__} has the fields {fields}, and {len(values)} values were given; "
                "pass at most one for each field",
            )
        arguments = {**dict(zip(fields, values)), **named}
        for name in dict.fromkeys([*fields, *arguments]):
            setattr(self, name, arguments[name] if name in arguments else getattr(type(self), name, None))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Complete an object after its fields are set; does nothing unless a subclass overrides it."""


def _is_field(name: str, value: object) -> bool:
    """Return whether a class attribute counts as the default of a field.

    A method, a property, a name that begins with an underscore, and a list, dict or set do not count.
    """
    shared = isinstance(value, (list, dict, set))  # a dataclass refuses these as defaults
    return not (name.startswith("_") or callable(value) or hasattr(value, "__get__") or shared)
