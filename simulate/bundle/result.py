"""Records of `result/result.json`, which `run.py` writes; the file is untrusted.

bundle, result = load(Path("matmul-trn2"))
for case in result.cases:
    predicted = bundle.find_case(case.name).predicted
    if case.times: print(case.name, case.times.median_ns, predicted.bracket_ns, case.times.clock)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from simulate.bundle.manifest import Bundle, Case, load_bundle
from simulate.bundle.reading import DTYPES, Fields, make_error, read_array, read_json, resolve_inside

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
    """Environment of a run: versions of packages, instance type, device files, NEURON_* and NKI_* variables."""

    python: str
    platform: str
    packages: dict[str, str]
    instance: str | None
    devices: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True)
class Values:
    """An output that a kernel returned: its array in a file, the SHA-256 of its tiles in row-major order, or neither.

    `dtype` and `shape` are those of the chip. `stray` concerns an argument that the kernel overwrites in
    part. It is the first index along the written axis that should be unchanged but is not, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str | None
    tiles: tuple[str, ...] | None
    stray: int | None = None


@dataclass(frozen=True)
class Times:
    """Measured times of a case in ns; `clock` is "device", or "host", whose times include starting the kernel.

    `warmup` counts launches before the timed ones. `spread_ns` is the interquartile range of the repetitions,
    which may be empty if only their quantiles are known.
    """

    warmup: int
    repetitions_ns: tuple[float, ...]
    median_ns: float
    spread_ns: float
    clock: str


@dataclass(frozen=True)
class CaseResult:
    """Outcome of a case. `stage` and `error` describe a failure, possibly after the kernel ran.

    `status` is one of STATUSES; `error` is (type, message). `log` and `profile` are names relative to the
    result folder, or None. The remaining fields are for bundles of a model. `inputs` tells whether the
    outputs belong to the `expected` inputs or to the launch's `own` inputs, which differ within tolerances.
    `drift` has the error of each output of own inputs beyond the tolerance, after which the launch was
    repeated with the expected inputs. `token` is the likeliest token if the launch is the head, which chooses
    the token.
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
    """Result of a run: `bundle` is the digest of the bundle that ran.

    `finished` is None if run.py was interrupted. `started` and `finished` are times in UTC. `failures` are
    (stage, message) that belong to no case.
    """

    bundle: str
    target: str
    started: str
    finished: str | None
    environment: Environment
    launcher: str | None
    cases: tuple[CaseResult, ...]
    failures: tuple[tuple[str, str], ...]

    def find_case(self, name: str) -> CaseResult | None:
        """Return the result of the case with a name, or None if it was not requested."""
        return self._case_by_name.get(name)

    @cached_property
    def _case_by_name(self) -> dict[str, CaseResult]:
        return {case.name: case for case in self.cases}


def load(folder: Path) -> tuple[Bundle, Result]:
    """Read a bundle and its result from a folder.

    Raises:
        InvalidArgument: (NKW-BUNDLE) If either is missing, malformed or of another schema, or if a case of
            the result is not in the bundle or is there twice.
    """
    bundle = load_bundle(folder)
    if not resolve_inside(folder, f"{RESULT_FOLDER}/{RESULT}").exists():
        raise make_error(
            f"{folder} has no result yet: run `python run.py` in it on the instance, copy its folder "
            f"{RESULT_FOLDER} back to {folder / RESULT_FOLDER}, then compare"
        )
    document = read_json(folder, f"{RESULT_FOLDER}/{RESULT}")
    if document.read_count("schema") != SCHEMA:
        raise make_error(
            f"{document.location} has schema {document.read_count('schema')}; this version reads schema {SCHEMA}"
        )
    cases = tuple(_parse_case(row) for row in document.read_rows("cases"))
    names: set[str] = set()
    for case in cases:
        if bundle.find_case(case.name) is None or case.name in names:
            raise make_error(
                f"{document.location}: {case.name!r:.60} is not a case of the bundle, or is there twice; copy the "
                "result of this bundle back"
            )
        names.add(case.name)
    return bundle, Result(
        document.read_text("bundle"),
        document.read_text("target"),
        document.read_text("started"),
        document.read_optional_text("finished"),
        _parse_environment(document.read_object("environment")),
        document.read_choice("launcher", LAUNCHERS) if document.has("launcher") else None,
        cases,
        tuple(
            (failure.read_text("stage"), failure.read_text("message"))
            for failure in document.read_rows("failures")
        ),
    )


def read_output(folder: Path, values: Values) -> np.ndarray:
    """Return the array of an output that a kernel returned on the chip, in the output's dtype and shape.

    Args:
        folder: Folder of the bundle; the file is read from its folder `result`.

    Raises:
        InvalidArgument: If the array was not written or cannot be read.
    """
    if values.file is None:
        raise make_error(
            f"the array of {values.name} was not written on the instance; run the case there again"
        )
    return read_array(folder / RESULT_FOLDER, values.file, values.dtype, values.shape)


def read_expected(folder: Path, case: Case, number: int) -> np.ndarray:
    """Return the array of the expected output with index `number` of a case, in the output's dtype and shape.

    Args:
        folder: Folder of the bundle.

    Raises:
        InvalidArgument: If the array cannot be read; also if the bundle has only digests of its tiles.
    """
    output = case.outputs[number]
    return read_array(folder, output.file, output.dtype, output.shape)


def _parse_environment(fields: Fields) -> Environment:
    """Parse the environment."""
    return Environment(
        fields.read_text("python"),
        fields.read_text("platform"),
        fields.read_named_texts("packages"),
        fields.read_optional_text("instance"),
        fields.read_texts("devices"),
        fields.read_named_texts("variables"),
    )


def _parse_case(fields: Fields) -> CaseResult:
    """Parse the outcome of a case."""
    error = fields.read_object("error") if fields.has("error") else None
    return CaseResult(
        fields.read_text("name"),
        fields.read_choice("status", STATUSES),
        fields.read_choice("stage", STAGES) if fields.has("stage") else None,
        (error.read_text("type"), error.read_text("message")) if error else None,
        fields.read_optional_text("log"),
        tuple(_parse_output(row) for row in fields.read_rows("outputs")),
        _parse_times(fields.read_object("times")) if fields.has("times") else None,
        fields.read_optional_text("profile"),
        fields.read_choice("inputs", INPUTS) if fields.has("inputs") else EXPECTED,
        fields.read_numbers("drift") if fields.has("drift") else (),
        fields.read_count("token") if fields.has("token") else None,
    )


def _parse_output(fields: Fields) -> Values:
    """Parse a returned output."""
    return Values(
        fields.read_text("name"),
        fields.read_choice("dtype", tuple(DTYPES)),
        fields.read_shape("shape"),
        fields.read_optional_text("file"),
        fields.read_texts("tiles") if fields.has("tiles") else None,
        fields.read_count("stray") if fields.has("stray") else None,
    )


def _parse_times(fields: Fields) -> Times:
    """Parse the measured times."""
    return Times(
        fields.read_count("warmup"),
        fields.read_numbers("repetitions_ns"),
        fields.read_number("median_ns"),
        fields.read_number("spread_ns"),
        fields.read_choice("clock", CLOCKS),
    )
