"""The report of a generation: the summary on the terminal, and the document of `--json`."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.commands.generate.explain import TokenPath
from model.commands.generate.generation import Generation
from model.engine import SamplingParams
from model.engine.sampler import Logprob
from model.execution.expert_load import ExpertLoad
from model.mesh import Mesh
from model.runners.comparison import Difference
from nkw.parts import Hanging, Part, table
from nkw.version import DISTRIBUTION, version

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Prediction

SCHEMA = 3
SAMPLING = (
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ),
    *("n", "seed"),
)
"""The parameters of sampling that the document repeats."""
_DIFFERENCES = 5  # tokens that are named
_TOKEN = 24  # columns of a token's text


@dataclass(frozen=True)
class TargetPrediction:
    """One target's times: to the first token (prompt and head), and per token (the last decode step)."""

    first_token: Prediction
    per_token: Prediction

    @property
    def sbuf_bytes(self) -> int:
        """The higher of both passes' marks in SBUF, in bytes per partition."""
        return max(self.first_token.sbuf_bytes, self.per_token.sbuf_bytes)

    @property
    def psum_bytes(self) -> int:
        """The higher of both passes' marks in PSUM, in bytes per partition."""
        return max(self.first_token.psum_bytes, self.per_token.psum_bytes)


@dataclass(frozen=True)
class Run:
    """The options of a run, as the report repeats them; `uneven` is what ranks hold padded or alike, in sentences.

    Prompts pass the stages of a pipeline in so many `micro_batches`.
    """

    model: str
    prompts: tuple[str, ...]
    backend: str
    target: str
    mesh: Mesh
    dtype: str
    sampling: SamplingParams
    trace: str | None
    uneven: tuple[str, ...] = ()
    micro_batches: int = 1
    expert_load: ExpertLoad | None = None


def summary(
    run: Run, generations: Sequence[Generation], predictions: Sequence[TargetPrediction]
) -> list[Part]:
    """The parts of the summary: tokens compared, predicted times, what the chip was busy with."""
    differences = [each for generation in generations for each in generation.differences]
    tokens_compared = sum(each.tokens_compared for each in generations)
    if tokens_compared:
        counts = f"{tokens_compared - len(differences)} of {tokens_compared}"
        compared = f"{counts} tokens equal to the numpy reference"
        if run.dtype != "float32":
            compared += f", both with {run.dtype} activations"
    else:
        count = sum(len(each.generated_ids) for each in generations)
        noun = "token" if count == 1 else "tokens"
        compared = f"{count} {noun} by the numpy reference; nothing was compared or predicted"
    out: list[Part] = [Hanging(compared), *_differences(differences)]
    if differences and run.sampling.temperature > 0:
        out.append("tokens are drawn at random; rounding moves the bounds between candidates")
    if run.uneven:
        out.append(Hanging(f"on {run.mesh.tensor} ranks {'; '.join(run.uneven)}"))
    if run.expert_load is not None:
        out.append(Hanging(run.expert_load.text()))
    if predictions:
        out += ["", *_times(predictions, run)]
        own = next(each for each in predictions if each.per_token.target == run.target)
        if run.mesh.pipeline > 1:
            out.append(_bubble(run, own))
        out += _use(own)
    return out


def _differences(differences: Sequence[Difference]) -> Iterator[Part]:
    """Which tokens differ from the reference's, and how close the choice was."""
    for each in differences[:_DIFFERENCES]:
        chosen, wanted = (_quoted(text) for text in (each.text, each.reference_text))
        yield f"token {each.number} is {chosen}, by the reference {wanted}"
        apart = [
            f"{logits:.2g} {where}"
            for logits, where in (
                (each.logits_apart, "here"),
                (each.reference_logits_apart, "in the reference"),
            )
            if logits is not None
        ]
        if apart:
            yield f"  their logits lie apart by {', '.join(apart)}"
    if len(differences) > _DIFFERENCES:
        yield f"tokens that differ besides: {len(differences) - _DIFFERENCES}"


def _quoted(text: str) -> str:
    said = repr(text)
    return said if len(said) <= _TOKEN else said[: _TOKEN - 1] + "…"


def _times(predictions: Sequence[TargetPrediction], run: Run) -> list[Part]:
    cores = "1 core" if run.mesh.ranks == 1 else f"{run.mesh.ranks} cores"
    sequences = len(run.prompts)
    noun = "prompts" if run.sampling.n == 1 else "texts"
    batch = "" if sequences == 1 else f" for {sequences} {noun}"
    first, each_token = ("first token", "per token") if sequences == 1 else ("first tokens", "per step")
    rows = [
        (each.per_token.target, _bracketed(each.first_token), _bracketed(each.per_token))
        for each in predictions
    ]
    overlays = [each.per_token.overlay for each in predictions if each.per_token.overlay]
    return [
        f"predicted on {cores}{batch}, in ms; in brackets dataflow..serial reading",
        table(f"|{first}|{each_token}", rows, gap=4),
        *(Hanging(f"times of {each}") for each in overlays),
    ]


def _bubble(run: Run, prediction: TargetPrediction) -> Part:
    """How long stages wait, beside what stages of equal times would, which send nothing."""
    stages, batches = run.mesh.pipeline, run.micro_batches
    equal = (stages - 1) / (batches + stages - 1)
    counted = "1 micro-batch" if batches == 1 else f"{batches} micro-batches"
    first, step = (each.bubble_share for each in (prediction.first_token, prediction.per_token))
    return Hanging(
        f"{run.target}: {counted} through {stages} stages; the bubble is {first:.0%} of the first token, {step:.0%} of "
        f"a step; {equal:.0%} if stages were equal and sent nothing"
    )


def _bracketed(prediction: Prediction) -> str:
    dataflow, program, serial = (
        f"{time_ns / 1e6:,.3f}"
        for time_ns in (prediction.dataflow_ns, prediction.program_ns, prediction.serial_ns)
    )
    return f"{program} ({dataflow}..{serial})"


def _use(prediction: TargetPrediction) -> list[Part]:
    decode = prediction.per_token
    engine, queue = decode.busiest_engine, decode.busiest_queue
    return [
        Hanging(
            f"{decode.target}: busiest engine {engine}, {decode.busy_share[engine]:.0%} of the time "
            f"per token; {queue} {decode.busy_share[queue]:.0%}"
        ),
        Hanging(
            f"  SBUF {prediction.sbuf_bytes:,} of {decode.sbuf_usable_bytes:,}, "
            f"PSUM {prediction.psum_bytes:,} of {decode.psum_usable_bytes:,} bytes per partition"
        ),
    ]


def document(
    run: Run,
    generations: Sequence[Generation],
    predictions: Sequence[TargetPrediction],
    explained: Sequence[TokenPath] = (),
) -> dict[str, Any]:
    """The document of `--json`; its schema is in this folder's README."""
    return {
        "schema": SCHEMA,
        "model": run.model,
        "backend": run.backend,
        "target": run.target,
        "tp": run.mesh.tensor,
        "dp": run.mesh.data,
        "sp": run.mesh.sequence,
        "pp": run.mesh.pipeline,
        "micro_batches": run.micro_batches,
        "ep": run.mesh.expert,
        "expert_load": None if run.expert_load is None else _expert_load(run.expert_load),
        "uneven": list(run.uneven),
        "dtype": run.dtype,
        "sampling": {name: getattr(run.sampling, name) for name in SAMPLING},
        "generations": [_generation(*each) for each in zip(run.prompts, generations)],
        "predictions": {
            each.per_token.target: {
                "first_token": _prediction(each.first_token),
                "per_token": _prediction(each.per_token),
            }
            for each in predictions
        },
        "explained": [asdict(each) for each in explained],
        "trace": run.trace,
        "versions": {DISTRIBUTION: version(), "python": platform.python_version(), "numpy": np.__version__},
    }


def _expert_load(load: ExpertLoad) -> dict[str, Any]:
    return {
        "choices": load.choices,
        "largest_to_mean": load.largest_to_mean,
        "largest_to_mean_of_a_layer": load.uneven,
    }


def _generation(prompt: str, generation: Generation) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "prompt_ids": list(generation.prompt_ids),
        "generated_ids": list(generation.generated_ids),
        "text": generation.text,
        "stopped_by": generation.stopped_by.value,
        "logprobs": None
        if generation.logprobs is None
        else [_logprobs(each) for each in generation.logprobs],
        "checks": {
            "reference": "numpy",
            "tokens_compared": generation.tokens_compared,
            "tokens_equal": generation.tokens_equal,
            "differences": [asdict(each) for each in generation.differences],
        },
    }


def _logprobs(tokens: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """The chosen token and the likeliest ones, in this order."""
    return [
        {"id": id, "token": token.decoded_token, "logprob": token.logprob, "rank": token.rank}
        for id, token in tokens.items()
    ]


def _prediction(prediction: Prediction) -> dict[str, Any]:
    fields = asdict(prediction)
    del fields["target"]
    return {**fields, "busiest_engine": prediction.busiest_engine, "busiest_queue": prediction.busiest_queue}
