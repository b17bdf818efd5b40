"""Errors of the kernel's own Python code, as typed errors with the kernel's line and a suggestion.

The launcher converts NameError, AttributeError, TypeError and IndexError of a kernel with `convert_exception`. A
suggestion is a text that follows Python's message, such as the NKI form of a NumPy name; it is empty if there is
none.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from nkw.errors import NoVerdict
from nkw.suggestions import FUNCTION_HINTS, NAME_HINTS, TILE_HINTS, did_you_mean, format_nki_hint
from simulate.lines import PACKAGES
from simulate.memory import NkiTensor
from simulate.numerics import ACTIVATION_FUNCTIONS, ALU_OPERATORS
from simulate.run.location import blame_traceback, list_kernel_traces
from simulate.run.stream import NkiInstruction

CODE = "NKW-KERNEL-ERROR"
_API = ("simulate.nki.language", "simulate.nki.isa", "simulate.nki.collectives")
_HANDLE = "an instruction writes to dst and returns a handle; use the tile that was passed as dst"
_STATIC = (
    "Python counts with numbers known at compile time, such as x.shape[0]; nl.fori_loop counts to others"
)
_KEYWORD = re.compile(
    r"(?P<function>[\w.<>]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'.*", re.DOTALL
)
_METHODS_WITH_ONE_TUPLE = ("reshape", "permute")


class KernelError(NoVerdict):
    """Error for an exception that the kernel's Python code raised, or an API function that the kernel called."""

    def __init__(self, message: str) -> None:
        super().__init__(CODE, message)


class KernelNameError(KernelError, NameError):
    """Use of a variable of the kernel that is not defined."""


class KernelAttributeError(KernelError, AttributeError):
    """Use of an attribute that a module, a tile or another object does not have."""


class KernelTypeError(KernelError, TypeError):
    """Call with wrong arguments, or operation on an operand of the wrong type."""


class KernelIndexError(KernelError, IndexError):
    """Index outside of a tuple or a list of the kernel."""


_TYPES: dict[type[Exception], type[KernelError]] = {
    NameError: KernelNameError,
    UnboundLocalError: KernelNameError,
    AttributeError: KernelAttributeError,
    TypeError: KernelTypeError,
    IndexError: KernelIndexError,
}


def convert_exception(error: Exception) -> KernelError | None:
    """Return the typed error for a NameError, AttributeError, TypeError or IndexError of the kernel's code.

    The typed error is also an instance of the exception's type, and has its traceback and the kernel's line. An
    UnboundLocalError counts as a NameError. Returns None for exceptions of other types, and of other subclasses.
    """
    error_type = _TYPES.get(type(error))
    return None if error_type is None else _blame(error_type(_format_message(error)), error)


def describe_exception(error: Exception) -> KernelError:
    """Return the typed error for any exception of the kernel's code; the caller raises it.

    For types without a typed error it is a KernelError whose message names the exception's type.
    """
    return convert_exception(error) or _blame(KernelError(f"{type(error).__name__}: {error}"), error)


def has_entered_kernel(error: BaseException) -> bool:
    """Return whether a traceback has a line of a kernel; without one, Python refused the call of the kernel itself."""
    return bool(list_kernel_traces(error.__traceback__))


def _blame(typed_error: KernelError, error: Exception) -> KernelError:
    """Give the typed error the traceback and the kernel line of an exception, and return the typed error."""
    typed_error.__traceback__ = error.__traceback__
    blame_traceback(typed_error)
    return typed_error


def _format_message(error: Exception) -> str:
    """Return Python's message with a suggestion at its end; an API function that raised it is named before it."""
    text = str(error).partition(". Did you mean")[0]  # of Python 3.13, for keyword arguments
    traces = list_kernel_traces(error.__traceback__)
    if not traces:
        return text
    last = traces[-1]
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno, last.tb_frame.f_globals)
    if isinstance(error, NameError):
        return text + _suggest_variable(text, last.tb_frame, line)
    if isinstance(error, AttributeError):
        suggestion = _suggest_attribute(error, line)
    elif isinstance(error, TypeError):
        suggestion = _suggest_for_type_error(text, last.tb_frame, line)
    else:
        suggestion = _describe_dims(text, last.tb_frame, line)
    return _name_called_function(last) + text + suggestion


def _name_called_function(last: TracebackType) -> str:
    """Return "load: " if nl.load raised the exception itself, an empty string if the kernel's line did.

    Args:
        last: The innermost entry of the traceback that is a kernel line.
    """
    inner = last.tb_next
    if inner is None:
        return ""
    code = inner.tb_frame.f_code
    is_lookup = code.co_name.startswith("__")  # the lookup of a missing name, whose message is complete
    return f"{code.co_name}: " if code.co_filename.startswith(PACKAGES) and not is_lookup else ""


def _suggest_variable(text: str, frame: FrameType, line: str) -> str:
    """Return the suggestion for an undefined variable: the NKI form of a NumPy, Triton or CUDA name, or a similar name.

    Args:
        text: Python's message.
        frame: The frame of the kernel.
        line: The source line.
    """
    quoted = re.search(r"'(\w+)'", text)
    if quoted is None or not text.startswith("name "):
        return ""
    name = quoted[1]
    member = re.search(rf"\b{re.escape(name)}\.(\w+)", line)
    if name in NAME_HINTS and member is not None and name not in ("nl", "nisa", "np", "math"):
        hint = FUNCTION_HINTS.get(member[1]) or _find_api_name(member[1])
        if hint:
            return f"; in NKI, {name}.{member[1]} is {hint}"
    if name in NAME_HINTS:
        return format_nki_hint(NAME_HINTS[name])
    known = {*frame.f_locals, *frame.f_globals, *frame.f_builtins}
    return did_you_mean(name, known) or format_nki_hint(_find_api_name(name))


def _find_api_name(name: str) -> str:
    """Return `nl.X`, `nisa.X` or `ncc.X` for a name X that an API module has, else an empty string."""
    for module in _API:
        if name in getattr(sys.modules.get(module), "__all__", ()):
            return f"{_SHORT[module]}.{name}"
    return ""


_SHORT = dict(zip(_API, ("nl", "nisa", "ncc")))


def _suggest_attribute(error: AttributeError, line: str) -> str:
    """Return the suggestion for an attribute that an object does not have; `line` is the source line."""
    name, owner = error.name, error.obj
    if name is None or owner is None:
        return format_nki_hint(_HANDLE) if " = nisa." in line else ""
    if isinstance(owner, NkiTensor):
        if name in ACTIVATION_FUNCTIONS or name in ALU_OPERATORS:
            return format_nki_hint(f"nl.{name}(tile), or op=nl.{name} in an instruction")
        return format_nki_hint(TILE_HINTS.get(name, "")) or did_you_mean(name, dir(owner), ".")
    if isinstance(owner, NkiInstruction):
        return format_nki_hint(_HANDLE)
    if getattr(owner, "__name__", "").startswith(("nki", "simulate.nki")):
        return ""  # the module's message has the suggestion
    return did_you_mean(name, [attribute for attribute in dir(owner) if not attribute.startswith("_")])


def _suggest_for_type_error(text: str, frame: FrameType, line: str) -> str:
    """Return the suggestion for a TypeError: a call or an operation that Python refuses.

    Args:
        text: Python's message.
        frame: The frame of the kernel.
        line: The source line.
    """
    if (keyword := _KEYWORD.fullmatch(text)) is not None:
        return next(
            (suggest_parameter(text, function) for function in _find_function(keyword["function"], frame)), ""
        )
    one_tuple = re.match(r"NkiTensor\.(\w+)\(\) takes 2 positional arguments", text)
    if one_tuple is not None and one_tuple[1] in _METHODS_WITH_ONE_TUPLE:
        return format_nki_hint(f".{one_tuple[1]}((a, b)) takes one tuple")
    if "object is not callable" in text and (called := re.search(r"\.(shape|size|ndim|dtype)\s*\(", line)):
        index = "[dim]" if called[1] in ("shape", "size") else ""
        return format_nki_hint(f"without parentheses, .{'shape' if index else called[1]}{index}")
    if text == "object of type 'NkiTensor' has no len()":
        return format_nki_hint(".shape[0] is the size of the first dim")
    operand = re.match(r"bad operand type for abs\(\): 'NkiTensor'", text)
    if operand is not None:
        return format_nki_hint("nl.abs(tile)")
    if "'tuple' object does not support item assignment" in text and ".shape" in line:
        return format_nki_hint(
            "shapes do not change; .reshape((rows, columns)) returns a view with another shape"
        )
    if "'NkiTensor' object cannot be interpreted as an integer" in text:
        return format_nki_hint(_STATIC)
    if "object is not subscriptable" in text and ("function" in text or "method" in text):
        return format_nki_hint("call it with parentheses")
    if "'NkiInstruction'" in text:
        return format_nki_hint(_HANDLE)
    return ""


def suggest_parameter(text: str, function: Callable[..., Any]) -> str:
    """Return the suggestion for a keyword argument that a function does not have; an empty string for other messages.

    Args:
        text: Python's message.
        function: The function that was called.
    """
    keyword = _KEYWORD.fullmatch(text)
    return "" if keyword is None else did_you_mean(keyword["name"], _list_parameters(function), suffix="=")


def _list_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, without `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _find_function(qualified: str, frame: FrameType) -> Iterator[Callable[..., Any]]:
    """Yield the function that Python's message names, if the API, the kernel's module or its variables have it.

    Args:
        qualified: The name in the message, such as `load` or `NkiTensor.reshape`.
        frame: The frame of the kernel.
    """
    owner, _, name = qualified.rpartition(".")
    owners: list[Any] = [NkiTensor] if owner == "NkiTensor" else [sys.modules.get(module) for module in _API]
    tables = [
        *(vars(namespace) for namespace in owners if namespace is not None),
        frame.f_globals,
        frame.f_locals,
    ]
    for function in (table.get(name) for table in tables):
        if callable(function) and not isinstance(function, type):
            yield getattr(function, "func", function)
            return


def _describe_dims(text: str, frame: FrameType, line: str) -> str:
    """Return a text with the shape of a tensor whose `.shape` the line indexes beyond its dims, else an empty string.

    Args:
        text: Python's message.
        frame: The frame of the kernel.
        line: The source line, such as `n = x.shape[3]`.
    """
    for name, index in re.findall(r"(\w+)\.shape\[(-?\d+)\]", line):
        tensor = frame.f_locals.get(name)
        if isinstance(tensor, NkiTensor) and not -tensor.ndim <= int(index) < tensor.ndim:
            return f"; {name} has the {tensor.ndim} dims {tensor.shape}"
    return ""
