"""Published runs of whole models: which of them can be predicted, and which part of the data each belongs to.

The runs are in published.json. Constants of a serving stack are fitted to one half of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model.config.published import PUBLISHED as CONFIGS
from model.plan.sizes import ModelSizes, load_model
from model.plan.stack_records import STACKS
from model.plan.stacks import Stack

PUBLISHED = Path(__file__).with_name("published.json")

_MISTRAL_2 = {"sliding_window": None, "rope_theta": 1e6}
_CODE_LLAMA = {"vocab_size": 32016, "max_position_embeddings": 16384, "rope_theta": 1e6}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-2-7b": ("llama-2-7b", {}),
    "Llama-2-13b": ("llama-2-13b", {}),
    "Llama-2-70b": ("llama-2-70b", {}),
    "Llama-3-70B": ("llama-3-70b", {}),
    "Llama-3.3-70B": ("llama-3.1-70b", {}),
    "Llama-3.1-405B": ("llama-3.1-405b", {}),
    "Mistral-7B-Instruct-v0.2": ("mistral-7b-v0.1", _MISTRAL_2),
    "CodeLlama-13b-hf": ("llama-2-13b", _CODE_LLAMA),
}
"""The config of each model: a file of model/published, and the fields in which the model differs."""

_APART = "apart-"
_CONTRADICTION = 1.25
"""The largest factor between a published throughput and that of the published times."""


class Half(Enum):
    """The part of the data that a run belongs to: fitted; other, for checking the fit; or apart, in neither."""

    fitted = "fitted"
    other = "other"
    apart = "apart"


@dataclass(frozen=True)
class Run:
    """A published run of a text decoder with 16-bit weights.

    cores: tensor-parallel ranks, each of `lnc` physical cores. prompt and generate: input and output tokens.
    sequence: longest sequence that the server takes. ttft_ms, tpot_ms and throughput (output tokens per
    second, or None): published values.
    """

    id: str
    model: str
    stack: Stack
    instance: str
    cores: int
    lnc: int
    batch: int
    prompt: int
    generate: int
    sequence: int
    ttft_ms: float
    tpot_ms: float
    throughput: float | None
    source: str

    @property
    def half(self) -> Half:
        """The part of the data, decided by the last hex digit of the SHA-256 of model and instance.

        Even digits are fitted. Runs whose id begins with "apart-" are kept apart.
        """
        if self.id.startswith(_APART):
            return Half.apart
        digit = int(sha256(f"{self.model} {self.instance}".encode()).hexdigest()[-1], 16)
        return Half.other if digit % 2 else Half.fitted

    @property
    def chip(self) -> str:
        """Name of the chip: the instance up to the first dot."""
        return self.instance.partition(".")[0]

    def load(self) -> ModelSizes:
        """Return the sizes of the model, from its published config with the changes in `_MODELS`."""
        file, changes = _MODELS[self.model]
        config = json.loads((CONFIGS / f"{file}.json").read_text()) | changes
        with TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            return load_model(path)

    def contradiction(self) -> str:
        """Return how the published throughput contradicts the published times; "" if it is within a factor of 1.25."""
        if self.throughput is None:
            return ""
        total_ms = self.ttft_ms + self.tpot_ms * (self.generate - 1)
        ratio = 1e3 * self.batch * self.generate / total_ms / self.throughput
        if 1 / _CONTRADICTION <= ratio <= _CONTRADICTION:
            return ""
        return f"its throughput is {1 / ratio:.2f} of what its own times give"


@dataclass(frozen=True)
class Published:
    """The runs that are predicted, and (id, reason) of each entry that is not."""

    runs: tuple[Run, ...]
    excluded: tuple[tuple[str, str], ...]


def read_published() -> Published:
    """Read published.json; entries that cannot be predicted or contradict themselves are returned as excluded."""
    runs, excluded = [], []
    for entry in json.loads(PUBLISHED.read_text()):
        reason = _find_reason(entry)
        if reason:
            excluded.append((entry["id"], reason))
            continue
        run = _parse_run(entry)
        contradiction = run.contradiction()
        if contradiction:
            excluded.append((run.id, contradiction))
        else:
            runs.append(run)
    return Published(tuple(runs), tuple(excluded))


def _find_reason(entry: dict[str, Any]) -> str:
    """Return why an entry is no run of a text decoder with 16-bit weights in a known setting; empty if it is one."""
    kernel, metrics = entry["kernel"], entry.get("metrics", {})
    if entry["id"].startswith(_APART) or "weights bf16" in kernel:
        return ""
    if "weights int8" in kernel:
        return "int8 weights"
    if "encoder" in kernel:
        return "an encoder, which has no decode steps"
    if "training" in kernel:
        return "training"
    if "speculation" in kernel:
        return "speculative decoding, and fp8 weights"
    if "Llama-3.3-70B" in kernel:
        return "among the runs kept apart"
    if "DeepSeek" in kernel:
        return "neither lengths nor the expert mesh are published"
    if entry["target"] == "gen4":
        return "gen4: steps of a study with kernels of its own, and no first token"
    if "ttft_ms" not in metrics:
        return "lengths of prompt and output are not published"
    return "no serving stack is named"


def _parse_run(entry: dict[str, Any]) -> Run:
    """Convert an entry to a run; `shapes` holds batch, prompt, output and sequence lengths in this order."""
    metrics, numbers = entry["metrics"], [int(number) for number in re.findall(r"\d+", entry["shapes"])]
    batch, prompt, generate, sequence = numbers
    return Run(
        id=entry["id"],
        model=re.split(r" text generation| served by", entry["kernel"])[0],
        stack=STACKS["vllm-neuron" if "vLLM" in entry["kernel"] else "transformers-neuronx"],
        instance=entry["instance"],
        cores=entry["cores"],
        lnc=entry.get("lnc", 1),
        batch=batch,
        prompt=prompt,
        generate=generate,
        sequence=sequence,
        ttft_ms=metrics["ttft_ms_p50"],
        tpot_ms=metrics["tpot_ms_p50"],
        throughput=metrics.get("tokens_per_s"),
        source=entry["source"],
    )
