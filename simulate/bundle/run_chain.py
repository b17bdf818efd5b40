"""What the launches of a generation are given and should return, and how one output is judged, on the instance.

`run_model.py` imports this file. Python's standard library and numpy only.
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
"""An output: the name of its case and its number there."""


def float_errors(seen: Any, expected: Any) -> tuple[Any, Any, Any]:
    """Of two arrays of one dtype: how far apart their elements are, in float64, which are equal, and which to the bit.

    Both NaN, or 0 and -0, are equal; beside a NaN any other value is infinitely far.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        wide, exact = seen.astype(np.float64), expected.astype(np.float64)
        errors = np.abs(wide - exact)
    unsigned = f"uint{8 * seen.dtype.itemsize}"
    bits = [np.ascontiguousarray(each).view(unsigned).reshape(each.shape) for each in (seen, expected)]
    same_bits = bits[0] == bits[1]
    same = same_bits | (wide == exact) | (np.isnan(wide) & np.isnan(exact))
    return np.where(same, 0.0, np.where(np.isnan(errors), np.inf, errors)), same, same_bits


def written(whole: Any, onto: Json, places: Any) -> Any:
    """The places of an array that a launch writes anew."""
    import numpy as np

    return np.ascontiguousarray(np.take(whole, places, axis=onto["axis"]))


class Chain:
    """What the launches of a bundle are given and should return, in their order; arrays are of bits.

    `expected` and `own` hold the outputs that later launches read; those of `differing` are not as expected to the bit.
    """

    def __init__(self, folder: Path, cases: list[Json], weights: Any) -> None:
        self._folder, self._weights = folder, weights
        self._files: Json = {}
        self._last: dict[Place, int] = {}
        self.expected: dict[Place, Any] = {}
        self.own: dict[Place, Any] = {}
        self.differing: set[Place] = set()
        for number, case in enumerate(cases):
            for each in case["arguments"].values():
                if each["kind"] == "result":
                    self._last[each["text"], each["output"]] = number

    def file(self, name: str) -> Any:
        """The array of a file, which is kept: a table of rotations, or the places of one token in every cache."""
        import numpy as np

        if name not in self._files:
            self._files[name] = np.load(self._folder / name, allow_pickle=False)
        return self._files[name]

    def given(self, argument: Json, arrays: dict[Place, Any]) -> Any:
        """The bits of an argument, of results those in `arrays`; KeyError where it is unknown what is expected."""
        import numpy as np

        kind = argument["kind"]
        if kind == "weight":
            return self._weights[argument["text"]]
        if kind == "array":
            return self.file(argument["file"]).copy()
        if kind == "zeros":
            return np.zeros(argument["shape"], bits_of(argument["dtype"]))
        whole = arrays[argument["text"], argument["output"]]
        return whole[-argument["shape"][0] :].copy() if argument["shape"] else whole.copy()

    def expect(self, case: Json) -> list[tuple[Any, Any]]:
        """The outputs of a launch as expected, as far as values travel, and of each what is compared of it."""
        import numpy as np

        found: list[tuple[Any, Any]] = []
        for number, output in enumerate(case["outputs"]):
            part = np.load(self._folder / output["file"], allow_pickle=False) if output["file"] else None
            whole, onto = part, output["onto"]
            if onto is not None and part is not None:
                argument = argument_of(case, onto)
                whole = self.given(argument, self.expected) if self.knows(argument) else None
                if whole is not None:
                    np.moveaxis(whole, onto["axis"], 0)[self.file(onto["file"])] = np.moveaxis(
                        part, onto["axis"], 0
                    )
            found.append((whole, part))
            if whole is not None and (case["name"], number) in self._last:
                self.expected[case["name"], number] = whole
        return found

    def knows(self, argument: Json) -> bool:
        """Whether an argument's expected value is there."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.expected

    def holds(self, argument: Json) -> bool:
        """Whether an argument's own value is there."""
        return argument["kind"] != "result" or (argument["text"], argument["output"]) in self.own

    def exact(self, case: Json) -> bool:
        """Whether a launch's own arguments are the expected ones to the bit."""
        return not any(
            each["kind"] == "result" and (each["text"], each["output"]) in self.differing
            for each in case["arguments"].values()
        )

    def keep(self, case: Json, place: int, value: Any, differs: bool) -> None:
        """Note an own output where later launches read it; the expected one with None."""
        key = case["name"], place
        if key not in self._last:
            return
        if value is None or not differs:
            value = self.expected.get(key, value)
        if value is not None:
            self.own[key] = value
            if differs:
                self.differing.add(key)

    def forget(self, number: int) -> None:
        """Let go of what no case after this one reads."""
        for arrays in (self.own, self.expected):
            for key in [key for key in arrays if self._last[key] <= number]:
                del arrays[key]


def bits_of(dtype: str) -> Any:
    """The dtype of numpy's own under which arrays of a dtype are stored."""
    found = run.dtype_named(dtype)
    return f"uint{8 * found.itemsize}" if found.kind == "V" or found.isbuiltin != 1 else found


def argument_of(case: Json, onto: Json) -> Json:
    """The argument that an output is written onto."""
    found: Json = case["arguments"][onto["argument"]]
    return found


def read_at(folder: Path, manifest: Json, name: str, weights: str | None) -> Callable[[Json], Any]:
    """Reads the expected arguments of one case."""
    chain = Chain(folder, manifest["cases"], run_weights.Weights(weights, manifest["weights"]))
    for number, case in enumerate(manifest["cases"]):
        if case["name"] == name:
            break
        chain.expect(case)
        chain.forget(number - 1)
    return lambda argument: chain.given(argument, chain.expected)


class Judged:
    """One output held against what is expected: its record, whether it is equal to the bit, whether it may be right.

    `before` is the argument that it is written onto, with the places that are expected to be written, `part` what is
    expected: None where only its digests travel, or no such output is expected. `error` is the largest difference.
    """

    def __init__(
        self, output: Json, bits: Any, dtype: str, before: tuple[Any, Any] | None, part: Any
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
        if alike and part is None:
            self.equal = self.record["tiles"] == output["tiles"]
        elif alike:
            element = run.dtype_named(dtype)
            errors, _, same_bits = float_errors(bits.view(element), part.view(element))
            self.equal, self.error = bool(same_bits.all()), float(errors.max(initial=0.0))
            self.right = self.error <= (0.0 if element.kind in "biu" else allowed)


def strayed(bits: Any, before: Any, places: Any, output: Json, allowed: float) -> int | None:
    """The first place along the axis that should be as it was and differs from the argument, beyond what is allowed."""
    import numpy as np

    axis, element = output["onto"]["axis"], run.dtype_named(output["dtype"])
    errors, _, _ = float_errors(bits.view(element), before.view(element))
    most = np.moveaxis(errors, axis, 0).reshape(bits.shape[axis], -1).max(axis=1, initial=0.0)
    most[places] = 0.0
    astray = np.flatnonzero(most > allowed)
    return int(astray[0]) if len(astray) else None
