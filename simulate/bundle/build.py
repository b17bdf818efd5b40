"""Building of a bundle's cases: a kernel is launched, compared with its reference, and its time is predicted.

A case is a kernel on certain arguments, with expected outputs, tolerances and predicted times. `Program` has
what launches with arguments of equal shapes share.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nkw.errors import NkwError
from simulate.bundle.manifest import (
    ARRAY,
    DTYPE,
    LITERAL,
    WEIGHT,
    Argument,
    Case,
    Instructions,
    Line,
    Output,
    Predicted,
    Tolerance,
)
from simulate.bundle.reading import DTYPES, make_error
from simulate.bundle.run import LANGUAGE
from simulate.bundle.sources import Sources, collect_sources, find_module
from simulate.check import collect_findings, fails_a_check, gathered
from simulate.hardware import Hardware
from simulate.kernel_by_name import build_call, launch_on, load_callable
from simulate.level import Level
from simulate.lines import location
from simulate.numerics.dtypes import DType
from simulate.profile import profile
from simulate.run import Launch, Mode
from simulate.run.environment import read_core_count, read_rank_count
from simulate.run.launch import unwrap_kernel
from simulate.run.stream import Stream
from simulate.testing import Mismatch, WeakComparison, compare
from simulate.timing import Reading
from simulate.verification.bound import (
    Reference,
    call_reference,
    compute_truth,
    count_contractions,
    derive_terms,
    longest_chain,
    saturate,
)
from simulate.verification.inputs import Call, convert_results
from simulate.verification.judging import find_reference

MOST_CASE_BYTES = 10_000_000
"""Most bytes of the arrays of a case, so that a bundle of one kernel stays below 10 MB."""
_TILE_ROWS, _TILE_COLUMNS = 128, 512
"""Partitions, and float32 columns of a PSUM bank: the usual tile of kernels."""
_MOST_LINES = 40

Arrays = dict[str, np.ndarray]


def build_case(
    kernel_name: str,
    arguments: Sequence[str],
    name: str,
    sources: Sources,
    reference: Reference | None = None,
) -> tuple[Case, Arrays]:
    """Build the case of a kernel by name on arguments given as text; return it and its arrays by file name.

    The kernel's files are added to `sources`. The arrays are inputs and expected outputs.

    Args:
        kernel_name: FILE.py:NAME or MODULE:NAME.
        arguments: Words of a command line, such as "bf16[128,512]".
        name: Name of the case.
        reference: Function of the exact outputs; by default `<kernel>_reference` of the kernel's module. If
            there is none, outputs have no tolerance.

    Raises:
        InvalidArgument: For several ranks, arrays above 10 MB, arguments that cannot be stored, or outputs
            that the reference contradicts. Errors of the launch pass through.
    """
    if read_rank_count() > 1:
        raise make_error("a bundle holds launches of one rank; leave --ranks and NKW_RANKS out")
    kernel = unwrap_kernel(load_callable(kernel_name))
    return make_case(kernel, kernel_name, Call(*build_call(arguments)), name, sources, reference)


class Program:
    """A kernel with arguments of certain shapes: a launch on copies of its first arguments, and shared properties.

    `outputs` are the arrays of this launch. `written` names for each output the argument that it overwrites,
    or is empty. `predicted` has the times, `findings` the codes that `nkw check` reports. Creating a program
    launches the kernel and adds the kernel's files to `sources`. Chip and physical cores default to those of
    the environment. Without a reference, `<kernel>_reference` of the kernel's module is used.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        kernel_name: str,
        call: Call,
        sources: Sources,
        reference: Reference | None = None,
        chip: Hardware | None = None,
        cores: int | None = None,
    ) -> None:
        self._kernel, self._reference = kernel, reference
        self.name = kernel_name.rpartition(":")[2]
        self.module, file = find_module(kernel, kernel_name)
        self.imports = collect_sources(sources, self.module, file)
        self.cores = read_core_count(kernel.__name__, None, Level.resolve()) if cores is None else cores
        copied = call.copy_arrays()
        with gathered() as seen:
            launch = launch_on(
                kernel, kernel_name, [(copied.args, copied.keywords)], Mode.eager, chip=chip, cores=cores
            )
        self.outputs = convert_results(launch.outputs[0])
        self.written = [_find_written_argument(output, kernel, copied) for output in self.outputs]
        self.predicted = predict(launch, file.parents[self.module.count(".")])
        self.instructions = describe_instructions(launch.streams)
        # Warnings that correct kernels get too do not indicate a fault of the kernel.
        failing = [finding for finding in collect_findings(seen) if fails_a_check(finding, tolerant=False)]
        self.findings = tuple(sorted({finding.code for finding in failing}))
        self._streams, self._chain = launch.streams, longest_chain(launch.streams)
        self._contractions: Sequence[int] | None = None

    def make_case(self, name: str, arguments: tuple[Argument, ...], outputs: tuple[Output, ...]) -> Case:
        """Return a launch of the program as a case with this name, these arguments and these expected outputs."""
        return Case(
            name,
            self.name,
            self.module,
            self._kernel.__name__,
            self.imports,
            self.cores,
            arguments,
            outputs,
            self.predicted,
            self.instructions,
            self.findings,
        )

    def derive_tolerances(
        self, call: Call, outputs: Sequence[np.ndarray], name: str
    ) -> tuple[list[Tolerance | None], str]:
        """Return the tolerance of every output of a launch, derived as `nkw verify` does, and an empty string.

        Without a usable reference, every tolerance is None, and the string is the reason.

        Args:
            call: The arguments before the launch.
            outputs: What the simulator returned.
            name: Name of the case, for messages.

        Raises:
            InvalidArgument: If the reference contradicts an output, or returns another number of arrays.
        """
        try:
            reference = self._reference or find_reference(self._kernel, self._kernel.__name__)
        except NkwError:
            kernel_name = self._kernel.__name__
            return [None] * len(outputs), f"there is no {kernel_name}_reference beside {kernel_name}"
        try:
            if self._contractions is None:
                self._contractions = count_contractions(
                    reference, call.copy_arrays(), call_reference(reference, call.copy_arrays())
                )
            truth = compute_truth(reference, call, self._contractions)
        except Exception as error:  # any error of the user's reference
            return [None] * len(outputs), f"the reference fails: {type(error).__name__}: {error!s:.100}"
        if len(truth.arrays) != len(outputs):
            raise make_error(
                f"{name} returns {len(outputs)} arrays, its reference {len(truth.arrays)}; both must return the same "
                "number: correct the reference"
            )
        tolerances: list[Tolerance | None] = []
        for index, (output, exact) in enumerate(zip(outputs, truth.arrays)):
            terms = derive_terms(output, index, truth, call, self._streams, self._chain)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", WeakComparison)
                    comparison = compare(output, saturate(exact, output), *terms)
            except Mismatch as error:
                raise make_error(
                    f"output {index} of {name} differs from its reference on the simulator: {error}; "
                    "see nkw verify, and correct the kernel or its reference"
                ) from None
            through = np.dtype(terms.through).name
            tolerances.append(
                Tolerance(
                    comparison.bound,
                    comparison.error,
                    terms.magnitude,
                    terms.contraction,
                    terms.roundings,
                    through,
                )
            )
        return tolerances, ""


def make_case(
    kernel: Callable[..., Any],
    kernel_name: str,
    call: Call,
    name: str,
    sources: Sources,
    reference: Reference | None = None,
    chip: Hardware | None = None,
    cores: int | None = None,
    operands: Mapping[int, str] | None = None,
) -> tuple[Case, Arrays]:
    """Build the case of a plain function on the arguments of a call; return it and its arrays by file name.

    The kernel is launched on copies, so that overwritten arrays are stored as they were before the launch.
    The kernel's files are added to `sources`. Chip and physical cores default to those of the environment.

    Args:
        operands: Names of operands of weights by `id` of their arrays; these arrays are not stored.

    Raises:
        InvalidArgument: As `build_case`.
    """
    arguments, inputs = _make_arguments(kernel, call, name, operands or {})
    _check_size(inputs, name)
    program = Program(kernel, kernel_name, call, sources, reference, chip, cores)
    outputs, expected = _make_outputs(program, call, name)
    arrays = inputs | expected
    _check_size(arrays, name)
    return program.make_case(name, arguments, outputs), arrays


def _check_size(arrays: Arrays, name: str) -> None:
    """Raise InvalidArgument if the arrays of the case `name` exceed MOST_CASE_BYTES together."""
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes > MOST_CASE_BYTES:
        raise make_error(
            f"{name} has {nbytes:,} bytes of arrays; a bundle takes {MOST_CASE_BYTES:,} for a kernel: "
            "give smaller shapes"
        )


def _make_arguments(
    kernel: Callable[..., Any], call: Call, name: str, operands: Mapping[int, str]
) -> tuple[tuple[Argument, ...], Arrays]:
    """Return the arguments of a case, and copies of its input arrays by file name, without operands of weights."""
    arguments, arrays = [], {}
    for parameter, argument in name_arguments(kernel, call):
        if id(argument) in operands:
            operand = operands[id(argument)]
            arguments.append(Argument(parameter, WEIGHT, "", argument.shape, argument.dtype.name, operand))
        elif isinstance(argument, np.ndarray):
            file = f"inputs/{name}/{parameter}.npy"
            arrays[file] = np.array(argument, order="C")
            arguments.append(Argument(parameter, ARRAY, file, argument.shape, argument.dtype.name))
        else:
            arguments.append(make_plain_argument(parameter, argument, name))
    return tuple(arguments), arrays


def name_arguments(kernel: Callable[..., Any], call: Call) -> list[tuple[str, Any]]:
    """Return (parameter, argument) for every argument of a call, positional arguments first."""
    return [*zip(inspect.signature(kernel).parameters, call.args), *call.keywords.items()]


def make_plain_argument(parameter: str, content: Any, name: str) -> Argument:
    """Return an argument that is no array, as a dtype or a Python literal.

    Raises:
        InvalidArgument: If it is neither, so that the bundle cannot store it.
    """
    if isinstance(content, DType):
        return Argument(parameter, DTYPE, text=f"{LANGUAGE}{content!s}")
    if isinstance(content, (type, np.dtype)):
        return Argument(parameter, DTYPE, text=np.dtype(content).name)
    if isinstance(content, (bool, int, float, str, tuple, list, dict, type(None))):
        return Argument(parameter, LITERAL, text=repr(content))
    raise make_error(
        f"the argument {parameter} of {name} is a {type(content).__name__}; a bundle stores arrays, dtypes and Python "
        "literals: pass one of these"
    )


def _make_outputs(program: Program, call: Call, name: str) -> tuple[tuple[Output, ...], Arrays]:
    """Return the expected outputs of a case with their tolerances, and their arrays by file name."""
    tolerances, why = program.derive_tolerances(call, program.outputs, name)
    outputs, files = [], {}
    for number, array in enumerate(program.outputs):
        check_dtype(array, number, name)
        file = f"expected/{name}/output-{number}.npy"
        files[file] = np.ascontiguousarray(array)
        tile = get_tile(array.shape)
        outputs.append(
            Output(
                f"output-{number}",
                file,
                array.shape,
                array.dtype.name,
                tile,
                tolerances[number],
                why,
                argument=program.written[number],
            )
        )
    return tuple(outputs), files


def _find_written_argument(output: np.ndarray, kernel: Callable[..., Any], call: Call) -> str:
    """Return the name of the array argument that the kernel overwrites and returns as this output.

    Returns:
        The name of the first argument that shares memory with the output; empty if the output is a new array.
    """
    arrays = ((name, array) for name, array in name_arguments(kernel, call) if isinstance(array, np.ndarray))
    return next((name for name, array in arrays if np.shares_memory(output, array)), "")


def check_dtype(array: np.ndarray, number: int, name: str) -> None:
    """Raise InvalidArgument if output `number` of the case `name` has a dtype that cannot be stored."""
    if array.dtype.name not in DTYPES:
        raise make_error(
            f"output {number} of {name} is {array.dtype}; a bundle stores {', '.join(DTYPES)}: return one of these"
        )


def get_tile(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of the tiles for which digests of an output are taken: at most 128 by 512.

    Leading dims are combined into rows.
    """
    return min(_TILE_ROWS, max(1, math.prod(shape[:-1]))), min(_TILE_COLUMNS, max(1, shape[-1]))


def predict(launch: Launch, root: Path) -> Predicted:
    """Return the predicted times of a launch in ns, with the 40 lines that take most of the critical path.

    Lines are named by their path below `root`, or by the file name alone if the file is elsewhere.
    """
    launch_profile = profile(launch.streams, launch.hardware, launch.kernel)
    lengths = {reading: float(timeline.length_ns) for reading, timeline in launch_profile.timelines.items()}
    lines = []
    for confidence in launch_profile.lines[:_MOST_LINES]:
        file = Path(location(confidence.line).file).resolve()
        shown = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
        lines.append(Line(shown, confidence.line[1], float(confidence.held_ns), float(confidence.path_ns)))
    return Predicted(
        lengths[Reading.dataflow],
        lengths[Reading.scheduled],
        lengths[Reading.program],
        lengths[Reading.serial],
        float(launch_profile.timeline.overhead_ns),
        {name: float(launch_profile.timeline.busy_ns[name]) for name in launch_profile.timeline.tracks},
        {
            line_time.value: float(confidence_ns)
            for line_time, confidence_ns in launch_profile.basis.by_confidence
        },
        tuple(lines),
    )


def describe_instructions(streams: Sequence[Stream]) -> Instructions:
    """Return number, names and SHA-256 of the instructions of a launch.

    The digest is over a line of text for every instruction: its rank and core, name, engine, and for every
    operand the box in its tensor, with the tensor's shape, dtype and memory.
    """
    digest = hashlib.sha256()
    ops: Counter[str] = Counter()
    for stream in streams:
        for index, number in enumerate(stream.ops):
            op = stream.op_names[number]
            ops[op] += 1
            operands = []
            for access in stream.accesses(index):
                tensor = stream.tensors[access.tensor]
                operands.append((*access, *tensor.shape, tensor.dtype, tensor.buffer.value))
            line = f"{stream.rank}.{stream.core} {op} {stream.engines[index]} {operands}\n"
            digest.update(line.encode())
    return Instructions(sum(ops.values()), digest.hexdigest(), dict(sorted(ops.items())))
