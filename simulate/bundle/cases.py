"""Cases of a bundle in preparation, and the written bundle; `nkw bundle` uses both.

A case is a kernel on certain arguments, with expected outputs, tolerances and predicted times.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nkw.report import Hanging, Part
from simulate.bundle.build import Arrays, build_case, make_case
from simulate.bundle.folder import collect_files, write_folder
from simulate.bundle.generation import Generation, Weights
from simulate.bundle.manifest import WEIGHT, Bundle, Case, Expects
from simulate.bundle.sources import Sources
from simulate.hardware import Hardware
from simulate.hardware.instances import INSTANCES
from simulate.level import Level
from simulate.verification.bound import Reference
from simulate.verification.inputs import Call

_SDK = {"0.2": "2.28", "0.3": "2.29", "0.4": "2.30", "0.5": "2.31", "0.6": "2.32", "0.7": "2.33"}
_BETA1_SDK = "2.20 to 2.27"


@dataclass(frozen=True)
class Written:
    """A bundle that was written to a folder; `nbytes` counts the bytes of all of its files but the manifest."""

    folder: Path
    bundle: Bundle
    nbytes: int

    def make_report(self, left_out: Sequence[str] = ()) -> list[Part]:
        """Return the report of `nkw bundle` for a terminal: what was written and left out, and what to do next.

        Args:
            left_out: A line for each kernel left out.
        """
        count, lnc = (
            format_launch_count(len(self.bundle.cases)),
            max((case.lnc for case in self.bundle.cases), default=1),
        )
        command = f"python {self.folder.name}/run.py"
        command += " --weights FOLDER" if self.bundle.weights and self.bundle.weights.files else ""
        return [
            Hanging(
                f"{self.folder}: {count} for {self.bundle.target} (LNC {lnc}), {self.nbytes:,} bytes",
                style="bold",
            ),
            *(Hanging(f"left out: {reason}") for reason in left_out),
            Hanging(f"on the instance: {command}; here, afterwards: nkw compare {self.folder}"),
        ]

    def make_document(self, left_out: Sequence[str] = ()) -> dict[str, Any]:
        """Return what was written and left out, as JSON types for `nkw bundle --json`."""
        cases = [
            {"name": case.name, "lnc": case.lnc, "instructions": case.instructions.count}
            for case in self.bundle.cases
        ]
        return {
            "folder": str(self.folder),
            "digest": self.bundle.digest,
            "bytes": self.nbytes,
            "cases": cases,
            "left_out": list(left_out),
        }


@dataclass
class Cases:
    """Cases in order, with their arrays by file name and the source files that they need."""

    cases: list[Case] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)

    def add(
        self, kernel_name: str, arguments: Sequence[str], name: str, reference: Reference | None = None
    ) -> None:
        """Build the case of a kernel on arguments given as text, and append it with its arrays and sources.

        See `build_case` for the arguments and errors.
        """
        self._append(build_case(kernel_name, arguments, name, self.sources, reference))

    def add_launch(
        self,
        kernel: Callable[..., Any],
        words: str,
        args: tuple[Any, ...],
        name: str,
        chip: Hardware,
        operands: Mapping[int, str],
        cores: int = 1,
    ) -> None:
        """Build the case of a plain function on these arguments, and append it with its arrays and sources.

        Args:
            words: FILE.py:NAME or MODULE:NAME of the function.
            args: Positional arguments; the kernel is launched on copies.
            operands: Names of operands of weights by `id` of their arrays; these arrays are not stored.
            cores: Physical cores of the logical core that runs the kernel.

        Raises:
            InvalidArgument: As `make_case`.
        """
        call = Call(args, {})
        self._append(
            make_case(kernel, words, call, name, self.sources, chip=chip, cores=cores, operands=operands)
        )

    def _append(self, built: tuple[Case, Arrays]) -> None:
        """Append a case, and add its arrays by file name."""
        case, arrays = built
        self.cases.append(case)
        self.arrays.update(arrays)

    def write(
        self,
        folder: Path,
        bundle_kind: str,
        target: str,
        generation: Generation | None = None,
        weights: Weights | None = None,
    ) -> Written:
        """Write the cases as a bundle of a kind into `folder`, and return it.

        Only operands of weights that a case uses are written, and the random tensors that they need.

        Args:
            bundle_kind: KERNELS, LAYER or MODEL.

        Raises:
            InvalidArgument: If the folder is not empty or cannot be written, or if the bundle is too large.
        """
        if weights is not None:
            weight_names = {
                argument.text
                for case in self.cases
                for argument in case.arguments
                if argument.argument_kind == WEIGHT
            }
            operands = tuple(operand for operand in weights.operands if operand.name in weight_names)
            tensors = {piece.tensor for operand in operands for piece in operand.pieces}
            random_tensors = tuple(tensor for tensor in weights.drawn if tensor.name in tensors)
            weights = replace(weights, operands=operands, drawn=random_tensors)
        expects = _make_expectation(target, self.cases, self.sources)
        bundle = Bundle(
            bundle_kind, target, "", _read_versions(), expects, tuple(self.cases), generation, weights
        )
        files = collect_files(bundle, self.sources.files, self.arrays)
        return Written(folder, write_folder(folder, bundle, files), sum(map(len, files.values())))


def format_launch_count(count: int) -> str:
    """Return a count with its noun: "1 kernel launch", "3 kernel launches"."""
    return f"{count} kernel launch{'' if count == 1 else 'es'}"


def _read_versions() -> dict[str, str]:
    """Return the versions of this project and of numpy."""
    project = importlib.import_module(__name__.partition(".")[0])
    return {"nki-workbench": project.__version__, "numpy": np.__version__}


def _make_expectation(target: str, cases: Sequence[Case], sources: Sources) -> Expects:
    """Return the environment that the cases need: instance types of the target, releases, packages."""
    instances = tuple(
        instance.name
        for instance in INSTANCES.values()
        if instance.target == target and instance.members == 1
    )
    beta1 = any(case.imports != "nki" for case in cases)
    level = str(Level.resolve())
    sdk = _BETA1_SDK if beta1 else _SDK[level]
    return Expects(
        instances, "Beta 1" if beta1 else level, sdk, "3.10 to 3.14", tuple(sorted(sources.packages))
    )
