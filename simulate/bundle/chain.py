"""Launches of a generation as cases, with arguments from weights, steps and earlier outputs.

`nkw bundle` of a model launches each kernel through `LaunchCases`, which finds out where each argument comes
from. An origin is a weight, or an output of an earlier launch, which the bundle names and does not store.
"""

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
from simulate.bundle.run import digest_tiles
from simulate.hardware import Hardware
from simulate.verification.inputs import Call, convert_results

MOST_OUTPUT_BYTES = 4_000_000
"""Most bytes of an output whose array is stored, such as logits of a million tokens; else digests of its tiles are."""
_LEAST_ZEROS_BYTES = 4096  # smaller arrays of zeros are stored as files, which launches can share


@dataclass(frozen=True)
class _Origin:
    """Origin of an array that still exists: the weight `text`, or output `output` of the case `text`.

    `array` is a weak reference to it. `digest` is the digest of its contents when the origin was noted, empty
    for weights, which do not change.
    """

    array: weakref.ref[np.ndarray]
    argument_kind: str
    text: str
    output: int
    digest: str


class Origins:
    """Origins of weights and outputs, by the address after their last byte: a view of the last rows shares it."""

    def __init__(self) -> None:
        self._known: dict[int, _Origin] = {}

    def note(self, array: np.ndarray, argument_kind: str, text: str, output: int = 0) -> None:
        """Store the origin of an array, in place of an earlier origin.

        Does nothing unless the array is C-contiguous.

        Args:
            array: The array; only a weak reference to it is kept.
            argument_kind: WEIGHT or RESULT.
            text: Name of the weight, or of the case that returned the array.
            output: Index of the output of that case.
        """
        if array.flags.c_contiguous:
            digest = "" if argument_kind == WEIGHT else _digest(array)
            self._known[_end(array)] = _Origin(weakref.ref(array), argument_kind, text, output, digest)

    def find_origin(self, array: np.ndarray) -> _Origin | None:
        """Return the origin of an array, or of the array whose last rows it views.

        Returns None if the origin is unknown, or if its array has changed since. The dtype and the sizes
        after the first dim must be those of the noted array. A view of a part of a weight has no origin.
        """
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
    """Return the address after the last byte of a C-contiguous array."""
    return array.ctypes.data + array.nbytes


def _digest(array: np.ndarray) -> str:
    """Return the BLAKE2b digest of an array's bytes in row-major order, as hexadecimal text."""
    return blake2b(array.tobytes()).hexdigest()


class LaunchCases(Cases):
    """Cases of launches on one core of a chip, in launch order.

    `step` and `section` are the step index and the part of the model that the next launches get. A program is
    a kernel with arguments of certain shapes and literals. Each program is launched once more here, to
    predict its time.
    """

    def __init__(self, chip: Hardware) -> None:
        super().__init__()
        self.step, self.section = 0, ""
        self._chip, self._origins = chip, Origins()
        self._programs: dict[Hashable, tuple[str, Program]] = {}
        self._shared: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def note_weight(self, name: str, array: np.ndarray) -> None:
        """Note that an array is the operand of weights with a name.

        Arguments with this array are not stored.
        """
        self._origins.note(array, WEIGHT, name)

    def add_launched_case(
        self,
        kernel: Callable[..., Any],
        kernel_name: str,
        args: tuple[Any, ...],
        written: Sequence[str | None],
        name: str,
        launch: Callable[[], Any],
    ) -> Any:
        """Run `launch()`, append the launch as a case, and return what `launch` returned.

        Args:
            kernel: Plain function of the kernel, which is called if its program is new.
            kernel_name: FILE.py:NAME or MODULE:NAME.
            args: Positional arguments of the launch.
            written: For each output, the argument that it overwrites in part, or None.
            name: Name of the case.
            launch: Makes the launch on `args`.

        Raises:
            InvalidArgument: If an argument cannot be stored, or if the reference contradicts an output.
        """
        call = Call(args, {})
        arguments = tuple(
            self._make_argument(parameter, argument, name)
            for parameter, argument in name_arguments(kernel, call)
        )
        weight_ids = {
            id(argument)
            for argument, described_argument in zip(args, arguments)
            if described_argument.argument_kind == WEIGHT
        }
        before = call.map_arrays(lambda array, _: array if id(array) in weight_ids else array.copy())
        first, program = self._find_program(kernel, kernel_name, before, name)
        returned, earlier = launch(), dict(name_arguments(kernel, before))
        outputs = convert_results(returned)
        tolerances, reason = program.derive_tolerances(before, outputs, name)
        described = []
        for number, array in enumerate(outputs):
            parameter = written[number] if number < len(written) else None
            onto = None if parameter is None else (parameter, np.asarray(earlier[parameter]))
            described.append(self._make_output(array, number, name, onto, tolerances[number], reason))
            self._origins.note(array, RESULT, name, number)
        case = replace(
            program.make_case(name, arguments, tuple(described)),
            step=self.step,
            model_part=self.section,
            like="" if first == name else first,
        )
        self._append((case, {}))
        return returned

    def _find_program(
        self, kernel: Callable[..., Any], kernel_name: str, call: Call, name: str
    ) -> tuple[str, Program]:
        """Return the name of the first case of a program, and the program.

        A new program is launched to be predicted.
        """
        argument_keys = (
            (argument.shape, argument.dtype.name) if isinstance(argument, np.ndarray) else repr(argument)
            for argument in call.args
        )
        key = kernel_name, *argument_keys
        if key not in self._programs:
            program = Program(kernel, kernel_name, call, self.sources, chip=self._chip, cores=1)
            self._programs[key] = name, program
        return self._programs[key]

    def _make_argument(self, parameter: str, content: Any, name: str) -> Argument:
        """Return an argument of a case: its origin, zeros, or a file, whose array is added to `arrays`.

        Raises:
            InvalidArgument: If an array without origin exceeds MOST_CASE_BYTES, or a value of another type
                cannot be stored.
        """
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
                f"the argument {parameter} of {name} has {content.nbytes:,} bytes; an array that is neither a "
                f"weight nor an output of an earlier launch may have {MOST_CASE_BYTES:,}: give shorter prompts or "
                "smaller shapes"
            )
        return Argument(parameter, ARRAY, self._store_array(parameter, content), shape, dtype)

    def _store_array(self, stem: str, array: np.ndarray) -> str:
        """Return the name of an array's file, such as `inputs/ids-1.npy`, and add the array to `arrays` if it is new.

        Arrays of equal shape, dtype and contents share a file. `stem` begins the name of a new file.
        """
        key = f"{array.shape} {array.dtype} {_digest(array)}"
        if key not in self._shared:
            self._counts[stem] += 1
            self._shared[key] = f"inputs/{stem}-{self._counts[stem]}.npy"
            self.arrays[self._shared[key]] = np.array(array, order="C")
        return self._shared[key]

    def _make_output(
        self,
        array: np.ndarray,
        number: int,
        name: str,
        onto: tuple[str, np.ndarray] | None,
        tolerance: Tolerance | None,
        reason: str,
    ) -> Output:
        """Return an expected output, after adding its array to `arrays` if it has at most MOST_OUTPUT_BYTES.

        Of a larger output, the digests of its tiles are in the returned record.

        Args:
            array: The complete output.
            number: Index of the output in the launch.
            name: Name of the case.
            onto: Argument that the output overwrites in part, and its array before the launch; None for a new
                array. Only overwritten positions are stored.
            tolerance: Allowed difference, or None for the `reason`.
            reason: Why there is no tolerance.
        """
        check_dtype(array, number, name)
        values, record, named = array, None, ""
        if onto is not None:
            named, before = onto
            axis, positions = find_written_positions(before, array)
            values = np.take(array, positions, axis)
            record = Onto(named, axis, array.shape, self._store_array("places", positions))
        values = np.ascontiguousarray(values).copy()
        tile, shape, dtype = get_tile(values.shape), values.shape, values.dtype.name
        if values.nbytes > MOST_OUTPUT_BYTES:
            tiles = tuple(digest_tiles(values.view(get_storage_dtype(values.dtype)), *tile))
            return Output(f"output-{number}", "", shape, dtype, tile, tolerance, reason, record, tiles, named)
        file = f"expected/{name}/output-{number}.npy"
        self.arrays[file] = values
        return Output(f"output-{number}", file, shape, dtype, tile, tolerance, reason, record, argument=named)


def find_written_positions(before: np.ndarray, after: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the axis along which the smallest share of positions was overwritten, and these positions.

    The positions are int32, ascending. A position counts if any element at it differs bitwise. If none
    differs, position 0 is returned.

    Args:
        before: The array before the launch.
        after: The array after the launch, of the same shape and dtype.
    """
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
