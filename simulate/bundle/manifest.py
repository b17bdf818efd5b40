"""The manifest of a bundle, `bundle.json`: what its kernels are given, what they should return, how long they take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulate.bundle.reading import DTYPES, Fields, read_json, refused
from simulate.targets import TARGETS

SCHEMA = 1
MANIFEST = "bundle.json"
KERNELS, LAYER = "kernels", "layer"
KINDS = (KERNELS, LAYER)
DIALECTS = ("nki", "neuronxcc.nki")
ARRAY, LITERAL, DTYPE = "array", "literal", "dtype"


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel: an array in a file, a Python literal, or a dtype by its name.

    name: the kernel's parameter. keyword: whether it is given by name. text: the literal or the dtype, else empty.
    """

    name: str
    kind: str
    keyword: bool = False
    file: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    text: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How far an output may lie from the expected one: `bound` and `error` together, as absolute errors.

    bound: the error that a right kernel may have against the reference in float64 (`simulate.verification.bound`).
    error: the largest error of the expected output against that reference. Two right outputs differ by no more than the
    sum. magnitude, contraction, roundings, through: the terms of the bound, see `simulate.testing.tolerance`.
    """

    bound: float
    error: float
    magnitude: float
    contraction: int
    roundings: int
    through: str

    @property
    def allowed(self) -> float:
        """The largest difference of two right outputs."""
        return self.bound + self.error


@dataclass(frozen=True)
class Output:
    """What a kernel should return in one place; `file` holds what the simulator returned.

    tile: rows and columns of one tile, where the leading dims are taken together as rows. tolerance is None where the
    kernel has no reference, with the reason in `why`.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    tile: tuple[int, int]
    tolerance: Tolerance | None = None
    why: str = ""


@dataclass(frozen=True)
class Line:
    """A line of the kernel's source, how long its instructions are busy and their part of the critical path."""

    file: str
    line: int
    busy_ns: float
    path_ns: float


@dataclass(frozen=True)
class Predicted:
    """Predicted times, in ns: the lengths of the readings, the overhead on top of each, how long engines are busy.

    basis: the parts of the critical path (program reading) that rest on numbers of each confidence.
    """

    dataflow_ns: float
    scheduled_ns: float
    program_ns: float
    serial_ns: float
    overhead_ns: float
    engines: dict[str, float]
    basis: dict[str, float]
    lines: tuple[Line, ...] = ()

    @property
    def bracket_ns(self) -> tuple[float, float]:
        """The shortest and the longest reading."""
        lengths = (self.dataflow_ns, self.scheduled_ns, self.program_ns, self.serial_ns)
        return min(lengths), max(lengths)


@dataclass(frozen=True)
class Instructions:
    """The instruction stream: how many, of which names, and the SHA-256 of the stream of every core in order."""

    count: int
    sha256: str
    ops: dict[str, int]


@dataclass(frozen=True)
class Case:
    """A kernel on one set of arguments.

    imports: the name under which its file imports NKI. lnc: physical cores of its logical core. findings: codes that
    `nkw check` found when the bundle was made.
    """

    name: str
    kernel: str
    module: str
    function: str
    imports: str
    lnc: int
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    predicted: Predicted
    instructions: Instructions
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expects:
    """The environment a bundle is made for: instance types, releases of NKI and SDK, versions of Python, packages."""

    instances: tuple[str, ...]
    nki: str
    sdk: str
    python: str
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """A bundle; `digest` is the SHA-256 over its other files, by name and content, see docs/bundle.md."""

    kind: str
    target: str
    digest: str
    versions: dict[str, str]
    expects: Expects
    cases: tuple[Case, ...]

    def case(self, name: str) -> Case | None:
        """The case of this name."""
        return next((each for each in self.cases if each.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """The manifest as plain values."""
        return {"schema": SCHEMA, **asdict(self)}


def load_bundle(folder: Path) -> Bundle:
    """The manifest of a bundle. Raises InvalidArgument (NKW-BUNDLE) for one that cannot be used."""
    if not folder.is_dir():
        raise refused(f"{folder} is not a folder")
    found = read_json(folder, MANIFEST)
    if found.count("schema") != SCHEMA:
        raise refused(f"{found.place} has schema {found.count('schema')}; this version reads schema {SCHEMA}")
    cases = tuple(_case(each) for each in found.rows("cases"))
    if len({each.name for each in cases}) < len(cases):
        raise refused(f"{found.place}: two cases have one name")
    return Bundle(
        found.choice("kind", KINDS),
        found.choice("target", TARGETS),
        found.text("digest"),
        found.named_texts("versions"),
        _expects(found.fields("expects")),
        cases,
    )


def _expects(found: Fields) -> Expects:
    return Expects(
        found.texts("instances"),
        found.text("nki"),
        found.text("sdk"),
        found.text("python"),
        found.texts("packages"),
    )


def _case(found: Fields) -> Case:
    instructions = found.fields("instructions")
    return Case(
        found.text("name"),
        found.text("kernel"),
        found.text("module"),
        found.text("function"),
        found.choice("imports", DIALECTS),
        found.count("lnc", 1),
        tuple(_argument(each) for each in found.rows("arguments")),
        tuple(_output(each) for each in found.rows("outputs")),
        _predicted(found.fields("predicted")),
        Instructions(
            instructions.count("count"),
            instructions.text("sha256"),
            {name: int(often) for name, often in instructions.named_numbers("ops").items()},
        ),
        found.texts("findings"),
    )


def _argument(found: Fields) -> Argument:
    kind = found.choice("kind", (ARRAY, LITERAL, DTYPE))
    name, keyword = found.text("name"), found.flag("keyword")
    if kind != ARRAY:
        return Argument(name, kind, keyword, text=found.text("text"))
    dtype = found.choice("dtype", tuple(DTYPES))
    return Argument(name, kind, keyword, found.text("file"), found.shape("shape"), dtype)


def _output(found: Fields) -> Output:
    tile = found.shape("tile")
    if len(tile) != 2 or min(tile) < 1:
        raise refused(f"{found.place}: 'tile' is {list(tile)}; rows and columns are wanted")
    return Output(
        found.text("name"),
        found.text("file"),
        found.shape("shape"),
        found.choice("dtype", tuple(DTYPES)),
        (tile[0], tile[1]),
        _tolerance(found.fields("tolerance")) if found.has("tolerance") else None,
        found.text("why", ""),
    )


def _tolerance(found: Fields) -> Tolerance:
    return Tolerance(
        found.number("bound"),
        found.number("error"),
        found.number("magnitude"),
        found.count("contraction"),
        found.count("roundings"),
        found.text("through"),
    )


def _predicted(found: Fields) -> Predicted:
    return Predicted(
        dataflow_ns=found.number("dataflow_ns"),
        scheduled_ns=found.number("scheduled_ns"),
        program_ns=found.number("program_ns"),
        serial_ns=found.number("serial_ns"),
        overhead_ns=found.number("overhead_ns"),
        engines=found.named_numbers("engines"),
        basis=found.named_numbers("basis"),
        lines=tuple(
            Line(each.text("file"), each.count("line"), each.number("busy_ns"), each.number("path_ns"))
            for each in found.rows("lines")
        ),
    )
