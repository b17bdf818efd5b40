"""Declarations of tunable kernels: parameters with their domains, and the bucket of a launch.

A kernel's file declares a tuple `PARAMETERS`. A domain is the tuple of values that a parameter can take. A bucket is a
name for launches that share tuned values, such as those of similar sizes: function NAME_bucket of the kernel's file
returns it for the arguments of kernel NAME.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from nkw.errors import InvalidArgument

DECLARATION = "PARAMETERS"
"""Name in the kernel's file of the tuple of rows (name, default, domain)."""
ARGUMENT = "tuning"
"""Argument through which a kernel receives its parameters."""

Value = bool | int | float | str
Candidate = Mapping[str, Value]
"""A choice from the domain of every parameter of a kernel, by name."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that changes the time of a kernel but not its outputs; `default` is a member of its domain."""

    name: str
    default: Value
    domain: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Whether the domain consists of ascending numbers, whose neighbours the search takes as similar."""
        numbers = [
            choice
            for choice in self.domain
            if isinstance(choice, (int, float)) and not isinstance(choice, bool)
        ]
        return len(numbers) == len(self.domain) and numbers == sorted(numbers)


@dataclass(frozen=True)
class Tunable:
    """A kernel with its parameters.

    `file` is the path of its source. `bucket` returns the bucket of a launch from the kernel's arguments; it is None if
    the file has no such function.
    """

    name: str
    file: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    bucket: Callable[..., str] | None

    @property
    def default(self) -> Candidate:
        """Candidate with the default of every parameter."""
        return {parameter.name: parameter.default for parameter in self.parameters}

    def accepts(self, candidate: Candidate) -> bool:
        """Return whether a candidate has exactly the kernel's parameters, each with a value of its domain."""
        domains = {parameter.name: parameter.domain for parameter in self.parameters}
        return candidate.keys() == domains.keys() and all(
            candidate[name] in domains[name] for name in domains
        )

    @property
    def candidates(self) -> int:
        """Number of all possible candidates: the product of the sizes of the domains."""
        return prod(len(parameter.domain) for parameter in self.parameters)


def read_declaration(function: Callable[..., Any]) -> Tunable:
    """Read the parameters of a kernel, and its bucket function, from the globals of its file.

    Args:
        function: The kernel as a plain Python function, without the decorator of NKI.

    Raises:
        InvalidArgument: If the file declares no parameters, if a row is malformed, or if the kernel lacks the
            argument `tuning`.
    """
    name = getattr(function, "__name__", "kernel")
    module_globals = getattr(function, "__globals__", {})
    rows = module_globals.get(DECLARATION)
    if not isinstance(rows, tuple) or not rows:
        raise _make_error(
            f"the file of {name} declares no parameters; it needs a tuple {DECLARATION} of rows (name, default, domain)"
            f"{_suggest_sweep(function)}"
        )
    if ARGUMENT not in inspect.signature(function).parameters:
        raise _make_error(
            f"{name} has no argument `{ARGUMENT}`, a dict of its parameters; add it with a default"
        )
    parameters = tuple(_read_parameter(name, row) for row in rows)
    if len({parameter.name for parameter in parameters}) < len(parameters):
        raise _make_error(f"{DECLARATION} of {name} has two rows with the same name; rename one of them")
    file = inspect.getsourcefile(function) or ""
    return Tunable(name, file, function, parameters, module_globals.get(f"{name}_bucket"))


def _suggest_sweep(function: Callable[..., Any]) -> str:
    """Return a hint to time a kernel by `nkw time --sweep` over the first argument whose default is an int above 1.

    The hint begins with a semicolon, to be appended to a message; empty if there is no such argument.
    """
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if isinstance(default, int) and not isinstance(default, bool) and default > 1:
            sizes = ",".join(str(size) for size in (default // 4, default // 2, default) if size)
            return f"; its argument {name}={default} is timed by `nkw time --sweep {name}={sizes}` with {name}={name}"
    return ""


def _read_parameter(kernel: str, row: Any) -> Parameter:
    """Return the parameter that a row of the declaration describes.

    Raises:
        InvalidArgument: If the row is not (name, default, domain) with a tuple of different values as its domain.
    """
    match row:
        case (str(name), default, tuple(domain)) if (
            all(isinstance(choice, (bool, int, float, str)) for choice in domain)
            and len(set(domain)) == len(domain)
            and default in domain
        ):
            return Parameter(name, default, domain)
    raise _make_error(
        f"the row {row!r:.80} in {DECLARATION} of {kernel} is not (name, default, domain), where the domain is a "
        "tuple of different numbers or strings, the default among them"
    )


def _make_error(reason: str) -> InvalidArgument:
    """Return the error for a wrong declaration; the caller raises it."""
    return InvalidArgument("NKW-TUNE-PARAMETERS", reason)
