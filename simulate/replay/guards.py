"""Guards: checks that everything a kernel reads besides its arguments is unchanged.

A kernel is a Python function: its defaults, closure and globals, those of every function it calls, and the classes of
its objects decide its instructions. `Guards` records them; a launch is replayed only while they are unchanged. A
value that may change without a guard noticing ("unseen"), or a function whose result differs from call to call,
prevents replay: `NotFixed` is raised. Code of trusted packages, which are the simulator and packages whose functions
depend on their arguments only, has no guards.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import operator
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from simulate.memory import NKIObject
from simulate.replay.key import NotFixed, is_constant

_ABSENT = object()
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), range, type(...), type(NotImplemented))
_FIXED = (
    np.dtype,
    np.generic,
    np.ufunc,
    types.CodeType,
    type(np.sum),
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    operator.itemgetter,
    operator.attrgetter,
    operator.methodcaller,
    re.Pattern,
)
_TRUSTED = frozenset(
    "simulate nkw nki neuronxcc numpy ml_dtypes _collections abc bisect builtins cmath collections contextlib copy "
    "dataclasses enum fractions functools heapq itertools math numbers operator re reprlib string types typing".split()
)
"""Packages without guards: the simulator, and packages whose functions depend on their arguments only."""
_IMPURE = frozenset(
    "open input print breakpoint eval exec compile globals locals vars dir id __import__".split()
)
"""Built-in functions that have side effects or read state that no name in the code refers to."""
_FUNCTION_PARTS = operator.attrgetter("__code__", "__defaults__")
"""Attributes of every function that are compared by identity."""
_KEYWORD_DEFAULTS = operator.attrgetter("__kwdefaults__")
"""Attribute that is compared for functions with keyword-only parameters; others ignore it."""
_DYNAMIC_LOOKUPS = frozenset(("getattr", "hasattr", "__dict__"))
"""Names by which code may reach any attribute of a module."""
_IGNORED_ATTRIBUTES = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __dataclass_fields__ __dataclass_params__ "
    "__match_args__ __orig_bases__ __parameters__ __abstractmethods__ _abc_impl __static_attributes__".split()
)
"""Attributes of a class that do not affect its behaviour."""
_NAME_SHIFTS = {
    dis.opmap["LOAD_GLOBAL"]: int(sys.version_info >= (3, 11)),
    dis.opmap["LOAD_NAME"]: 0,
    dis.opmap["IMPORT_NAME"]: 0,
}
"""Opcodes whose argument is an index in `co_names`, and by how many bits it is shifted."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: unlike the classes of C code, it can be changed


class Guards:
    """Guards of one kernel, with the values recorded before its launch."""

    def __init__(self, kernel: Callable[..., Any], classes: Iterable[Any] = ()) -> None:
        """Record everything that a kernel reads besides its arguments.

        Args:
            kernel: The kernel, as the launch request has it.
            classes: The classes of the objects among the arguments.

        Raises:
            NotFixed: The kernel reads a value that may change without a guard noticing.
        """
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._functions: list[types.FunctionType] = []
        self._function_parts: list[Any] = []
        self._keyword_functions: list[types.FunctionType] = []
        self._keyword_defaults: list[Any] = []
        self._cells: list[types.CellType] = []
        self._contents: list[Any] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._containers: list[Collection[Any]] = []
        self._elements: list[Any] = []
        self._seen: dict[Any, Any] = {}
        self._random_before = _read_random_states()
        self._pending: list[tuple[Any, str, frozenset[str]]] = []
        self._queue((kernel,), "the kernel", frozenset())
        self._queue(classes, "an argument", frozenset())
        while self._pending:
            self._guard_value(*self._pending.pop())
        self._sizes = list(map(len, self._containers))
        self._bound: list[tuple[Callable[[Mapping[str, Any]], Any], Mapping[str, Any]]] = []
        self._unbound: list[tuple[Callable[[Iterable[str]], bool], list[str]]] = []
        self._recorded: list[Any] = []
        for namespace, bindings in self._names.values():
            bound = [name for name in bindings if bindings[name] is not _ABSENT]
            if bound:
                names = [*bound, bound[0]]  # an itemgetter of one name returns no tuple
                self._bound.append((operator.itemgetter(*names), namespace))
                self._recorded += map(bindings.get, names)
            if len(bound) < len(bindings):
                self._unbound.append((namespace.keys().isdisjoint, [*bindings.keys() - bound]))
        self._recorded += chain(self._function_parts, self._keyword_defaults, self._contents, self._elements)

    def unchanged(self) -> bool:
        """Return whether guarded names are bound to the same objects, and guarded containers have the same elements.

        One chain of C iterators reads everything that is guarded, because this runs before every replay.
        """
        try:
            bindings = [values_of(namespace) for values_of, namespace in self._bound]
        except KeyError:  # a name was deleted
            return False
        current = chain(
            bindings,
            map(_FUNCTION_PARTS, self._functions),
            (map(_KEYWORD_DEFAULTS, self._keyword_functions), map(_read_cell, self._cells)),
            self._containers,
        )
        return (
            all(are_absent(names) for are_absent, names in self._unbound)
            and not any(self._empty)
            and list(map(len, self._containers)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(current), self._recorded))
        )

    def find_side_effect(self) -> str | None:
        """Return the reason why the launch that just ran may not be replayed, or None if it may.

        The kernel may have changed what it depends on, or drawn numbers from a global random generator.
        """
        if not self.unchanged():
            return "the kernel changes what it depends on"
        if self._random_before != _read_random_states():
            return "random numbers were drawn while the kernel ran"
        return None

    def _guard_value(self, value: Any, description: str, names: frozenset[str]) -> None:
        """Guard a value and queue the values that it refers to; a value that was guarded before is skipped.

        Args:
            value: The value, which code of the kernel reaches.
            description: How messages describe it, such as "the global x".
            names: The attributes that the code may read, if the value is a module.

        Raises:
            NotFixed: The value may change without a guard noticing.
        """
        cls = type(value)
        if cls in _CONSTANTS or isinstance(value, _FIXED):
            return
        key = id(value), names if cls is types.ModuleType else None
        if key in self._seen:
            return
        self._seen[key] = value  # kept, so that its id stays its own
        if isinstance(value, types.FunctionType):
            self._guard_function(value)
        elif isinstance(value, types.ModuleType):
            self._guard_module(value, names)
        elif isinstance(value, type):
            self._guard_class(value, description, names)
        elif cls in (list, set):
            elements = tuple(value)
            self._guard_elements(value, elements)
            self._queue(elements, description, names)
        elif cls in (tuple, frozenset) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            self._queue(value, description, names)
        elif cls is dict:
            self._guard_mapping(value, description, names)
        else:
            components = _list_components(value, cls)
            if components is None:
                raise NotFixed(f"{description} is a {cls.__name__}, which may change unseen")
            self._queue(components, description, names)

    def _guard_elements(self, container: Collection[Any], elements: Iterable[Any]) -> None:
        """Record that a container has these elements in this order, as identical objects."""
        self._containers.append(container)
        self._elements += elements

    def _queue(self, values: Iterable[Any], description: str, names: frozenset[str]) -> None:
        """Append values to the list of those that `__init__` has still to guard.

        Args:
            values: The values, which code of the kernel reaches.
            description: How messages describe each value, such as "the global x".
            names: The attributes that the code may read of a module among the values.
        """
        self._pending += ((value, description, names) for value in values)

    def _guard_mapping(self, mapping: Mapping[Any, Any], description: str, names: frozenset[str]) -> None:
        """Record the keys and values of a mapping, and queue them to be guarded; an empty mapping must stay empty.

        Args:
            mapping: The mapping.
            description: How messages describe it, such as "the global x".
            names: The attributes that the code may read of a module among the values.
        """
        elements = dict(mapping)
        if not elements:
            self._empty.append(mapping)
            return
        self._guard_elements(mapping, elements)
        self._guard_elements(mapping.values(), elements.values())
        self._queue((element for pair in elements.items() for element in pair), description, names)

    def _guard_function(self, function: types.FunctionType) -> None:
        """Guard a function's code, defaults, attributes, closure and loaded globals; skips trusted packages.

        Raises:
            NotFixed: The function calls an impure built-in, or imports a module that is not trusted.
        """
        module = function.__globals__.get("__name__")
        if _is_trusted(module):
            if module in ("contextlib", "functools"):  # a decorator around a function of another package
                self._guard_closure(function, frozenset())
            return
        loaded, used, imported = _collect_names(function.__code__)
        self._functions.append(function)
        self._function_parts += _FUNCTION_PARTS(function)
        if function.__code__.co_kwonlyargcount:
            self._keyword_functions.append(function)
            self._keyword_defaults.append(function.__kwdefaults__)
        description = f"a default of {function.__name__}"
        self._queue((function.__defaults__, function.__kwdefaults__), description, used)
        self._guard_mapping(vars(function), f"an attribute of {function.__name__}", used)
        self._guard_closure(function, used)
        for name in loaded:
            value = self._guard_name(function.__globals__, name)
            if value is not _ABSENT:
                self._queue((value,), f"the global {name}", used)
            elif name in _IMPURE:
                raise NotFixed(f"{function.__name__} calls {name}")
        for name in imported:
            if not _is_trusted(name):
                raise NotFixed(f"{function.__name__} imports {name or 'a module'} while it runs")

    def _guard_closure(self, function: types.FunctionType, names: frozenset[str]) -> None:
        """Record the variables of a function's closure, and queue their values to be guarded.

        Args:
            function: The function.
            names: The attributes that the code may read of a module among the values.
        """
        for cell in function.__closure__ or ():
            content = _read_cell(cell)
            self._cells.append(cell)
            self._contents.append(content)
            if content is not _ABSENT:
                self._queue((content,), f"the closure of {function.__name__}", names)

    def _guard_name(self, namespace: Mapping[str, Any], name: str) -> Any:
        """Record the object to which a namespace binds a name, and return the object, `_ABSENT` if unbound."""
        bindings = self._names.setdefault(id(namespace), (namespace, {}))[1]
        return bindings.setdefault(name, namespace.get(name, _ABSENT))

    def _guard_module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Record the attributes in `names` that a module has, and queue their values; none for a trusted module.

        Code that may read any attribute, as with `getattr`, reaches all public attributes.

        Raises:
            NotFixed: The module is one of Python's that is not trusted, such as `time`.
        """
        if _is_trusted(module.__name__):
            return
        if module.__name__.partition(".")[0] in sys.stdlib_module_names:
            raise NotFixed(f"the module {module.__name__} may give something else at every call")
        namespace = vars(module)
        reached = (
            [name for name in namespace if not name.startswith("__")] if names & _DYNAMIC_LOOKUPS else names
        )
        for name in reached:
            if name in namespace:
                self._queue((self._guard_name(namespace, name),), f"{module.__name__}.{name}", names)

    def _guard_class(self, cls: type, description: str, names: frozenset[str]) -> None:
        """Record the attributes of a class and its bases, and queue their values; skips trusted packages."""
        for base in cls.__mro__:
            is_trusted = _is_trusted(base.__module__) and base.__module__ != "builtins"
            if is_trusted or not base.__flags__ & _HEAP_TYPE:
                continue
            attributes = vars(base)
            self._guard_elements(attributes, attributes)
            self._guard_elements(attributes.values(), attributes.values())
            self._queue(
                (attribute for name, attribute in attributes.items() if name not in _IGNORED_ATTRIBUTES),
                base.__name__,
                names,
            )


def _list_components(value: Any, cls: type) -> tuple[Any, ...] | None:
    """Return the objects that an immutable object refers to and that need guards; None if the object may change unseen.

    Args:
        value: The object.
        cls: Its class.
    """
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        fixed = owner is None or isinstance(owner, type)
        return () if fixed or (isinstance(owner, types.ModuleType) and _is_trusted(owner.__name__)) else None
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords, vars(value)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if hasattr(value, "__wrapped__") and cls.__module__ == "functools":
        return (value.__wrapped__,)  # of lru_cache
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if _is_trusted(cls.__module__):
        if hasattr(value, "func"):
            return (vars(value),)  # a jitted kernel, or one with a schedule
        if isinstance(value, NKIObject):
            return () if is_constant(cls) else None
        root = cls.__module__.partition(".")[0]
        return (
            () if root in ("simulate", "dataclasses", "enum", "typing") or hasattr(cls, "__get__") else None
        )
    if isinstance(value, (Enum, NKIObject)) or dataclasses.is_dataclass(value):
        return (vars(value), cls) if hasattr(value, "__dict__") else None
    return None


def _is_trusted(name: Any) -> bool:
    """Return whether a name is that of a trusted package or of a module in it; False for anything but a string."""
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED


def _read_cell(cell: types.CellType) -> Any:
    """Return the contents of a closure's cell, or `_ABSENT` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet, or it was deleted
        return _ABSENT


def _read_random_states() -> tuple[Any, ...]:
    """Return the states of the global random generators of Python and numpy."""
    import random

    name, keys, *counters = np.random.get_state()  # noqa: NPY002  the global generator
    return random.getstate(), name, bytes(np.asarray(keys)), *counters


@lru_cache(maxsize=4096)
def _collect_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the names that code and its nested functions load as globals, may read as attributes, and import.

    The second set contains every name in the code. A relative import has the name "".
    """
    names: defaultdict[int, set[str]] = defaultdict(set)
    used: set[str] = set()
    codes = [code]
    for nested_code in codes:
        codes += (constant for constant in nested_code.co_consts if isinstance(constant, types.CodeType))
        used |= {*nested_code.co_names}
        argument = 0
        # Faster than dis.get_instructions, which took a third of the time to the first token.
        for opcode, low_byte in zip(nested_code.co_code[::2], nested_code.co_code[1::2]):
            argument = argument << 8 | low_byte
            if opcode in _NAME_SHIFTS:
                names[opcode].add(nested_code.co_names[argument >> _NAME_SHIFTS[opcode]])
            argument = argument if opcode == dis.EXTENDED_ARG else 0
    imported = names.pop(dis.opmap["IMPORT_NAME"], set())
    return frozenset().union(*names.values()), frozenset(used), frozenset(imported)
