"""Measurement of one scheme on the shipped story model: change of the loss, KL divergence, equal top tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.families import compose, load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer
from model.quantize.calibration import split_texts
from model.quantize.evaluation import ORIGINAL, Evaluation
from model.quantize.linears import select_linears
from model.quantize.process import Findings, Settings, quantise
from model.quantize.schemes import SCHEMES

HELD_OUT_TEXTS, CALIBRATION_TEXTS = 40, 48
"""First texts of valid.txt and of train.txt that are read."""
VALID, TRAIN = "valid.txt", "train.txt"
DIGESTS = {
    VALID: "8f890f36d6f5e0c610d4b47f6b415371dd1a3e729d9ebfbe5d33cdbed99f3472",
    TRAIN: "bd2e28ef73f7b69a453af6910b29a38006eb2ae56ecfd614f0b432ffab0ed965",
}
"""SHA-256 of the files of texts of the stored table."""


@dataclass(frozen=True)
class Case:
    """Scheme with its parameters; `label` is its name in the table."""

    label: str
    settings: Settings

    @classmethod
    def create(cls, scheme: str, group: int | None = None, orders_columns: bool = False) -> Case:
        """Return the case of a scheme, named after its parameters."""
        words = [scheme]
        words += [] if group is None else [f"g{group}"]
        words += ["act-order"] if orders_columns else []
        settings = Settings(SCHEMES[scheme].with_group(group), orders_columns=orders_columns)
        return cls(" ".join(words), settings)


CASES = (
    *(Case.create(name) for name in ("int8", "fp8", "mxfp8", "int4")),
    *(Case.create("int4", group) for group in (128, 32)),
    *(Case.create("gptq"), Case.create("gptq", orders_columns=True)),
    *(Case.create("gptq", group) for group in (128, 32)),
    *(Case.create("awq"), Case.create("awq", 128), Case.create("awq", 32), Case.create("mxfp4")),
    *(Case.create(name) for name in ("fp8-dynamic", "w8a8", "smoothquant", "llm-int8")),
)
"""Rows of the table."""


@dataclass(frozen=True)
class Run:
    """Errors of one run: change of the mean loss in nats, mean KL divergence, and share of equal top tokens."""

    change: float
    kl: float
    same: float


@dataclass(frozen=True)
class Measurement:
    """Runs of a case by name, the loss of the original, and the predicted tokens."""

    label: str
    base: float
    tokens: int
    runs: dict[str, Run]


def check_corpus(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file of texts that is not the one of the stored table."""
    for name, digest in DIGESTS.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            yield f"{folder / name} is another file than that of the stored table; the figures will differ"


def read_sequences(path: Path, count: int) -> list[list[int]]:
    """Return the token ids of the first texts of a file, at most 256 each, as the stored figures need them.

    Each begins with two <|endoftext|>: one is put before the text, and the tokenizer adds its own. The trials whose
    figures the bounds follow were computed so, and it makes the loss of the original 1.9899 instead of 1.9241.
    """
    config = load_config(PRETRAINED)
    tokenizer, context = Tokenizer(PRETRAINED, config.vocab_size), config.max_position_embeddings
    texts = split_texts(path.read_text(encoding="utf-8"))[:count]
    return [[0, *tokenizer.encode(text), 0][:context] for text in texts]


def measure(
    case: Case, calibration: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> Measurement:
    """Return the errors of a case on held-out sequences."""
    _, evaluation = run(case, calibration, held_out)
    original = evaluation.measured[ORIGINAL]
    runs = {
        name: Run(
            measured.mean_loss - original.mean_loss,
            measured.kl / measured.tokens,
            measured.same / measured.tokens,
        )
        for name, measured in evaluation.measured.items()
        if name != ORIGINAL
    }
    return Measurement(case.label, original.mean_loss, original.tokens, runs)


def run(
    case: Case, calibration: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> tuple[Findings, Evaluation]:
    """Quantise the shipped model by a case, without writing it, and return what was found."""
    config = load_config(PRETRAINED)
    network = compose(config)
    findings, evaluation = quantise(
        network,
        open_checkpoint(PRETRAINED, config),
        select_linears(network),
        case.settings,
        lambda name, weight: None,
        calibration,
        held_out,
    )
    assert evaluation is not None
    return findings, evaluation
