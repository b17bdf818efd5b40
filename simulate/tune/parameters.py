"""What a kernel declares to be tuned: parameters with their domains, and the bucket of a launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from nkw.errors import InvalidArgument

DECLARATION = "PARAMETERS"
"""The name in the kernel's file of a tuple of rows (name, default, domain)."""
ARGUMENT = "tuning"
"""The argument of a kernel that takes the values of its parameters."""

Value = bool | int | float | str
Candidate = Mapping[str, Value]
"""One value for each parameter of a kernel, by name."""


@dataclass(frozen=True)
class Parameter:
    """What changes the time of a kernel and not its results; `default` is one of the values of its domain."""

    name: str
    default: Value
    domain: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Whether the domain consists of ascending numbers, so that neighbours are alike."""
        numbers = [
            each for each in self.domain if isinstance(each, (int, float)) and not isinstance(each, bool)
        ]
        return len(numbers) == len(self.domain) and numbers == sorted(numbers)


@dataclass(frozen=True)
class Tunable:
    """A kernel with its parameters; `bucket` names the bucket of a launch and may be absent."""

    name: str
    file: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    bucket: Callable[..., str] | None

    @property
    def default(self) -> Candidate:
        """The default of every parameter."""
        return {each.name: each.default for each in self.parameters}

    def takes(self, candidate: Candidate) -> bool:
        """Whether the candidate has a value of the domain for each parameter, and no other."""
        domains = {each.name: each.domain for each in self.parameters}
        return candidate.keys() == domains.keys() and all(
            candidate[name] in domains[name] for name in domains
        )

    @property
    def candidates(self) -> int:
        """How many candidates there are."""
        return prod(len(each.domain) for each in self.parameters)


def tunable(function: Callable[..., Any]) -> Tunable:
    """The declaration of a kernel, a plain function. Raises InvalidArgument where it has none that can be used."""
    name = getattr(function, "__name__", "kernel")
    beside = getattr(function, "__globals__", {})
    rows = beside.get(DECLARATION)
    if not isinstance(rows, tuple) or not rows:
        raise _refused(
            f"the file of {name} declares no parameters; it needs a tuple {DECLARATION} of rows (name, default, domain)"
            f"{_sweep_of_arguments(function)}"
        )
    if ARGUMENT not in inspect.signature(function).parameters:
        raise _refused(f"{name} has no argument `{ARGUMENT}`, a dict with the values of its parameters")
    parameters = tuple(_parameter(name, row) for row in rows)
    if len({each.name for each in parameters}) < len(parameters):
        raise _refused(f"{DECLARATION} of {name} has two rows of one name")
    file = inspect.getsourcefile(function) or ""
    return Tunable(name, file, function, parameters, beside.get(f"{name}_bucket"))


def _sweep_of_arguments(function: Callable[..., Any]) -> str:
    """Return how to time the sizes that a kernel takes as arguments, such as NB=512; empty where it takes none."""
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if isinstance(default, int) and not isinstance(default, bool) and default > 1:
            sizes = ",".join(str(size) for size in (default // 4, default // 2, default) if size)
            return f"; its argument {name}={default} is timed by `nkw time --sweep {name}={sizes}` with {name}={name}"
    return ""


def _parameter(kernel: str, row: Any) -> Parameter:
    match row:
        case (str(name), default, tuple(domain)) if (
            all(isinstance(each, (bool, int, float, str)) for each in domain)
            and len(set(domain)) == len(domain)
            and default in domain
        ):
            return Parameter(name, default, domain)
    raise _refused(
        f"the row {row!r:.80} in {DECLARATION} of {kernel} is not (name, default, domain), where the domain is a "
        "tuple of different numbers or strings, the default among them"
    )


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument("NKW-TUNE-PARAMETERS", why)
