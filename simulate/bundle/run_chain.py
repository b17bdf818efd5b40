"""Arguments and expected outputs of the launches of a generation, and the judgement of outputs, on the instance.

`run_model.py` imports this module. It needs only Python's standard library and numpy.
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


def float_errors(seen: Any, expected: Any) -> tuple[Any, Any, Any]:
    """Return, for two arrays of a dtype, the absolute differences in float64, equality, and bitwise equality.

    Two NaN, and 0 and -0, are equal; the difference between NaN and any number is infinite.
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


def written(array: Any, onto: Json, positions: Any) -> Any:
    """Return the overwritten positions of an array."""
    import numpy as np

    return np.ascontiguousarray(np.take(array, positions, axis=onto["axis"]))


class Chain:
    """Arguments and expected outputs of a bundle's launches, in order; arrays contain bits.

    `expected` has expected outputs, and the chip's outputs are stored separately, both only while later
    launches read them. `differing` names the outputs of the chip that are not bitwise equal to the expected
    ones.
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

    def file(self, name: str) -> Any:
        """Return the array of a file; cached, since several launches share files."""
        import numpy as np

        if name not in self._files:
            self._files[name] = np.load(self._folder / name, allow_pickle=False)
        return self._files[name]

    def resolve(self, argument: Json, arrays: dict[Place, Any]) -> Any:
        """Return the bits of an argument, with outputs from `arrays`. Raises KeyError if an output is unknown."""
        import numpy as np

        argument_kind = argument["kind"]
        if argument_kind == "weight":
            return self._weights[argument["text"]]
        if argument_kind == "array":
            return self.file(argument["file"]).copy()
        if argument_kind == "zeros":
            return np.zeros(argument["shape"], bits_of(argument["dtype"]))
        output = arrays[argument["text"], argument["output"]]
        return output[-argument["shape"][0] :].copy() if argument["shape"] else output.copy()

    def expect(self, case: Json) -> list[tuple[Any, Any]]:
        """Return (complete output, stored part) for every output of a launch, None where it is unknown.

        Complete outputs that later launches read are kept in `expected`.
        """
        import numpy as np

        outputs: list[tuple[Any, Any]] = []
        for index, output in enumerate(case["outputs"]):
            stored = np.load(self._folder / output["file"], allow_pickle=False) if output["file"] else None
            complete, onto = stored, output["onto"]
            if onto is not None and stored is not None:
                argument = argument_of(case, onto)
                complete = self.resolve(argument, self.expected) if self.knows(argument) else None
                if complete is not None:
                    np.moveaxis(complete, onto["axis"], 0)[self.file(onto["file"])] = np.moveaxis(
                        stored, onto["axis"], 0
                    )
            outputs.append((complete, stored))
            if complete is not None and (case["name"], index) in self._last:
                self.expected[case["name"], index] = complete
        return outputs

    def knows(self, argument: Json) -> bool:
        """Return whether the expected array of an argument is available."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.expected

    def holds(self, argument: Json) -> bool:
        """Return whether the chip's array of an argument is available."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.chip_outputs

    def exact(self, case: Json) -> bool:
        """Return whether the chip's arguments of a launch are bitwise equal to the expected ones."""
        return not any(
            argument["kind"] == "result" and (argument["text"], argument["output"]) in self.differing
            for argument in case["arguments"].values()
        )

    def keep(self, case: Json, index: int, bits: Any, differs: bool) -> None:
        """Store an output of the chip if later launches read it; None stores the expected output."""
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
        """Drop the outputs that no case after index `number` reads."""
        for arrays in (self.chip_outputs, self.expected):
            for key in [key for key in arrays if self._last[key] <= number]:
                del arrays[key]


def bits_of(dtype: str) -> Any:
    """Return the dtype of numpy as which arrays of a dtype are stored."""
    element = run.dtype_named(dtype)
    return f"uint{8 * element.itemsize}" if element.kind == "V" or element.isbuiltin != 1 else element


def argument_of(case: Json, onto: Json) -> Json:
    """Return the argument that an output overwrites in part."""
    argument: Json = case["arguments"][onto["argument"]]
    return argument


def read_at(folder: Path, manifest: Json, name: str, weights: str | None) -> Callable[[Json], Any]:
    """Return a function that reads the expected arguments of a case."""
    chain = Chain(folder, manifest["cases"], run_weights.Weights(weights, manifest["weights"]))
    for index, case in enumerate(manifest["cases"]):
        if case["name"] == name:
            break
        chain.expect(case)
        chain.forget(index - 1)
    return lambda argument: chain.resolve(argument, chain.expected)


class Judged:
    """An output compared with the expected output: its record, bitwise equality, whether it may be correct.

    `before` has the argument that the output overwrites and the expected positions. `part` is the stored
    expectation, None if only its digests are stored, or if the output is unexpected. `error` is the largest
    difference.
    """

    def __init__(
        self, output: Json, bits: Any, dtype: str, before: tuple[Any, Any] | None, stored: Any
    ) -> None:
        tolerance = output["tolerance"]
        allowed = 0.0 if tolerance is None else tolerance["bound"] + tolerance["error"]
        stray = None
        if before is not None and list(bits.shape) == output["onto"]["shape"] and dtype == output["dtype"]:
            stray = strayed(bits, *before, output, allowed)
            bits = written(bits, output["onto"], before[1])
        self.bits = bits
        self.record: Json = {
            "name": output["name"],
            "file": None,
            "dtype": dtype,
            "shape": list(bits.shape),
            "tiles": run.tile_digests(bits, *output["tile"]),
            "stray": stray,
        }
        alike = stray is None and dtype == output["dtype"] and list(bits.shape) == output["shape"]
        self.equal, self.right, self.error = False, alike, 0.0
        if alike and stored is None:
            self.equal = self.record["tiles"] == output["tiles"]
        elif alike:
            element = run.dtype_named(dtype)
            errors, _, same_bits = float_errors(bits.view(element), stored.view(element))
            self.equal, self.error = bool(same_bits.all()), float(errors.max(initial=0.0))
            self.right = self.error <= (0.0 if element.kind in "biu" else allowed)


def strayed(bits: Any, before: Any, positions: Any, output: Json, allowed: float) -> int | None:
    """Return the first index along the axis that should be unchanged but differs by more than allowed."""
    import numpy as np

    axis, element = output["onto"]["axis"], run.dtype_named(output["dtype"])
    errors, _, _ = float_errors(bits.view(element), before.view(element))
    largest_errors = np.moveaxis(errors, axis, 0).reshape(bits.shape[axis], -1).max(axis=1, initial=0.0)
    largest_errors[positions] = 0.0
    astray = np.flatnonzero(largest_errors > allowed)
    return int(astray[0]) if len(astray) else None
