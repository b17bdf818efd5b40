"""The manifest of a bundle, `bundle.json`: what its kernels are given, what they should return, how long they take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nkw.targets import TARGETS
from simulate.bundle.generation import Generation, Weights, generation_of, weights_of
from simulate.bundle.reading import DTYPES, Fields, read_json, refused

SCHEMA = 3
MANIFEST = "bundle.json"
KERNELS, LAYER, MODEL = "kernels", "layer", "model"
KINDS = (KERNELS, LAYER, MODEL)
DIALECTS = ("nki", "neuronxcc.nki")
ARRAY, LITERAL, DTYPE = "array", "literal", "dtype"
WEIGHT, ZEROS, RESULT = "weight", "zeros", "result"
"""In a bundle of a model: an operand of weights, an array of zeros, what an earlier launch returned."""
ARRAYS = (ARRAY, WEIGHT, ZEROS, RESULT)


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel: an array, a Python literal, or a dtype by its name.

    name: the kernel's parameter, by which it is given. file: of an `array`. text: the literal, the dtype, the name of
    an operand of weights, or the case that returned a `result`, whose number there is `output`; a launch is given the
    last rows of a result that has more than `shape` says. Else they are empty.
    """

    name: str
    kind: str
    file: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    text: str = ""
    output: int = 0


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
class Onto:
    """An output that is an argument with some places along an axis written anew, as caches are.

    shape: of all of it. file: the places, int32, in rising order; the output's own shape and values are theirs alone.
    """

    argument: str
    axis: int
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Output:
    """What a kernel should return in one place; `file` holds what the simulator returned.

    tile: rows and columns of one tile, where the leading dims are taken together as rows. tolerance is None where the
    kernel has no reference, with the reason in `why`. tiles: where values take too much room, and `file` is empty, the
    SHA-256 of every tile. argument: the argument that the kernel writes to and returns here, empty for a new array.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    tile: tuple[int, int]
    tolerance: Tolerance | None = None
    why: str = ""
    onto: Onto | None = None
    tiles: tuple[str, ...] = ()
    argument: str = ""


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
    `nkw check` found when the bundle was made. In a bundle of a model, step: the number of its step in the
    generation's list; part: of the model; like: the first case of the same kernel on arguments of the same shapes,
    whose predicted times and instructions it has, else empty.
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
    step: int = 0
    part: str = ""
    like: str = ""


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
    generated: Generation | None = None
    weights: Weights | None = None

    def case(self, name: str) -> Case | None:
        """The case of this name."""
        return self._case_by_name.get(name)

    @cached_property
    def _case_by_name(self) -> dict[str, Case]:
        return {case.name: case for case in self.cases}

    def as_json(self) -> dict[str, Any]:
        """The manifest as plain values: arguments by the kernel's parameters; a case has nothing that `like` has."""
        values = {"schema": SCHEMA, **asdict(self)}
        for case in values["cases"]:
            case["arguments"] = {argument.pop("name"): argument for argument in case["arguments"]}
            if case["like"]:
                del case["predicted"], case["instructions"]
        return values


def load_bundle(folder: Path) -> Bundle:
    """The manifest of a bundle. Raises InvalidArgument (NKW-BUNDLE) for one that cannot be used."""
    if not folder.is_dir():
        raise refused(f"{folder} is not a folder")
    found = read_json(folder, MANIFEST)
    if found.count("schema") != SCHEMA:
        raise refused(f"{found.place} has schema {found.count('schema')}; this version reads schema {SCHEMA}")
    kind = found.choice("kind", KINDS)
    cases: dict[str, Case] = {}
    for each in found.rows("cases"):
        case = _case(each, cases)
        if case.name in cases:
            raise refused(f"{found.place}: two cases have one name")
        cases[case.name] = case
    generation = generation_of(found.fields("generated")) if kind == MODEL else None
    if generation is not None:
        _check_chain(found.place, tuple(cases.values()), generation)
    return Bundle(
        kind,
        found.choice("target", TARGETS),
        found.text("digest"),
        found.named_texts("versions"),
        _expects(found.fields("expects")),
        tuple(cases.values()),
        generation,
        weights_of(found.fields("weights")) if found.has("weights") else None,
    )


def _check_chain(place: str, cases: tuple[Case, ...], generation: Generation) -> None:
    """Raise InvalidArgument where a launch needs what no earlier one returns, or is of no step."""
    before: dict[str, Case] = {}
    for case in cases:
        for each in case.arguments:
            source = before.get(each.text)
            if each.kind == RESULT and (source is None or each.output >= len(source.outputs)):
                raise refused(f"{place}: {case.name!r:.80} takes a result that no earlier case has")
        names = {each.name for each in case.arguments if each.kind in ARRAYS}
        for output in case.outputs:
            onto = output.onto
            if onto is not None and (onto.argument not in names or onto.axis >= len(onto.shape)):
                raise refused(f"{place}: {case.name!r:.80} writes to an argument that it does not have")
        if case.step >= len(generation.steps):
            raise refused(f"{place}: {case.name!r:.80} is of a step that is not there")
        before[case.name] = case
    for number, step in enumerate(generation.steps):
        head = before.get(step.case)
        if head is None or head.step != number or max(step.values, step.tokens) >= len(head.outputs):
            raise refused(f"{place}: a step has no launch that chooses its token")


def _expects(found: Fields) -> Expects:
    return Expects(
        found.texts("instances"),
        found.text("nki"),
        found.text("sdk"),
        found.text("python"),
        found.texts("packages"),
    )


def _case(found: Fields, before: dict[str, Case]) -> Case:
    like, arguments = found.text("like", ""), found.fields("arguments")
    if like and like not in before:
        raise refused(f"{found.place}: it is like {like!r:.80}, which is no earlier case")
    instructions = before[like].instructions if like else _instructions(found.fields("instructions"))
    return Case(
        found.text("name"),
        found.text("kernel"),
        found.text("module"),
        found.text("function"),
        found.choice("imports", DIALECTS),
        found.count("lnc", 1),
        tuple(_argument(str(name), arguments.fields(name)) for name in arguments.values),
        tuple(_output(each) for each in found.rows("outputs")),
        before[like].predicted if like else _predicted(found.fields("predicted")),
        instructions,
        found.texts("findings"),
        found.count("step"),
        found.text("part", ""),
        like,
    )


def _instructions(found: Fields) -> Instructions:
    ops = {name: int(often) for name, often in found.named_numbers("ops").items()}
    return Instructions(found.count("count"), found.text("sha256"), ops)


def _argument(name: str, found: Fields) -> Argument:
    kind = found.choice("kind", (*ARRAYS, LITERAL, DTYPE))
    if kind not in ARRAYS:
        return Argument(name, kind, text=found.text("text"))
    dtype, file = found.choice("dtype", tuple(DTYPES)), found.text("file")
    text, output = found.text("text", ""), found.count("output")
    return Argument(name, kind, file, found.shape("shape"), dtype, text, output)


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
        _onto(found.fields("onto")) if found.has("onto") else None,
        found.texts("tiles"),
        found.text("argument", ""),
    )


def _onto(found: Fields) -> Onto:
    return Onto(found.text("argument"), found.count("axis"), found.shape("shape"), found.text("file"))


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
