"""Manifest of a bundle, `bundle.json`: arguments, expected outputs and predicted times of its kernels.

The records are written by `nkw bundle` and read by `nkw compare`, which treats the file as untrusted. The
programs on the instance read the JSON itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nkw.targets import TARGETS
from simulate.bundle.generation import Generation, Weights, parse_generation, parse_weights, rename_fields
from simulate.bundle.reading import DTYPES, Fields, make_error, read_json

SCHEMA = 3
MANIFEST = "bundle.json"
KERNELS, LAYER, MODEL = "kernels", "layer", "model"
KINDS = (KERNELS, LAYER, MODEL)
DIALECTS = ("nki", "neuronxcc.nki")
ARRAY, LITERAL, DTYPE = "array", "literal", "dtype"
WEIGHT, ZEROS, RESULT = "weight", "zeros", "result"
"""Only in bundles of a model: an operand of weights, an array of zeros, an output of an earlier launch."""
ARRAYS = (ARRAY, WEIGHT, ZEROS, RESULT)


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel: an array, a Python literal, or a dtype by name.

    `name` is the kernel's parameter. `argument_kind` is "array" for an array in `file`, "literal" or "dtype"
    for what `text` says, and in bundles of a model "weight", "zeros" or "result". `text` is then the operand
    of weights, or the case that returned the result; `output` is the index of that output. A launch receives
    the last rows of a result with more rows than `shape`. Unused fields are empty.
    """

    name: str
    argument_kind: str
    file: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    text: str = ""
    output: int = 0


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of an output: it may differ from the expected output by `bound` + `error`, absolute.

    `bound` is the error of a correct kernel against the reference in float64 (`simulate.verification.bound`).
    `error` is the largest error of the expected output against that reference. Two correct outputs differ by
    the sum at most. `magnitude`, `contraction`, `roundings` and `through` are the terms of the bound, see
    `simulate.testing.tolerance`.
    """

    bound: float
    error: float
    magnitude: float
    contraction: int
    roundings: int
    through: str

    @property
    def allowed(self) -> float:
        """Largest difference of two correct outputs."""
        return self.bound + self.error


@dataclass(frozen=True)
class Onto:
    """Where an output that is an argument, such as a cache, was overwritten: some positions along one axis.

    `shape` is that of the whole argument. `file` has the positions, int32, ascending. The output's own shape
    and file hold these positions only.
    """

    argument: str
    axis: int
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Output:
    """An expected output; `file` has the array that the simulator returned.

    `tile` is (rows, columns) of a tile, with the leading dims combined into rows. `tolerance` is None without
    a reference; `why` gives the reason. `onto` describes an argument that is overwritten in part, else it is
    None. `tiles` has the SHA-256 of every tile if the array is too large, and `file` is then empty.
    `argument` is the argument that the kernel writes to and returns, empty for a new array.
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
    """A line of the kernel's source: ns for which its instructions occupy engines, and ns of the critical path."""

    file: str
    line: int
    busy_ns: float
    path_ns: float


@dataclass(frozen=True)
class Predicted:
    """Predicted times in ns: lengths of the readings, overhead of the launch, busy times of engines.

    A reading is an assumption on what overlaps in the instruction stream. `overhead_ns` is the time to start
    and end the kernel. `engines` are busy times of engines and DMA queues by name. `basis` splits the
    critical path of the program reading by how well the hardware numbers behind it are known.
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
        """Lengths in ns of the shortest and of the longest reading, without the overhead."""
        lengths = (self.dataflow_ns, self.scheduled_ns, self.program_ns, self.serial_ns)
        return min(lengths), max(lengths)


@dataclass(frozen=True)
class Instructions:
    """The instruction stream: number of instructions, counts by name, and SHA-256 of all cores' streams in order."""

    count: int
    sha256: str
    ops: dict[str, int]


@dataclass(frozen=True)
class Case:
    """A kernel on a set of arguments, with expected outputs and predicted times.

    `imports` is the name under which its file imports NKI. `lnc` counts physical cores of its logical core.
    `findings` are the codes that `nkw check` reported for the kernel. Only in bundles of a model: `step` is
    the index in the generation's steps, and `model_part` names a part of the model. `like` is the first case
    of the same kernel and shapes, whose prediction and instructions this case shares; else it is empty.
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
    model_part: str = ""
    like: str = ""


@dataclass(frozen=True)
class Expects:
    """Environment that a bundle needs: instance types, releases of NKI and SDK, versions of Python, packages."""

    instances: tuple[str, ...]
    nki: str
    sdk: str
    python: str
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bundle:
    """A bundle: the manifest as a record.

    `bundle_kind` is one of KINDS, `target` the chip. `digest` is the SHA-256 over all other files by name and
    content, and over the manifest without the digest; see docs/bundle.md. `versions` are those of the tools
    that wrote it. `generated` and `weights` are None except in bundles of a model, or of a layer with
    weights.
    """

    bundle_kind: str
    target: str
    digest: str
    versions: dict[str, str]
    expects: Expects
    cases: tuple[Case, ...]
    generated: Generation | None = None
    weights: Weights | None = None

    def find_case(self, name: str) -> Case | None:
        """Return the case with a name, or None if there is none."""
        return self._case_by_name.get(name)

    @cached_property
    def _case_by_name(self) -> dict[str, Case]:
        return {case.name: case for case in self.cases}

    def as_json(self) -> dict[str, Any]:
        """Return the manifest as JSON types, with arguments by parameter.

        A case with `like` omits prediction and instructions.
        """
        json_fields = {"schema": SCHEMA, **asdict(self, dict_factory=rename_fields)}
        for case in json_fields["cases"]:
            case["arguments"] = {argument.pop("name"): argument for argument in case["arguments"]}
            if case["like"]:
                del case["predicted"], case["instructions"]
        return json_fields


def load_bundle(folder: Path) -> Bundle:
    """Read the manifest of the bundle in a folder.

    Raises:
        InvalidArgument: (NKW-BUNDLE) If the folder or manifest is missing, malformed, of another schema or
            inconsistent.
    """
    if not folder.is_dir():
        raise make_error(f"{folder} is not a folder")
    manifest = read_json(folder, MANIFEST)
    if manifest.read_count("schema") != SCHEMA:
        raise make_error(
            f"{manifest.location} has schema {manifest.read_count('schema')}; this version reads schema {SCHEMA}"
        )
    bundle_kind = manifest.read_choice("kind", KINDS)
    cases: dict[str, Case] = {}
    for fields in manifest.read_rows("cases"):
        case = _parse_case(fields, cases)
        if case.name in cases:
            raise make_error(f"{manifest.location}: two cases are named {case.name!r:.80}; names must differ")
        cases[case.name] = case
    generation = parse_generation(manifest.read_object("generated")) if bundle_kind == MODEL else None
    if generation is not None:
        _check_chain(manifest.location, tuple(cases.values()), generation)
    return Bundle(
        bundle_kind,
        manifest.read_choice("target", TARGETS),
        manifest.read_text("digest"),
        manifest.read_named_texts("versions"),
        _parse_expectation(manifest.read_object("expects")),
        tuple(cases.values()),
        generation,
        parse_weights(manifest.read_object("weights")) if manifest.has("weights") else None,
    )


def _check_chain(location: str, cases: tuple[Case, ...], generation: Generation) -> None:
    """Check that each launch of a generation has its inputs and its step, and each step its head.

    Raises:
        InvalidArgument: If a launch needs an output that no earlier launch returns, overwrites an argument
            that it does not have, or belongs to no step; or if the case that chooses a step's token is
            absent.
    """
    earlier_cases: dict[str, Case] = {}
    for case in cases:
        for argument in case.arguments:
            source = earlier_cases.get(argument.text)
            if argument.argument_kind == RESULT and (
                source is None or argument.output >= len(source.outputs)
            ):
                raise make_error(
                    f"{location}: {case.name!r:.80} takes a result that no earlier case has; write the bundle again"
                )
        names = {argument.name for argument in case.arguments if argument.argument_kind in ARRAYS}
        for output in case.outputs:
            onto = output.onto
            if onto is not None and (onto.argument not in names or onto.axis >= len(onto.shape)):
                raise make_error(
                    f"{location}: {case.name!r:.80} writes to an argument that it does not have; write the bundle again"
                )
        if case.step >= len(generation.steps):
            raise make_error(
                f"{location}: {case.name!r:.80} is of step {case.step}, of {len(generation.steps)} steps; write the "
                "bundle again"
            )
        earlier_cases[case.name] = case
    for number, step in enumerate(generation.steps):
        head = earlier_cases.get(step.case)
        if head is None or head.step != number or max(step.values, step.tokens) >= len(head.outputs):
            raise make_error(
                f"{location}: step {number} has no launch {step.case!r:.80} that chooses its token; write the "
                "bundle again"
            )


def _parse_expectation(fields: Fields) -> Expects:
    """Parse the environment that a bundle needs."""
    return Expects(
        fields.read_texts("instances"),
        fields.read_text("nki"),
        fields.read_text("sdk"),
        fields.read_text("python"),
        fields.read_texts("packages"),
    )


def _parse_case(fields: Fields, earlier_cases: dict[str, Case]) -> Case:
    """Parse a case; a case with `like` takes prediction and instructions from that earlier case.

    Raises:
        InvalidArgument: If `like` names no earlier case, or a field is malformed.
    """
    like, arguments = fields.read_text("like", ""), fields.read_object("arguments")
    if like and like not in earlier_cases:
        raise make_error(
            f"{fields.location}: it is like {like!r:.80}, which is no earlier case; write the bundle again"
        )
    instructions = (
        earlier_cases[like].instructions if like else _parse_instructions(fields.read_object("instructions"))
    )
    return Case(
        fields.read_text("name"),
        fields.read_text("kernel"),
        fields.read_text("module"),
        fields.read_text("function"),
        fields.read_choice("imports", DIALECTS),
        fields.read_count("lnc", 1),
        tuple(_parse_argument(str(name), arguments.read_object(name)) for name in arguments.values),
        tuple(_parse_output(row) for row in fields.read_rows("outputs")),
        earlier_cases[like].predicted if like else _parse_prediction(fields.read_object("predicted")),
        instructions,
        fields.read_texts("findings"),
        fields.read_count("step"),
        fields.read_text("part", ""),
        like,
    )


def _parse_instructions(fields: Fields) -> Instructions:
    """Parse the instructions."""
    ops = {name: int(count) for name, count in fields.read_named_numbers("ops").items()}
    return Instructions(fields.read_count("count"), fields.read_text("sha256"), ops)


def _parse_argument(name: str, fields: Fields) -> Argument:
    """Parse the argument of the parameter `name`."""
    argument_kind = fields.read_choice("kind", (*ARRAYS, LITERAL, DTYPE))
    if argument_kind not in ARRAYS:
        return Argument(name, argument_kind, text=fields.read_text("text"))
    dtype, file = fields.read_choice("dtype", tuple(DTYPES)), fields.read_text("file")
    text, output = fields.read_text("text", ""), fields.read_count("output")
    return Argument(name, argument_kind, file, fields.read_shape("shape"), dtype, text, output)


def _parse_output(fields: Fields) -> Output:
    """Parse an expected output. Raises InvalidArgument if a field is malformed, such as a tile without rows."""
    tile = fields.read_shape("tile")
    if len(tile) != 2 or min(tile) < 1:
        raise make_error(
            f"{fields.location}: 'tile' is {list(tile)}; it must be two sizes of at least 1, rows and columns"
        )
    return Output(
        fields.read_text("name"),
        fields.read_text("file"),
        fields.read_shape("shape"),
        fields.read_choice("dtype", tuple(DTYPES)),
        (tile[0], tile[1]),
        _parse_tolerance(fields.read_object("tolerance")) if fields.has("tolerance") else None,
        fields.read_text("why", ""),
        _parse_onto(fields.read_object("onto")) if fields.has("onto") else None,
        fields.read_texts("tiles"),
        fields.read_text("argument", ""),
    )


def _parse_onto(fields: Fields) -> Onto:
    """Parse the positions at which an output overwrites an argument."""
    return Onto(
        fields.read_text("argument"),
        fields.read_count("axis"),
        fields.read_shape("shape"),
        fields.read_text("file"),
    )


def _parse_tolerance(fields: Fields) -> Tolerance:
    """Parse a tolerance."""
    return Tolerance(
        fields.read_number("bound"),
        fields.read_number("error"),
        fields.read_number("magnitude"),
        fields.read_count("contraction"),
        fields.read_count("roundings"),
        fields.read_text("through"),
    )


def _parse_prediction(fields: Fields) -> Predicted:
    """Parse the predicted times."""
    return Predicted(
        dataflow_ns=fields.read_number("dataflow_ns"),
        scheduled_ns=fields.read_number("scheduled_ns"),
        program_ns=fields.read_number("program_ns"),
        serial_ns=fields.read_number("serial_ns"),
        overhead_ns=fields.read_number("overhead_ns"),
        engines=fields.read_named_numbers("engines"),
        basis=fields.read_named_numbers("basis"),
        lines=tuple(
            Line(
                line.read_text("file"),
                line.read_count("line"),
                line.read_number("busy_ns"),
                line.read_number("path_ns"),
            )
            for line in fields.read_rows("lines")
        ),
    )
