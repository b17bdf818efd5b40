"""Arguments and expected outputs of the launches of a generation, and the judgement of outputs, on the instance.

`run_model.py` imports this module, and `run.py` for the times of one launch. It needs only Python's standard
library and numpy. Arrays of dtypes that numpy lacks are handled as unsigned integers of their bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

run: Any = importlib.import_module(f"{__package__}.run" if __package__ else "run")
run_weights: Any = importlib.import_module(f"{__package__}.run_weights" if __package__ else "run_weights")

Json = dict[str, Any]
Place = tuple[str, int]
"""An output: the name of its case and its index."""


def compare_floats(seen: Any, expected: Any) -> tuple[Any, Any, Any]:
    """Compare two arrays of the same shape and dtype, element by element.

    Returns:
        The absolute differences in float64, whether the values are equal, and whether the bits are equal,
            each in the shape of the arrays. Two NaN are equal, as are 0 and -0; the difference between NaN
            and any number is infinite.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        wide, exact = seen.astype(np.float64), expected.astype(np.float64)
        errors = np.abs(wide - exact)
    unsigned = f"uint{8 * seen.dtype.itemsize}"
    bits = [np.ascontiguousarray(array).view(unsigned).reshape(array.shape) for array in (seen, expected)]
    same_bits = bits[0] == bits[1]
    same = same_bits | (wide == exact) | (np.isnan(wide) & np.isnan(exact))
    return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors)), same, same_bits


def take_positions(array: Any, onto: Json, positions: Any) -> Any:
    """Return the slices of an array at some positions along one axis, in a new C-contiguous array.

    Args:
        onto: Record of the output, whose `axis` is the axis.
        positions: Indices along the axis.
    """
    import numpy as np

    return np.ascontiguousarray(np.take(array, positions, axis=onto["axis"]))


class Chain:
    """Arguments and expected outputs of a bundle's launches, in order; arrays contain bits.

    Call `expect_outputs` for each launch in order, then `keep` for its outputs, then `forget` with its index.

    `expected` has complete expected outputs, `chip_outputs` those of the chip, by (case, index of the
    output). Both have an output only while later launches read it. `differing` names the outputs of the chip
    that are not bitwise equal to the expected ones.
    """

    def __init__(self, folder: Path, cases: list[Json], weights: Any) -> None:
        self._folder, self._weights = folder, weights
        self._files: Json = {}
        self._last: dict[Place, int] = {}
        self.expected: dict[Place, Any] = {}
        self.chip_outputs: dict[Place, Any] = {}
        self.differing: set[Place] = set()
        for index, case in enumerate(cases):
            for argument in case["arguments"].values():
                if argument["kind"] == "result":
                    self._last[argument["text"], argument["output"]] = index

    def load_file(self, name: str) -> Any:
        """Return the array in a file of the bundle.

        The array is cached, since several launches share files, so callers must not write to it.
        """
        import numpy as np

        if name not in self._files:
            self._files[name] = np.load(self._folder / name, allow_pickle=False)
        return self._files[name]

    def resolve(self, argument: Json, arrays: dict[Place, Any]) -> Any:
        """Return the bits of an argument; an output of an earlier launch is taken from `arrays`.

        An argument with fewer rows than that output gets its last rows. The array is new except for a weight,
        which callers must not write to.

        Raises:
            KeyError: If `arrays` lacks the output.
        """
        import numpy as np

        argument_kind = argument["kind"]
        if argument_kind == "weight":
            return self._weights[argument["text"]]
        if argument_kind == "array":
            return self.load_file(argument["file"]).copy()
        if argument_kind == "zeros":
            return np.zeros(argument["shape"], find_storage_dtype(argument["dtype"]))
        output = arrays[argument["text"], argument["output"]]
        return output[-argument["shape"][0] :].copy() if argument["shape"] else output.copy()

    def expect_outputs(self, case: Json) -> list[tuple[Any, Any]]:
        """Return (complete output, stored part) for every expected output of a launch, and update `expected`.

        The stored part is the array in the bundle's file: the whole output, or the positions that the launch
        overwrites of an argument. It is None if the bundle has only digests. The complete output is the
        expected argument with these positions overwritten; it is None if that argument is unknown. Complete
        outputs that later launches read are added to `expected`, so launches must be passed in order.
        """
        import numpy as np

        outputs: list[tuple[Any, Any]] = []
        for index, output in enumerate(case["outputs"]):
            stored = np.load(self._folder / output["file"], allow_pickle=False) if output["file"] else None
            complete, onto = stored, output["onto"]
            if onto is not None and stored is not None:
                argument = find_written_argument(case, onto)
                complete = self.resolve(argument, self.expected) if self.has_expected(argument) else None
                if complete is not None:
                    np.moveaxis(complete, onto["axis"], 0)[self.load_file(onto["file"])] = np.moveaxis(
                        stored, onto["axis"], 0
                    )
            outputs.append((complete, stored))
            if complete is not None and (case["name"], index) in self._last:
                self.expected[case["name"], index] = complete
        return outputs

    def has_expected(self, argument: Json) -> bool:
        """Return whether the expected array of an argument is known: in `expected`, in a file, or as a weight."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.expected

    def has_chip_output(self, argument: Json) -> bool:
        """Return whether the chip's array of an argument is known: in `chip_outputs`, in a file, or as a weight."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.chip_outputs

    def has_exact_arguments(self, case: Json) -> bool:
        """Return whether no argument of a launch is an output in `differing`: all are bitwise as expected."""
        return not any(
            argument["kind"] == "result" and (argument["text"], argument["output"]) in self.differing
            for argument in case["arguments"].values()
        )

    def keep(self, case: Json, index: int, bits: Any, differs: bool) -> None:
        """Store output `index` of a case for later launches in `chip_outputs`; does nothing if none reads it.

        Args:
            bits: The chip's output; None stores the expected output, or nothing if that is unknown.
            differs: Whether the output differs bitwise from the expected one; without a difference the
                expected array is stored, which may be shared.
        """
        key = case["name"], index
        if key not in self._last:
            return
        if bits is None or not differs:
            bits = self.expected.get(key, bits)
        if bits is not None:
            self.chip_outputs[key] = bits
            if differs:
                self.differing.add(key)

    def forget(self, number: int) -> None:
        """Drop outputs from `expected` and `chip_outputs` that no case after index `number` reads."""
        for arrays in (self.chip_outputs, self.expected):
            for key in [key for key in arrays if self._last[key] <= number]:
                del arrays[key]


def find_storage_dtype(dtype: str) -> Any:
    """Return the numpy dtype as which arrays of a named dtype are stored.

    It is the dtype itself, or unsigned integers of its width if numpy lacks the dtype.
    """
    element = run.find_dtype(dtype)
    return f"uint{8 * element.itemsize}" if element.kind == "V" or element.isbuiltin != 1 else element


def find_written_argument(case: Json, onto: Json) -> Json:
    """Return the argument that an output overwrites in part: the manifest's record, given the output's `onto`."""
    argument: Json = case["arguments"][onto["argument"]]
    return argument


def make_expected_reader(
    folder: Path, manifest: Json, name: str, weights: str | None
) -> Callable[[Json], Any]:
    """Return a function that returns the expected bits of an argument of the case `name`.

    Args:
        folder: Folder of the bundle.
        weights: Folder of the weights, or None.
    """
    chain = Chain(folder, manifest["cases"], run_weights.Weights(weights, manifest["weights"]))
    for index, case in enumerate(manifest["cases"]):
        if case["name"] == name:
            break
        chain.expect_outputs(case)
        chain.forget(index - 1)
    return lambda argument: chain.resolve(argument, chain.expected)


class Judged:
    """An output of the chip compared with the expected output.

    `record` is its entry in the result. `bits` are the compared elements: of an argument that is overwritten
    in part, only the positions that should be overwritten. `equal` is bitwise equality. `right` tells whether
    shape and dtype are as expected, nothing else was overwritten, and the difference is allowed. `error` is
    the largest absolute difference, 0 if it is unknown.

    Args of the constructor: `before` has the argument that the output overwrites and the expected positions,
    or is None. `stored` is the expected array, None if only its digests are stored or if the output is
    unexpected. Without `stored`, `right` does not depend on the elements.
    """

    def __init__(
        self, output: Json, bits: Any, dtype: str, before: tuple[Any, Any] | None, stored: Any
    ) -> None:
        tolerance = output["tolerance"]
        allowed = 0.0 if tolerance is None else tolerance["bound"] + tolerance["error"]
        stray = None
        if before is not None and list(bits.shape) == output["onto"]["shape"] and dtype == output["dtype"]:
            stray = find_stray_index(bits, *before, output, allowed)
            bits = take_positions(bits, output["onto"], before[1])
        self.bits = bits
        self.record: Json = {
            "name": output["name"],
            "file": None,
            "dtype": dtype,
            "shape": list(bits.shape),
            "tiles": run.digest_tiles(bits, *output["tile"]),
            "stray": stray,
        }
        alike = stray is None and dtype == output["dtype"] and list(bits.shape) == output["shape"]
        self.equal, self.right, self.error = False, alike, 0.0
        if alike and stored is None:
            self.equal = self.record["tiles"] == output["tiles"]
        elif alike:
            element = run.find_dtype(dtype)
            errors, _, same_bits = compare_floats(bits.view(element), stored.view(element))
            self.equal, self.error = bool(same_bits.all()), float(errors.max(initial=0.0))
            self.right = self.error <= (0.0 if element.kind in "biu" else allowed)


def find_stray_index(bits: Any, before: Any, positions: Any, output: Json, allowed: float) -> int | None:
    """Return the first index along the written axis that should be unchanged but differs by more than `allowed`.

    Returns None if there is no such index.

    Args:
        bits: The argument after the launch.
        before: The argument before the launch.
        positions: Indices along the axis that the launch should overwrite.
        output: Record of the output, with dtype and axis.
    """
    import numpy as np

    axis, element = output["onto"]["axis"], run.find_dtype(output["dtype"])
    errors, _, _ = compare_floats(bits.view(element), before.view(element))
    largest_errors = np.moveaxis(errors, axis, 0).reshape(bits.shape[axis], -1).max(axis=1, initial=0.0)
    largest_errors[positions] = 0.0
    astray = np.flatnonzero(largest_errors > allowed)
    return int(astray[0]) if len(astray) else None
