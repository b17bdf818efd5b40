"""Launches of a generation as cases, with arguments from weights, steps and earlier outputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from simulate.bundle.build import (
    MOST_CASE_BYTES,
    Program,
    check_dtype,
    get_tile,
    make_plain_argument,
    name_arguments,
)
from simulate.bundle.cases import Cases
from simulate.bundle.manifest import ARRAY, RESULT, WEIGHT, ZEROS, Argument, Onto, Output, Tolerance
from simulate.bundle.reading import get_storage_dtype, make_error
from simulate.bundle.run import tile_digests
from simulate.hardware import Hardware
from simulate.verification.inputs import Call, convert_results

MOST_OUTPUT_BYTES = 4_000_000
"""Largest output whose array is stored, such as logits of a million tokens; else digests of its tiles are."""
_LEAST_ZEROS_BYTES = 4096  # smaller arrays of zeros are stored as files, which launches can share


@dataclass(frozen=True)
class _Origin:
    """Origin of an array that still exists. `digest` is of its contents, empty for weights, which do not change."""

    array: weakref.ref[np.ndarray]
    argument_kind: str
    text: str
    output: int
    digest: str


class Origins:
    """Origins of weights and outputs, by the end of their memory, which a view of the last rows shares."""

    def __init__(self) -> None:
        self._known: dict[int, _Origin] = {}

    def note(self, array: np.ndarray, argument_kind: str, text: str, output: int = 0) -> None:
        """Store the origin of an array, in place of an earlier origin."""
        if array.flags.c_contiguous:
            digest = "" if argument_kind == WEIGHT else _digest(array)
            self._known[_end(array)] = _Origin(weakref.ref(array), argument_kind, text, output, digest)

    def find_origin(self, array: np.ndarray) -> _Origin | None:
        """Return the origin of an array if it exists unchanged with this dtype and at least as many rows, else None."""
        origin = self._known.get(_end(array)) if array.flags.c_contiguous and array.ndim else None
        origin_array = origin.array() if origin is not None else None
        if (
            origin is None
            or origin_array is None
            or origin_array.dtype != array.dtype
            or _end(origin_array) != _end(array)
        ):
            return None
        if origin_array.shape[1:] != array.shape[1:] or (
            origin.argument_kind == WEIGHT and origin_array.shape != array.shape
        ):
            return None
        return origin if not origin.digest or origin.digest == _digest(origin_array) else None


def _end(array: np.ndarray) -> int:
    """Return the address after an array's last byte."""
    return array.ctypes.data + array.nbytes


def _digest(array: np.ndarray) -> str:
    """Return the digest of an array's bytes."""
    return blake2b(array.tobytes()).hexdigest()


class LaunchCases(Cases):
    """Cases of launches on one core of a chip, in launch order.

    `step` and `section` apply to the launches that follow. A program is a kernel with arguments of certain
    shapes and literals. Each program is launched again here to be predicted.
    """

    def __init__(self, chip: Hardware) -> None:
        super().__init__()
        self.step, self.section = 0, ""
        self._chip, self._origins = chip, Origins()
        self._programs: dict[Hashable, tuple[str, Program]] = {}
        self._shared: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def weight(self, name: str, array: np.ndarray) -> None:
        """Store an array as an operand of weights."""
        self._origins.note(array, WEIGHT, name)

    def launched(
        self,
        kernel: Callable[..., Any],
        kernel_name: str,
        args: tuple[Any, ...],
        written: Sequence[str | None],
        name: str,
        launch: Callable[[], Any],
    ) -> Any:
        """Launch with `launch`, add the launch as a case, and return the outputs.

        Args:
            written: For each output, the argument that it overwrites in part, or None.

        Raises:
            InvalidArgument: If an argument cannot be stored, or if the reference contradicts an output.
        """
        call = Call(args, {})
        arguments = tuple(
            self._argument(parameter, argument, name) for parameter, argument in name_arguments(kernel, call)
        )
        weight_ids = {
            id(argument)
            for argument, described_argument in zip(args, arguments)
            if described_argument.argument_kind == WEIGHT
        }
        before = call.map_arrays(lambda array, _: array if id(array) in weight_ids else array.copy())
        first, program = self._program(kernel, kernel_name, before, name)
        returned, earlier = launch(), dict(name_arguments(kernel, before))
        outputs = convert_results(returned)
        tolerances, reason = program.tolerances(before, outputs, name)
        described = []
        for number, array in enumerate(outputs):
            parameter = written[number] if number < len(written) else None
            onto = None if parameter is None else (parameter, np.asarray(earlier[parameter]))
            described.append(self._output(array, number, name, onto, tolerances[number], reason))
            self._origins.note(array, RESULT, name, number)
        case = replace(
            program.case(name, arguments, tuple(described)),
            step=self.step,
            model_part=self.section,
            like="" if first == name else first,
        )
        self._append((case, {}))
        return returned

    def _program(
        self, kernel: Callable[..., Any], kernel_name: str, call: Call, name: str
    ) -> tuple[str, Program]:
        """Return the name of the first case of a program, and the program, launching it if it is new."""
        argument_keys = (
            (argument.shape, argument.dtype.name) if isinstance(argument, np.ndarray) else repr(argument)
            for argument in call.args
        )
        key = kernel_name, *argument_keys
        if key not in self._programs:
            program = Program(kernel, kernel_name, call, self.sources, chip=self._chip, cores=1)
            self._programs[key] = name, program
        return self._programs[key]

    def _argument(self, parameter: str, content: Any, name: str) -> Argument:
        """Return an argument of a case: its origin, zeros, or a file."""
        if not isinstance(content, np.ndarray):
            return make_plain_argument(parameter, content, name)
        shape, dtype = content.shape, content.dtype.name
        origin = self._origins.find_origin(content)
        if origin is not None:
            return Argument(parameter, origin.argument_kind, "", shape, dtype, origin.text, origin.output)
        if content.nbytes >= _LEAST_ZEROS_BYTES and not content.view(get_storage_dtype(content.dtype)).any():
            return Argument(parameter, ZEROS, "", shape, dtype)
        if content.nbytes > MOST_CASE_BYTES:
            raise make_error(
                f"the argument {parameter} of {name} has {content.nbytes:,} bytes, and is neither a weight nor what "
                f"another launch returned; a bundle takes {MOST_CASE_BYTES:,} of such"
            )
        return Argument(parameter, ARRAY, self._file(parameter, content), shape, dtype)

    def _file(self, stem: str, array: np.ndarray) -> str:
        """Return the file of an array; equal arrays share a file."""
        key = f"{array.shape} {array.dtype} {_digest(array)}"
        if key not in self._shared:
            self._counts[stem] += 1
            self._shared[key] = f"inputs/{stem}-{self._counts[stem]}.npy"
            self.arrays[self._shared[key]] = np.array(array, order="C")
        return self._shared[key]

    def _output(
        self,
        array: np.ndarray,
        number: int,
        name: str,
        onto: tuple[str, np.ndarray] | None,
        tolerance: Tolerance | None,
        reason: str,
    ) -> Output:
        """Return an expected output, and store its array or the digests of its tiles."""
        check_dtype(array, number, name)
        values, record, named = array, None, ""
        if onto is not None:
            named, before = onto
            axis, positions = find_written_positions(before, array)
            values = np.take(array, positions, axis)
            record = Onto(named, axis, array.shape, self._file("places", positions))
        values = np.ascontiguousarray(values).copy()
        tile, shape, dtype = get_tile(values.shape), values.shape, values.dtype.name
        if values.nbytes > MOST_OUTPUT_BYTES:
            tiles = tuple(tile_digests(values.view(get_storage_dtype(values.dtype)), *tile))
            return Output(f"output-{number}", "", shape, dtype, tile, tolerance, reason, record, tiles, named)
        file = f"expected/{name}/output-{number}.npy"
        self.arrays[file] = values
        return Output(f"output-{number}", file, shape, dtype, tile, tolerance, reason, record, argument=named)


def find_written_positions(before: np.ndarray, after: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the axis along which the fewest positions were overwritten, and these positions, int32; at least one."""
    bits = get_storage_dtype(after.dtype)
    changed = np.ascontiguousarray(before).view(bits) != np.ascontiguousarray(after).view(bits)
    candidates = []
    for axis in range(after.ndim):
        reduced_axes = tuple(dimension for dimension in range(after.ndim) if dimension != axis)
        positions = np.flatnonzero(changed.any(axis=reduced_axes))
        share = max(1, len(positions)) / after.shape[axis]
        candidates.append((share, axis, positions if len(positions) else np.zeros(1, np.int64)))
    _, axis, positions = min(candidates, key=lambda candidate: candidate[:2])
    return axis, positions.astype(np.int32)
