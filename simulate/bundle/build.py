"""A case of a bundle: a kernel is launched here, its results held against its reference, its time predicted."""

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
from simulate.bundle.reading import DTYPES, refused
from simulate.bundle.run import LANGUAGE
from simulate.bundle.sources import Sources, collect, module_of
from simulate.check import collect_findings, fails_a_check, gathered
from simulate.hardware import Hardware
from simulate.kernel_by_name import call_of, callable_named, launch_on
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
    answer,
    compute_truth,
    count_contractions,
    derive_terms,
    longest_chain,
    saturate,
)
from simulate.verification.inputs import Call, convert_results
from simulate.verification.judging import find_reference

MOST_CASE_BYTES = 10_000_000
"""The largest arrays of one case, so that a bundle of one kernel stays below 10 MB."""
_TILE_ROWS, _TILE_COLUMNS = 128, 512
"""Partitions, and the float32 columns of one PSUM bank: how kernels cut their results most of the time."""
_MOST_LINES = 40

Arrays = dict[str, np.ndarray]


def build_case(
    words: str, arguments: Sequence[str], name: str, sources: Sources, reference: Reference | None = None
) -> tuple[Case, Arrays]:
    """A case for the kernel that `words` name on the arguments that stand for `launch_by_name`, and its arrays by file.

    The kernel's files are added to `sources`. Without a reference, `<kernel>_reference` of the kernel's module is it;
    where there is none, outputs have no tolerance. Raises InvalidArgument for several ranks, arrays of more than 10 MB,
    arguments that cannot travel, a kernel whose result its reference contradicts; and what the launch raises.
    """
    if read_rank_count() > 1:
        raise refused("a bundle holds launches of one rank; leave --ranks and NKW_RANKS out")
    kernel = unwrap_kernel(callable_named(words))
    return case_of(kernel, words, Call(*call_of(arguments)), name, sources, reference)


class Program:
    """A kernel on arguments of certain shapes: one launch on copies of the first ones, and what all have in common.

    `outputs` are what this launch returned; `written` names for each the argument that it is, or is empty. Chip and
    physical cores are the environment's where they are None. Without a reference, `<kernel>_reference` of the kernel's
    module is it. The kernel's files are added to `sources`.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        words: str,
        call: Call,
        sources: Sources,
        reference: Reference | None = None,
        chip: Hardware | None = None,
        cores: int | None = None,
    ) -> None:
        self._kernel, self._reference = kernel, reference
        self.name = words.rpartition(":")[2]
        self.module, file = module_of(kernel, words)
        self.imports = collect(sources, self.module, file)
        self.cores = read_core_count(kernel.__name__, None, Level.of()) if cores is None else cores
        own = call.copy_arrays()
        with gathered() as seen:
            launch = launch_on(kernel, words, [(own.args, own.keywords)], Mode.eager, chip=chip, cores=cores)
        self.outputs = convert_results(launch.outputs[0])
        self.written = [_argument_of(each, kernel, own) for each in self.outputs]
        self.predicted = predicted(launch, file.parents[self.module.count(".")])
        self.instructions = instructions(launch.streams)
        # Warnings that right kernels get as well blame no kernel for a wrong result.
        failing = [finding for finding in collect_findings(seen) if fails_a_check(finding, tolerant=False)]
        self.findings = tuple(sorted({finding.code for finding in failing}))
        self._streams, self._chain = launch.streams, longest_chain(launch.streams)
        self._contractions: Sequence[int] | None = None

    def case(self, name: str, arguments: tuple[Argument, ...], outputs: tuple[Output, ...]) -> Case:
        """A launch of it as a case."""
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

    def tolerances(
        self, call: Call, outputs: Sequence[np.ndarray], name: str
    ) -> tuple[list[Tolerance | None], str]:
        """The tolerance of every output of a launch, derived as `nkw verify` does, or the reason why there is none.

        `call` has the arguments as they were before it. Raises InvalidArgument for a result that the reference
        contradicts.
        """
        try:
            reference = self._reference or find_reference(self._kernel, self._kernel.__name__)
        except NkwError:
            own = self._kernel.__name__
            return [None] * len(outputs), f"there is no {own}_reference beside {own}"
        try:
            if self._contractions is None:
                self._contractions = count_contractions(
                    reference, call.copy_arrays(), answer(reference, call.copy_arrays())
                )
            truth = compute_truth(reference, call, self._contractions)
        except Exception as error:  # whatever the reference of a user does
            return [None] * len(outputs), f"the reference fails: {type(error).__name__}: {error!s:.100}"
        if len(truth.arrays) != len(outputs):
            raise refused(f"{name} returns {len(outputs)} arrays, its reference {len(truth.arrays)}")
        tolerances: list[Tolerance | None] = []
        for number, (output, exact) in enumerate(zip(outputs, truth.arrays)):
            terms = derive_terms(output, number, truth, call, self._streams, self._chain)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", WeakComparison)
                    found = compare(output, saturate(exact, output), *terms)
            except Mismatch as error:
                raise refused(
                    f"output {number} of {name} is wrong here already: {error}; nkw verify says more"
                ) from None
            through = np.dtype(terms.through).name
            tolerances.append(
                Tolerance(
                    found.bound, found.error, terms.magnitude, terms.contraction, terms.roundings, through
                )
            )
        return tolerances, ""


def case_of(
    kernel: Callable[..., Any],
    words: str,
    call: Call,
    name: str,
    sources: Sources,
    reference: Reference | None = None,
    chip: Hardware | None = None,
    cores: int | None = None,
    operands: Mapping[int, str] | None = None,
) -> tuple[Case, Arrays]:
    """A case for the plain function that `words` name on the arguments of `call`, as `build_case` makes it.

    The kernel is launched on copies, so that arrays that it writes to travel as they are before the launch. Chip and
    physical cores are the environment's where they are None. Arrays whose identities are among `operands` are named and
    do not travel.
    """
    given, inputs = _arguments(kernel, call, name, operands or {})
    _check_size(inputs, name)
    program = Program(kernel, words, call, sources, reference, chip, cores)
    outputs, expected = _outputs(program, call, name)
    arrays = inputs | expected
    _check_size(arrays, name)
    return program.case(name, given, outputs), arrays


def _check_size(arrays: Arrays, name: str) -> None:
    nbytes = sum(each.nbytes for each in arrays.values())
    if nbytes > MOST_CASE_BYTES:
        raise refused(
            f"{name} has {nbytes:,} bytes of arrays; a bundle takes {MOST_CASE_BYTES:,} for a kernel: "
            "give smaller shapes"
        )


def _arguments(
    kernel: Callable[..., Any], call: Call, name: str, operands: Mapping[int, str]
) -> tuple[tuple[Argument, ...], Arrays]:
    arguments, arrays = [], {}
    for parameter, value in named_arguments(kernel, call):
        if id(value) in operands:
            operand = operands[id(value)]
            arguments.append(Argument(parameter, WEIGHT, "", value.shape, value.dtype.name, operand))
        elif isinstance(value, np.ndarray):
            file = f"inputs/{name}/{parameter}.npy"
            arrays[file] = np.array(value, order="C")
            arguments.append(Argument(parameter, ARRAY, file, value.shape, value.dtype.name))
        else:
            arguments.append(plain_argument(parameter, value, name))
    return tuple(arguments), arrays


def named_arguments(kernel: Callable[..., Any], call: Call) -> list[tuple[str, Any]]:
    """Return the arguments of a call with their parameters, first those by position."""
    return [*zip(inspect.signature(kernel).parameters, call.args), *call.keywords.items()]


def plain_argument(parameter: str, value: Any, name: str) -> Argument:
    """An argument that is no array. Raises InvalidArgument for one that cannot travel."""
    if isinstance(value, DType):
        return Argument(parameter, DTYPE, text=f"{LANGUAGE}{value!s}")
    if isinstance(value, (type, np.dtype)):
        return Argument(parameter, DTYPE, text=np.dtype(value).name)
    if isinstance(value, (bool, int, float, str, tuple, list, dict, type(None))):
        return Argument(parameter, LITERAL, text=repr(value))
    raise refused(f"the argument {parameter} of {name} is a {type(value).__name__}, which cannot travel")


def _outputs(program: Program, call: Call, name: str) -> tuple[tuple[Output, ...], Arrays]:
    tolerances, why = program.tolerances(call, program.outputs, name)
    outputs, files = [], {}
    for number, array in enumerate(program.outputs):
        check_dtype(array, number, name)
        file = f"expected/{name}/output-{number}.npy"
        files[file] = np.ascontiguousarray(array)
        tile = tile_of(array.shape)
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


def _argument_of(output: np.ndarray, kernel: Callable[..., Any], call: Call) -> str:
    """The array argument that the kernel wrote to and returned as this output; empty for a new array."""
    arrays = ((name, each) for name, each in named_arguments(kernel, call) if isinstance(each, np.ndarray))
    return next((name for name, each in arrays if np.shares_memory(output, each)), "")


def check_dtype(array: np.ndarray, number: int, name: str) -> None:
    """Raise InvalidArgument for an output of a dtype that cannot travel."""
    if array.dtype.name not in DTYPES:
        raise refused(f"output {number} of {name} is {array.dtype}, which cannot travel")


def tile_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the tiles of an output, whose leading dims are taken together as rows."""
    return min(_TILE_ROWS, max(1, math.prod(shape[:-1]))), min(_TILE_COLUMNS, max(1, shape[-1]))


def predicted(launch: Launch, root: Path) -> Predicted:
    """The predicted times of a launch; lines are named by their path below `root`."""
    seen = profile(launch.streams, launch.hardware, launch.kernel)
    lengths = {each: float(line.length_ns) for each, line in seen.timelines.items()}
    lines = []
    for each in seen.lines[:_MOST_LINES]:
        file = Path(location(each.line).file).resolve()
        shown = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
        lines.append(Line(shown, each.line[1], float(each.held_ns), float(each.path_ns)))
    return Predicted(
        lengths[Reading.dataflow],
        lengths[Reading.scheduled],
        lengths[Reading.program],
        lengths[Reading.serial],
        float(seen.timeline.overhead_ns),
        {name: float(seen.timeline.busy_ns[name]) for name in seen.timeline.tracks},
        {each.value: float(part) for each, part in seen.basis.by_confidence},
        tuple(lines),
    )


def instructions(streams: Sequence[Stream]) -> Instructions:
    """Number, names and digest of the instructions of a launch.

    The digest is over one line of text for every instruction: its core, name, engine, and the box of every operand in
    its tensor, with the shape, dtype and memory of that tensor.
    """
    digest = hashlib.sha256()
    ops: Counter[str] = Counter()
    for stream in streams:
        for index, number in enumerate(stream.ops):
            op = stream.op_names[number]
            ops[op] += 1
            operands = []
            for each in stream.accesses(index):
                tensor = stream.tensors[each.tensor]
                operands.append((*each, *tensor.shape, tensor.dtype, tensor.buffer.value))
            line = f"{stream.rank}.{stream.core} {op} {stream.engines[index]} {operands}\n"
            digest.update(line.encode())
    return Instructions(sum(ops.values()), digest.hexdigest(), dict(sorted(ops.items())))
