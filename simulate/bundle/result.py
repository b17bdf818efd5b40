"""What `run.py` brought back, `result/result.json`, as records; nothing of the files is taken for granted.

bundle, result = load(Path("matmul-trn2"))
for case in result.cases:
    predicted = bundle.case(case.name).predicted
    if case.times: print(case.name, case.times.median_ns, predicted.bracket_ns, case.times.clock)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from simulate.bundle.manifest import Bundle, Case, load_bundle
from simulate.bundle.reading import DTYPES, Fields, read_array, read_json, refused, within

RESULT_FOLDER = "result"
RESULT = "result.json"
SCHEMA = 2
LAUNCHERS = ("nki", "neuronxcc", "torchneuron", "torch_xla")
RAN, FAILED, SKIPPED = STATUSES = ("ran", "failed", "skipped")
STAGES = ("import", "compile", "run", "time", "profile", "read", "write")
DEVICE, HOST = CLOCKS = ("device", "host")
EXPECTED, OWN = INPUTS = ("expected", "own")


@dataclass(frozen=True)
class Environment:
    """Where a bundle ran: versions of packages, instance type, device files, NEURON_* and NKI_* variables."""

    python: str
    platform: str
    packages: dict[str, str]
    instance: str | None
    devices: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True)
class Values:
    """What a kernel returned in one place: its values in a file, the SHA-256 of every tile row by row, or neither.

    stray: where the output is an argument written to in part, the first place that differs and should be as it was.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str | None
    tiles: tuple[str, ...] | None
    stray: int | None = None


@dataclass(frozen=True)
class Times:
    """Measured times of one case, in ns; `clock` is "device" or "host", whose times include starting the kernel.

    spread_ns: the interquartile range of the repetitions.
    """

    warmup: int
    repetitions_ns: tuple[float, ...]
    median_ns: float
    spread_ns: float
    clock: str


@dataclass(frozen=True)
class CaseResult:
    """What became of one case: `stage` and `error` say where it failed and how; it may have run and failed later.

    log, profile: files of the result folder, or None. In a bundle of a model, inputs: whether the outputs are those of
    the `expected` inputs, or of the launch's `own`, which differ from them within tolerances; drift: where outputs of
    its own inputs were beyond the tolerance, and the launch was made again with the expected ones, how far each was;
    token: the likeliest token, where it is the head.
    """

    name: str
    status: str
    stage: str | None
    error: tuple[str, str] | None
    log: str | None
    outputs: tuple[Values, ...]
    times: Times | None
    profile: str | None
    inputs: str = EXPECTED
    drift: tuple[float, ...] = ()
    token: int | None = None


@dataclass(frozen=True)
class Result:
    """What came back: `bundle` is the digest of the bundle that ran, `finished` None where run.py was cut short."""

    bundle: str
    target: str
    started: str
    finished: str | None
    environment: Environment
    launcher: str | None
    cases: tuple[CaseResult, ...]
    failures: tuple[tuple[str, str], ...]

    def case(self, name: str) -> CaseResult | None:
        """The result of the case of this name."""
        return self._case_by_name.get(name)

    @cached_property
    def _case_by_name(self) -> dict[str, CaseResult]:
        return {case.name: case for case in self.cases}


def load(folder: Path) -> tuple[Bundle, Result]:
    """A bundle and its result. Raises InvalidArgument (NKW-BUNDLE) with one sentence where either cannot be used."""
    bundle = load_bundle(folder)
    if not within(folder, f"{RESULT_FOLDER}/{RESULT}").exists():
        raise refused(
            f"{folder} has no result yet: run `python run.py` in it on the instance, copy its folder "
            f"{RESULT_FOLDER} back to {folder / RESULT_FOLDER}, then compare"
        )
    found = read_json(folder, f"{RESULT_FOLDER}/{RESULT}")
    if found.count("schema") != SCHEMA:
        raise refused(f"{found.place} has schema {found.count('schema')}; this version reads schema {SCHEMA}")
    cases = tuple(_case(each) for each in found.rows("cases"))
    names: set[str] = set()
    for case in cases:
        if bundle.case(case.name) is None or case.name in names:
            raise refused(f"{found.place}: {case.name!r:.60} is no case of the bundle, or there twice")
        names.add(case.name)
    return bundle, Result(
        found.text("bundle"),
        found.text("target"),
        found.text("started"),
        found.optional_text("finished"),
        _environment(found.fields("environment")),
        found.choice("launcher", LAUNCHERS) if found.has("launcher") else None,
        cases,
        tuple((each.text("stage"), each.text("message")) for each in found.rows("failures")),
    )


def values_of(folder: Path, values: Values) -> np.ndarray:
    """The values that a kernel returned on the chip, in their dtype. Raises InvalidArgument for unreadable ones."""
    if values.file is None:
        raise refused(f"the values of {values.name} were not written")
    return read_array(folder / RESULT_FOLDER, values.file, values.dtype, values.shape)


def expected_of(folder: Path, case: Case, number: int) -> np.ndarray:
    """What output `number` of a case should be. Raises InvalidArgument where it cannot be read."""
    output = case.outputs[number]
    return read_array(folder, output.file, output.dtype, output.shape)


def _environment(found: Fields) -> Environment:
    return Environment(
        found.text("python"),
        found.text("platform"),
        found.named_texts("packages"),
        found.optional_text("instance"),
        found.texts("devices"),
        found.named_texts("variables"),
    )


def _case(found: Fields) -> CaseResult:
    error = found.fields("error") if found.has("error") else None
    return CaseResult(
        found.text("name"),
        found.choice("status", STATUSES),
        found.choice("stage", STAGES) if found.has("stage") else None,
        (error.text("type"), error.text("message")) if error else None,
        found.optional_text("log"),
        tuple(_values(each) for each in found.rows("outputs")),
        _times(found.fields("times")) if found.has("times") else None,
        found.optional_text("profile"),
        found.choice("inputs", INPUTS) if found.has("inputs") else EXPECTED,
        found.numbers("drift") if found.has("drift") else (),
        found.count("token") if found.has("token") else None,
    )


def _values(found: Fields) -> Values:
    return Values(
        found.text("name"),
        found.choice("dtype", tuple(DTYPES)),
        found.shape("shape"),
        found.optional_text("file"),
        found.texts("tiles") if found.has("tiles") else None,
        found.count("stray") if found.has("stray") else None,
    )


def _times(found: Fields) -> Times:
    return Times(
        found.count("warmup"),
        found.numbers("repetitions_ns"),
        found.number("median_ns"),
        found.number("spread_ns"),
        found.choice("clock", CLOCKS),
    )
