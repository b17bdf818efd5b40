"""The launches of a generation as cases: each is given weights, what comes with a step, and what others returned."""

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
    named_arguments,
    plain_argument,
    tile_of,
)
from simulate.bundle.cases import Cases
from simulate.bundle.manifest import ARRAY, RESULT, WEIGHT, ZEROS, Argument, Onto, Output, Tolerance
from simulate.bundle.reading import bits_of, refused
from simulate.bundle.run import tile_digests
from simulate.hardware import Hardware
from simulate.verification.inputs import Call, convert_results

MOST_OUTPUT_BYTES = 4_000_000
"""The largest output whose values travel, such as logits of a million tokens; of others the digests of tiles do."""
_LEAST_ZEROS_BYTES = 4096  # a smaller array of zeros travels as a file, which other launches may share


@dataclass(frozen=True)
class _Origin:
    """Where an array comes from, while it lives; `digest` is of its contents, empty for weights: they stay the same."""

    array: weakref.ref[np.ndarray]
    kind: str
    text: str
    output: int
    digest: str


class Origins:
    """Weights, and what launches returned, found again by the memory that an array ends in: last rows end there too."""

    def __init__(self) -> None:
        self._known: dict[int, _Origin] = {}

    def note(self, array: np.ndarray, kind: str, text: str, output: int = 0) -> None:
        """Note where an array comes from, in place of an earlier origin."""
        if array.flags.c_contiguous:
            digest = "" if kind == WEIGHT else _digest(array)
            self._known[_end(array)] = _Origin(weakref.ref(array), kind, text, output, digest)

    def of(self, array: np.ndarray) -> _Origin | None:
        """The origin of an array: of one that lives, has this dtype and these or more rows, and did not change."""
        found = self._known.get(_end(array)) if array.flags.c_contiguous and array.ndim else None
        whole = found.array() if found is not None else None
        if found is None or whole is None or whole.dtype != array.dtype or _end(whole) != _end(array):
            return None
        if whole.shape[1:] != array.shape[1:] or (found.kind == WEIGHT and whole.shape != array.shape):
            return None
        return found if not found.digest or found.digest == _digest(whole) else None


def _end(array: np.ndarray) -> int:
    return array.ctypes.data + array.nbytes


def _digest(array: np.ndarray) -> str:
    return blake2b(array.tobytes()).hexdigest()


class LaunchCases(Cases):
    """Cases of launches on one core of a chip, in the order in which they are made.

    `step` and `section` are those of the launches to come. Programs, which are kernels on arguments of certain shapes
    and values that are no arrays, are launched once more here, to be predicted.
    """

    def __init__(self, chip: Hardware) -> None:
        super().__init__()
        self.step, self.section = 0, ""
        self._chip, self._origins = chip, Origins()
        self._programs: dict[Hashable, tuple[str, Program]] = {}
        self._shared: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def weight(self, name: str, array: np.ndarray) -> None:
        """Note an array as an operand of weights."""
        self._origins.note(array, WEIGHT, name)

    def launched(
        self,
        kernel: Callable[..., Any],
        words: str,
        args: tuple[Any, ...],
        written: Sequence[str | None],
        name: str,
        launch: Callable[[], Any],
    ) -> Any:
        """Launch with `launch`, and add the launch as a case; returns what it returns.

        `written` names for each output the argument that it is, with some of it written anew. Raises
        InvalidArgument for what cannot travel, and for a result that the kernel's reference contradicts.
        """
        call = Call(args, {})
        arguments = tuple(
            self._argument(parameter, value, name) for parameter, value in named_arguments(kernel, call)
        )
        of_weights = {id(value) for value, each in zip(args, arguments) if each.kind == WEIGHT}
        before = call.map_arrays(lambda array, _: array if id(array) in of_weights else array.copy())
        first, program = self._program(kernel, words, before, name)
        returned, earlier = launch(), dict(named_arguments(kernel, before))
        outputs = convert_results(returned)
        tolerances, why = program.tolerances(before, outputs, name)
        described = []
        for number, array in enumerate(outputs):
            parameter = written[number] if number < len(written) else None
            onto = None if parameter is None else (parameter, np.asarray(earlier[parameter]))
            described.append(self._output(array, number, name, onto, tolerances[number], why))
            self._origins.note(array, RESULT, name, number)
        case = replace(
            program.case(name, arguments, tuple(described)),
            step=self.step,
            part=self.section,
            like="" if first == name else first,
        )
        self._take((case, {}))
        return returned

    def _program(self, kernel: Callable[..., Any], words: str, call: Call, name: str) -> tuple[str, Program]:
        kinds = (
            (each.shape, each.dtype.name) if isinstance(each, np.ndarray) else repr(each)
            for each in call.args
        )
        key = words, *kinds
        if key not in self._programs:
            program = Program(kernel, words, call, self.sources, chip=self._chip, cores=1)
            self._programs[key] = name, program
        return self._programs[key]

    def _argument(self, parameter: str, value: Any, name: str) -> Argument:
        if not isinstance(value, np.ndarray):
            return plain_argument(parameter, value, name)
        shape, dtype = value.shape, value.dtype.name
        found = self._origins.of(value)
        if found is not None:
            return Argument(parameter, found.kind, "", shape, dtype, found.text, found.output)
        if value.nbytes >= _LEAST_ZEROS_BYTES and not value.view(bits_of(value.dtype)).any():
            return Argument(parameter, ZEROS, "", shape, dtype)
        if value.nbytes > MOST_CASE_BYTES:
            raise refused(
                f"the argument {parameter} of {name} has {value.nbytes:,} bytes, and is neither a weight nor what "
                f"another launch returned; a bundle takes {MOST_CASE_BYTES:,} of such"
            )
        return Argument(parameter, ARRAY, self._file(parameter, value), shape, dtype)

    def _file(self, stem: str, array: np.ndarray) -> str:
        """The file that holds an array's values; equal arrays share one."""
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
        why: str,
    ) -> Output:
        check_dtype(array, number, name)
        values, record, named = array, None, ""
        if onto is not None:
            named, before = onto
            axis, places = places_written(before, array)
            values = np.take(array, places, axis)
            record = Onto(named, axis, array.shape, self._file("places", places))
        values = np.ascontiguousarray(values).copy()
        tile, shape, dtype = tile_of(values.shape), values.shape, values.dtype.name
        if values.nbytes > MOST_OUTPUT_BYTES:
            tiles = tuple(tile_digests(values.view(bits_of(values.dtype)), *tile))
            return Output(f"output-{number}", "", shape, dtype, tile, tolerance, why, record, tiles, named)
        file = f"expected/{name}/output-{number}.npy"
        self.arrays[file] = values
        return Output(f"output-{number}", file, shape, dtype, tile, tolerance, why, record, argument=named)


def places_written(before: np.ndarray, after: np.ndarray) -> tuple[int, np.ndarray]:
    """The axis along which the fewest places were written anew, and these places, int32; at least one."""
    bits = bits_of(after.dtype)
    changed = np.ascontiguousarray(before).view(bits) != np.ascontiguousarray(after).view(bits)
    found = []
    for axis in range(after.ndim):
        others = tuple(each for each in range(after.ndim) if each != axis)
        places = np.flatnonzero(changed.any(axis=others))
        share = max(1, len(places)) / after.shape[axis]
        found.append((share, axis, places if len(places) else np.zeros(1, np.int64)))
    _, axis, places = min(found, key=lambda each: each[:2])
    return axis, places.astype(np.int32)
