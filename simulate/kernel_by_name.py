"""Launches of kernels that words of a command line name, with arguments made from dtypes and shapes.

A kernel by name is FILE.py:NAME or MODULE:NAME. An argument is a tensor such as bf16[128,1024], a Python literal, or
`group` for the replica group of all ranks; NAME= before it makes it a keyword argument:

nki_kernels/rmsnorm.py:rmsnorm bf16[128,1024] bf16[1,1024] 1e-5
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import LONGEST_PATH, InvalidArgument, NkwError, NoVerdict, shown
from nkw.files import MOST_SOURCE_BYTES, is_file, list_imported_files, read_text
from nkw.suggestions import did_you_mean
from simulate.hardware import Hardware
from simulate.isa.book import CallError
from simulate.isa.replica_group import ReplicaGroup
from simulate.level import Level
from simulate.memory.storage import Storage
from simulate.run.environment import read_core_count, read_rank_count
from simulate.run.exits import FailedImport, convert_import_errors
from simulate.run.kernel_faults import describe_exception, has_entered_kernel
from simulate.run.launch import ArgumentsOfRanks, Launch, LaunchRequest, unwrap_kernel
from simulate.run.location import blame_traceback
from simulate.run.machine import Mode, NeuronCore
from simulate.run.observers import Observer
from simulate.run.stream import Stream
from simulate.world import launch

DTYPES = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3": ml_dtypes.float8_e4m3,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
    "i32": np.int32,
    "u32": np.uint32,
    "i16": np.int16,
    "u16": np.uint16,
    "i8": np.int8,
    "u8": np.uint8,
}
"""Dtypes of arguments, by their short names."""

_LONG_NAMES = {
    **{np.dtype(dtype).name: dtype for dtype in DTYPES.values()},
    "fp32": np.float32,
    "fp16": np.float16,
    "float": np.float32,
    "half": np.float16,
    "fp8e4m3": ml_dtypes.float8_e4m3,
    "fp8e5m2": ml_dtypes.float8_e5m2,
}
"""The same dtypes by the names of NumPy, and by names that other tools use."""


def find_dtype(name: str) -> Any:
    """Return the NumPy or ml_dtypes dtype of a name such as `bf16` or `float32`, or None for an unknown name."""
    return DTYPES.get(name, _LONG_NAMES.get(name))


_GROUP = "group"
_DECORATORS = frozenset({"jit", "trace", "benchmark", "baremetal", "profile"})
_NAMED = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
_TENSOR = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[^\]]*)\]")
_KEYWORD = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)


def list_read_files(options: argparse.Namespace) -> list[str]:
    """Return the files that a command may read: its script or kernel's file, its arguments, and imported modules."""
    script = options.script.rpartition(":")[0] if names_a_kernel(options.script) else options.script
    return [script, *options.arguments, *list_imported_files()]


def names_a_kernel(words: str) -> bool:
    """Return whether text has the form FILE.py:KERNEL or MODULE:KERNEL and is not the path of an existing file."""
    return _NAMED.fullmatch(words) is not None and not is_file(words)


class InstructionCount(Observer):
    """Observer that counts the instructions of the running launch, for a report of progress."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []

    @property
    def instructions(self) -> int:
        """Number of instructions that all cores of the launch have issued so far."""
        return sum(map(len, self._streams))

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """Count the instructions of this launch from now on, instead of those of an earlier one."""
        self._streams = [core.stream for core in cores]


def explain_no_launch(words: str) -> str:
    """Return the sentence that a script launched no kernel, and which kernels its file defines.

    Args:
        words: The path of the script; a file that cannot be read or parsed counts as one without kernels.
    """
    try:
        tree = ast.parse(read_text(words, MOST_SOURCE_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return "no kernel was launched"
    named = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    ]
    if not named:
        return "no kernel was launched"
    other_kernels = f" and {', '.join(named[1:])}" if named[1:] else ""
    return (
        f"no kernel was launched; {words} defines {named[0]}{other_kernels}: call it there, or give "
        f"{words}:{named[0]} and its arguments"
    )


def _is_jit(decorator: ast.expr) -> bool:
    """Return whether a decorator's last name is one that makes kernels, such as `nki.jit` or `nki.benchmark(…)`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2] in _DECORATORS


def launch_by_name(
    words: str, arguments: Sequence[str], mode: Mode = Mode.dry, trips: Sequence[int] = ()
) -> Launch:
    """Launch a kernel by name on the chip and the ranks of the environment, and return the launch.

    A dry launch, the default, computes no values. Otherwise float tensors are normally distributed and integer
    tensors count 0, 1, 2 …, so that as indices they name different rows. The seed is the argument's position, with
    the rank beyond rank 0. While the kernel is imported and runs, its folder is first on Python's path.

    Args:
        words: FILE.py:NAME or MODULE:NAME.
        arguments: Its arguments as words: tensors such as f32[128,512], literals, `group`, also as NAME=ARGUMENT.
        mode: How the kernel is executed.
        trips: Trip counts of device loops in a dry launch.

    Raises:
        InvalidArgument: The file, module or kernel does not exist, a word is no argument, or the kernel does not take
            these arguments.
        NoVerdict: The kernel's own code fails or ends the program, or memory does not suffice.
        NkwError: The launch raised it, such as RuleViolation.
    """
    with importing_from(find_import_folder(words)):
        return launch_named(unwrap_kernel(load_callable(words)), words, arguments, mode, trips)


def find_import_folder(words: str) -> Path:
    """Return the folder from which a script or kernel imports first: its file's; for a module, the working folder."""
    path = words.rpartition(":")[0] if names_a_kernel(words) else words
    return Path(path).resolve().parent if path.endswith(".py") or path == words else Path.cwd()


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Put `folder` first on Python's path inside a `with` block, and restore the path after it."""
    path, before = sys.path, list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path = path
        sys.path[:] = before


def launch_named(
    kernel: Callable[..., Any],
    words: str,
    arguments: Sequence[str],
    mode: Mode = Mode.dry,
    trips: Sequence[int] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Launch:
    """Launch the plain function `kernel` with arguments given as words, on the ranks of the environment.

    Args:
        kernel: The function.
        words: Its name, for messages.
        arguments: Arguments as words, see `launch_by_name`, filled as there.
        mode: How the kernel is executed.
        trips: Trip counts of device loops in a dry launch.
        keywords: Further keyword arguments as objects, equal on all ranks.

    Raises:
        NkwError: As for `launch_by_name`.
    """
    ranks = read_rank_count()
    arguments_of_ranks = [build_call(arguments, mode, rank, ranks) for rank in range(ranks)]
    for _, named in arguments_of_ranks:
        named.update(keywords or {})
    return launch_on(kernel, words, arguments_of_ranks, mode, trips)


def launch_on(
    kernel: Callable[..., Any],
    words: str,
    arguments_of_ranks: ArgumentsOfRanks,
    mode: Mode = Mode.dry,
    trips: Sequence[int] = (),
    chip: Hardware | None = None,
    cores: int | None = None,
) -> Launch:
    """Launch the plain function `kernel` with the (args, kwargs) of each rank; updates arrays that it writes.

    Args:
        kernel: The function.
        words: Its name, for messages.
        arguments_of_ranks: One (args, kwargs) per rank.
        mode: How the kernel is executed.
        trips: Trip counts of device loops in a dry launch.
        chip: The chip; None is that of the environment.
        cores: Physical cores of each rank; None is the number of the environment.

    Raises:
        InvalidArgument: The kernel does not take these arguments, or one of its assertions fails.
        NoVerdict: The kernel's own code fails or ends the program, or memory does not suffice.
        NkwError: The launch raised it, such as RuleViolation.
    """
    try:
        level = Level.resolve()
        if cores is None:
            cores = read_core_count(getattr(kernel, "__name__", "kernel"), None, level)
        return launch(
            kernel, arguments_of_ranks, chip, cores, mode, has_grid=cores > 1, level=level, trips=trips
        )
    except MemoryError as error:
        raise NoVerdict(
            "NKW-KERNEL-MEMORY",
            f"{words} with these arguments needs more memory than this machine or --memory-limit allows",
        ) from error
    except CallError as error:
        if error.code != "NKW-KERNEL-CALL":
            raise
        raise _build_call_error(words, error.message) from error
    except NkwError:
        raise
    except AssertionError as error:
        refused = _build_call_error(words, str(error) or "an assertion of the kernel failed")
        refused.__traceback__ = error.__traceback__
        blame_traceback(refused)
        raise refused from error
    except Exception as error:
        if has_entered_kernel(error):
            raise describe_exception(error) from None
        raise _build_call_error(words, str(error)) from error


def _build_call_error(words: str, why: str) -> InvalidArgument:
    """Return the error that a kernel does not take the given arguments, and why."""
    return InvalidArgument("NKW-KERNEL-CALL", f"{words} does not take these arguments: {why}")


def substitute_size(arguments: Sequence[str], name: str, size: int) -> list[str]:
    """Return arguments as words, with `size` in the place of `name` where it is a dim of a tensor or a whole argument.

    Raises InvalidArgument if no argument has the name.
    """
    new_arguments = [_substitute_size(text, name, size) for text in arguments]
    if new_arguments == list(arguments):
        raise InvalidArgument(
            "NKW-SWEEP",
            f"the size {name:.40} stands in no argument; name it in a shape, such as f32[{name:.40},512]",
        )
    return new_arguments


def _substitute_size(text: str, name: str, size: int) -> str:
    """Return one argument with `size` in the place of `name`; unchanged if it does not have the name."""
    keyword = _KEYWORD.fullmatch(text)
    lead, value = (f"{keyword['name']}=", keyword["value"]) if keyword else ("", text)
    tensor = _TENSOR.fullmatch(value)
    if tensor is None:
        return f"{lead}{size}" if value == name else text
    sizes = (str(size) if dim.strip() == name else dim for dim in tensor["shape"].split(","))
    return f"{lead}{tensor['dtype']}[{','.join(sizes)}]"


def load_callable(words: str) -> Callable[..., Any]:
    """Import the file or module of FILE.py:NAME or MODULE:NAME and return its function or kernel.

    Raises:
        InvalidArgument: The text is not of this form, or the file, module or function does not exist.
        NoVerdict: The file's code fails or ends the program while it is imported.
    """
    match = _NAMED.fullmatch(words)
    if match is None:
        raise InvalidArgument(
            "NKW-KERNEL-NAME",
            f"{words:.60} is neither FILE.py:NAME nor MODULE:NAME; name a kernel in one of these forms",
        )
    source, name = match["place"], match["name"]
    if source.endswith(".py"):
        if not is_file(source):
            raise InvalidArgument("NKW-KERNEL-NAME", f"{shown(source, LONGEST_PATH)} is not a file")
        with convert_import_errors(source):
            function = runpy.run_path(source, run_name=Path(source).stem).get(name)
    else:
        try:
            with convert_import_errors(source):
                function = getattr(importlib.import_module(source), name, None)
        except FailedImport as failed:
            if not isinstance(failed.__cause__, ImportError):
                raise
            error = failed.__cause__
            reason = shown(str(error), LONGEST_PATH)
            raise InvalidArgument(
                "NKW-KERNEL-NAME", f"{shown(source, LONGEST_PATH)} is not a module: {reason}"
            ) from None
    if not callable(function):
        raise InvalidArgument(
            "NKW-KERNEL-NAME", f"{source} has no kernel {name}; give the name of a function that it defines"
        )
    return function  # type: ignore[no-any-return]


def _parse_argument(text: str) -> Any:
    """Return the argument of a word: a literal, or for a tensor an array that repeats one zero (strides 0).

    Raises InvalidArgument for other words, unknown dtypes, sizes below 1, and arrays beyond any memory.
    """
    tensor = _TENSOR.fullmatch(text)
    if tensor is None:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise InvalidArgument(
                "NKW-KERNEL-ARGUMENT",
                f"argument {text!r:.60} is neither a tensor such as f32[128,512] nor a Python literal nor `group`",
            ) from None
    dtype = find_dtype(tensor["dtype"])
    if dtype is None:
        meant = did_you_mean(tensor["dtype"], [*DTYPES, *_LONG_NAMES]) or ";"
        raise InvalidArgument(
            "NKW-KERNEL-ARGUMENT",
            f"dtype {tensor['dtype']} of {text:.60} is not known{meant} known are {', '.join(DTYPES)}, and the names "
            "of NumPy such as float32",
        )
    try:
        shape = tuple(int(size) for size in tensor["shape"].split(","))
    except ValueError:
        shape = (0,)
    if min(shape) < 1:
        raise InvalidArgument(
            "NKW-KERNEL-ARGUMENT",
            f"the shape of {text:.60} is not a list of positive numbers; give sizes such as f32[128,512]",
        )
    try:  # one element seen as many; numbers come in where there are any
        return np.broadcast_to(np.zeros((), dtype), shape)
    except ValueError:
        raise InvalidArgument(
            "NKW-KERNEL-ARGUMENT", f"{text:.60} is larger than any memory; give smaller sizes"
        ) from None


def build_call(
    texts: Sequence[str], mode: Mode = Mode.eager, rank: int = 0, ranks: int = 1
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return one rank's (args, kwargs) from arguments as words, with tensors filled as `launch_by_name` describes.

    Args:
        texts: The words, some as NAME=ARGUMENT.
        mode: The mode of the launch; in mode dry, tensors have a shape and no values.
        rank: The rank, which seeds the random values.
        ranks: The number of ranks, for `group`.

    Raises:
        InvalidArgument: A word is no argument, or a tensor does not fit into memory.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        keyword = _KEYWORD.fullmatch(text)
        value = text if keyword is None else keyword["value"]
        position = len(args) + len(kwargs)
        argument = (
            ReplicaGroup([range(ranks)]) if value == _GROUP else _fill_argument(value, (position, rank), mode)
        )
        if keyword is None:
            args.append(argument)
        else:
            kwargs[keyword["name"]] = argument
    return tuple(args), kwargs


def _fill_argument(text: str, seed: tuple[int, int], mode: Mode) -> Any:
    """Return the argument of a word, and unless the mode is dry, with values: counting integers or normal floats.

    Args:
        text: The word.
        seed: The argument's position and the rank.
        mode: The mode of the launch.

    Raises:
        InvalidArgument: The word is no argument, or the tensor does not fit into memory.
    """
    argument = _parse_argument(text)
    if mode is Mode.dry or not isinstance(argument, np.ndarray):
        return argument
    try:
        if argument.dtype.kind in "iu":
            return np.arange(argument.size).reshape(argument.shape).astype(argument.dtype)
        values = np.empty(argument.shape)
        values[...] = np.random.default_rng(seed if seed[1] else seed[0]).standard_normal(argument.shape)
        return values.astype(argument.dtype)
    except MemoryError:
        raise InvalidArgument(
            "NKW-KERNEL-ARGUMENT", f"{text:.60} does not fit into this machine's memory; give smaller sizes"
        ) from None
