"""Records of a bundle of a model, in addition to its launches: weights by reference, prompts and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulate.bundle.reading import DTYPES, Fields, make_error

_JSON_NAMES = {"argument_kind": "kind", "bundle_kind": "kind", "model_part": "part", "origin": "at"}
"""Names in the manifest of fields that have longer names here."""


def rename_fields(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a record's fields under their names in the manifest, as `dict_factory` of `dataclasses.asdict`."""
    return {_JSON_NAMES.get(name, name): member for name, member in members}


@dataclass(frozen=True)
class WeightFile:
    """A .safetensors file that the instance needs: its name in the folder, its size in bytes, its SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Drawn:
    """A random tensor, for a model without weight files: `count` numbers in [`shift` - `scale`, `shift` + `scale`].

    `seed` determines them; `run_weights` defines the generator.
    """

    name: str
    dtype: str
    count: int
    seed: int
    scale: float
    shift: float


@dataclass(frozen=True)
class Piece:
    """A box of an operand that begins at `origin`, and the position of its elements in a tensor of a file.

    `start` and `strides` count elements of the tensor in row-major order; there is a stride for each axis of
    the box. So a piece can be a slice, a transpose, or every n-th row.
    """

    tensor: str
    start: int
    strides: tuple[int, ...]
    origin: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """A weight as kernels take it: assembled from pieces, 0 elsewhere, rounded to `dtype` if needed.

    A float32 operand is multiplied by `factor`. `sha256` is that of its bytes in row-major order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    pieces: tuple[Piece, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class Weights:
    """Weights outside of the bundle: files or random tensors, and the operands made of them."""

    files: tuple[WeightFile, ...]
    drawn: tuple[Drawn, ...]
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step of the model for a prompt: number 0 processes the prompt, each later number the previous token.

    `prompt` is the index of the prompt. `case` names the launch that chooses the token, the head. `values`
    and `tokens` are indices of its outputs: the largest logits, and their tokens. `token` is the expected
    token: the likeliest, the lowest of several equal ones. `text` is its text. `margin` is the difference
    between the largest and the second largest logit.
    """

    prompt: int
    number: int
    case: str
    values: int
    tokens: int
    token: int
    text: str
    margin: float


@dataclass(frozen=True)
class Generation:
    """Prompts with their greedy continuations: `steps` of all prompts, prompt by prompt, in order of tokens."""

    prompts: tuple[Prompt, ...]
    steps: tuple[Step, ...]


def parse_weights(fields: Fields) -> Weights:
    """Parse the weights of a manifest.

    Raises:
        InvalidArgument: (NKW-BUNDLE) If a field is missing or malformed.
    """
    return Weights(
        tuple(
            WeightFile(row.read_text("name"), row.read_count("nbytes"), row.read_text("sha256"))
            for row in fields.read_rows("files")
        ),
        tuple(
            Drawn(
                row.read_text("name"),
                row.read_choice("dtype", tuple(DTYPES)),
                row.read_count("count"),
                row.read_count("seed"),
                row.read_number("scale"),
                row.read_number("shift"),
            )
            for row in fields.read_rows("drawn")
        ),
        tuple(_parse_operand(row) for row in fields.read_rows("operands")),
    )


def parse_generation(fields: Fields) -> Generation:
    """Parse the prompts and steps of a manifest.

    Raises:
        InvalidArgument: (NKW-BUNDLE) If a field is missing or malformed, or if a step's prompt does not
            exist.
    """
    generation = Generation(
        tuple(Prompt(row.read_text("text"), row.read_counts("ids")) for row in fields.read_rows("prompts")),
        tuple(
            Step(
                row.read_count("prompt"),
                row.read_count("number"),
                row.read_text("case"),
                row.read_count("values"),
                row.read_count("tokens"),
                row.read_count("token"),
                row.read_text("text"),
                row.read_number("margin"),
            )
            for row in fields.read_rows("steps")
        ),
    )
    if any(step.prompt >= len(generation.prompts) for step in generation.steps):
        raise make_error(
            f"{fields.location}: a step is of a prompt beyond the {len(generation.prompts)} that there are; write the "
            "bundle again"
        )
    return generation


def _parse_operand(fields: Fields) -> Operand:
    """Parse an operand of weights and its pieces. Raises InvalidArgument for malformed fields."""
    pieces = tuple(
        Piece(
            row.read_text("tensor"),
            row.read_count("start"),
            row.read_counts("strides"),
            row.read_counts("at"),
            row.read_shape("shape"),
        )
        for row in fields.read_rows("pieces")
    )
    dtype = fields.read_choice("dtype", tuple(DTYPES))
    return Operand(
        fields.read_text("name"),
        dtype,
        fields.read_shape("shape"),
        fields.read_text("sha256"),
        pieces,
        fields.read_number("factor") if fields.has("factor") else 1.0,
    )
