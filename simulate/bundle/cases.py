"""The cases of a bundle that is being made, and the bundle once it is written."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nkw.parts import Hanging, Part
from simulate.bundle.build import Arrays, build_case, case_of
from simulate.bundle.folder import contents, write
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
    """A bundle in its folder; `nbytes` are those of all its files but the manifest."""

    folder: Path
    bundle: Bundle
    nbytes: int

    def report(self, left_out: Sequence[str] = ()) -> list[Part]:
        """What was written and what was left out, for a terminal."""
        count, lnc = several(len(self.bundle.cases)), max((case.lnc for case in self.bundle.cases), default=1)
        command = f"python {self.folder.name}/run.py"
        command += " --weights FOLDER" if self.bundle.weights and self.bundle.weights.files else ""
        return [
            Hanging(
                f"{self.folder}: {count} for {self.bundle.target} (LNC {lnc}), {self.nbytes:,} bytes",
                style="bold",
            ),
            *(Hanging(f"left out: {each}") for each in left_out),
            Hanging(f"on the instance: {command}; here, afterwards: nkw compare {self.folder}"),
        ]

    def document(self, left_out: Sequence[str] = ()) -> dict[str, Any]:
        """The same as plain values."""
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
    """Cases in their order, with their arrays by file and the source files that they need."""

    cases: list[Case] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)

    def add(
        self, words: str, arguments: Sequence[str], name: str, reference: Reference | None = None
    ) -> None:
        """Add a kernel on the arguments that words stand for, see `build_case`."""
        self._take(build_case(words, arguments, name, self.sources, reference))

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
        """Add the plain function that `words` name on these very arguments, on physical cores of a rank of a chip.

        See `case_of`.
        """
        call = Call(args, {})
        self._take(
            case_of(kernel, words, call, name, self.sources, chip=chip, cores=cores, operands=operands)
        )

    def _take(self, built: tuple[Case, Arrays]) -> None:
        case, arrays = built
        self.cases.append(case)
        self.arrays.update(arrays)

    def write(
        self,
        folder: Path,
        kind: str,
        target: str,
        generation: Generation | None = None,
        weights: Weights | None = None,
    ) -> Written:
        """Write all of it as a bundle of this kind, see `folder.write` for what is refused."""
        if weights is not None:
            used = {each.text for case in self.cases for each in case.arguments if each.kind == WEIGHT}
            operands = tuple(each for each in weights.operands if each.name in used)
            tensors = {piece.tensor for each in operands for piece in each.pieces}
            drawn = tuple(each for each in weights.drawn if each.name in tensors)
            weights = replace(weights, operands=operands, drawn=drawn)
        expects = _expects(target, self.cases, self.sources)
        bundle = Bundle(kind, target, "", _versions(), expects, tuple(self.cases), generation, weights)
        files = contents(bundle, self.sources.files, self.arrays)
        return Written(folder, write(folder, bundle, files), sum(map(len, files.values())))


def several(count: int) -> str:
    """A number of kernel launches."""
    return f"{count} kernel launch{'' if count == 1 else 'es'}"


def _versions() -> dict[str, str]:
    project = importlib.import_module(__name__.partition(".")[0])
    return {"nki-workbench": project.__version__, "numpy": np.__version__}


def _expects(target: str, cases: Sequence[Case], sources: Sources) -> Expects:
    instances = tuple(each.name for each in INSTANCES.values() if each.target == target and each.members == 1)
    beta1 = any(each.imports != "nki" for each in cases)
    level = str(Level.of())
    sdk = _BETA1_SDK if beta1 else _SDK[level]
    return Expects(
        instances, "Beta 1" if beta1 else level, sdk, "3.10 to 3.14", tuple(sorted(sources.packages))
    )
