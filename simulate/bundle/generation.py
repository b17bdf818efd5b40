"""What a bundle of a model holds beside its launches: weights by reference, and a generation's prompts and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from simulate.bundle.reading import DTYPES, Fields, refused


@dataclass(frozen=True)
class WeightFile:
    """A .safetensors file that the instance has to have: its name in the folder, its size, its SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Drawn:
    """A tensor of a model without weights: `count` values from `shift` - `scale` to `shift` + `scale` by a seed.

    `run_weights.drawn` says how.
    """

    name: str
    dtype: str
    count: int
    seed: int
    scale: float
    shift: float


@dataclass(frozen=True)
class Piece:
    """A box of an operand, from `at` on and as large as `shape`, and where its elements stand in a tensor.

    start, strides: in elements of the tensor as the file holds it, row by row; there is a stride for each axis of the
    box. So a piece can be a slice, a transpose, every so many rows, and what of these a loader puts together.
    """

    tensor: str
    start: int
    strides: tuple[int, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """A weight as kernels take it: put together from pieces, 0 elsewhere, rounded to `dtype` where that is another.

    sha256 is that of its bytes, row by row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Weights:
    """Weights that are not in the bundle: the files that have them, or the tensors that are drawn, and the operands."""

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
    """A step of the model for one prompt: number 0 takes the prompt, each later one the token before it.

    case, values, tokens: the launch of the head, and which of its outputs are the largest logits and their tokens; the
    likeliest of them is `token`, or the lowest of several alike. margin: how far the second largest logit is below.
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
    """Prompts, each continued by greedy choice."""

    prompts: tuple[Prompt, ...]
    steps: tuple[Step, ...]


def weights_of(found: Fields) -> Weights:
    """The records of a manifest. Raises InvalidArgument for one that cannot be used."""
    return Weights(
        tuple(
            WeightFile(each.text("name"), each.count("nbytes"), each.text("sha256"))
            for each in found.rows("files")
        ),
        tuple(
            Drawn(
                each.text("name"),
                each.choice("dtype", tuple(DTYPES)),
                each.count("count"),
                each.count("seed"),
                each.number("scale"),
                each.number("shift"),
            )
            for each in found.rows("drawn")
        ),
        tuple(_operand(each) for each in found.rows("operands")),
    )


def generation_of(found: Fields) -> Generation:
    """The records of a manifest. Raises InvalidArgument for one that cannot be used."""
    generation = Generation(
        tuple(Prompt(each.text("text"), each.counts("ids")) for each in found.rows("prompts")),
        tuple(
            Step(
                each.count("prompt"),
                each.count("number"),
                each.text("case"),
                each.count("values"),
                each.count("tokens"),
                each.count("token"),
                each.text("text"),
                each.number("margin"),
            )
            for each in found.rows("steps")
        ),
    )
    if any(each.prompt >= len(generation.prompts) for each in generation.steps):
        raise refused(f"{found.place}: a step is of a prompt that is not there")
    return generation


def _operand(found: Fields) -> Operand:
    pieces = tuple(
        Piece(
            each.text("tensor"),
            each.count("start"),
            each.counts("strides"),
            each.counts("at"),
            each.shape("shape"),
        )
        for each in found.rows("pieces")
    )
    dtype = found.choice("dtype", tuple(DTYPES))
    return Operand(found.text("name"), dtype, found.shape("shape"), found.text("sha256"), pieces)
