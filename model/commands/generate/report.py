"""Report of `nkw generate` and `nkw transcribe`: the printed summary, and the document of --json."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.commands.generate.explain import TokenTrace
from model.commands.generate.generation import Generation, StopReason
from model.engine import SamplingParams
from model.engine.sampler import Logprob
from model.execution.expert_load import ExpertLoad
from model.mesh import Mesh
from model.runners.comparison import Difference
from nkw.report import Hanging, Part, table
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
"""Sampling parameters in the document."""
_DIFFERENCES = 5  # most differences in the summary
_TOKEN = 24  # most columns of a token's text


@dataclass(frozen=True)
class TargetPrediction:
    """Predicted times on one chip: of the prompts, until the first tokens, and of the last decode step, per token."""

    first_token: Prediction
    per_token: Prediction


@dataclass(frozen=True)
class Run:
    """Options of a run that the report repeats.

    Attributes:
        model: Path of the model's folder.
        prompts: Prompt of each text.
        backend: Name of the backend.
        target: Chip.
        mesh: Ranks.
        dtype: Dtype of activations.
        sampling: Sampling parameters.
        trace: Path of the trace, or None.
        uneven: Sentences about heads and weights that ranks have padded or in copies.
        micro_batches: Number of micro-batches.
        expert_load: Choices of experts; None for a model without experts, or if nothing was counted.
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


def summarise(
    run: Run, generations: Sequence[Generation], predictions: Sequence[TargetPrediction]
) -> list[Part]:
    """Return the parts of the printed summary: compared tokens, predicted times, and the utilisation of the chip.

    Args:
        run: The options.
        generations: The finished generations.
        predictions: Predictions by target; empty if nothing was predicted.
    """
    differences = [difference for generation in generations for difference in generation.differences]
    tokens_compared = sum(generation.tokens_compared for generation in generations)
    if tokens_compared:
        counts = f"{tokens_compared - len(differences)} of {tokens_compared}"
        compared = f"{counts} tokens equal to the numpy reference"
        if run.dtype != "float32":
            compared += f", both with {run.dtype} activations"
    else:
        count = sum(len(generation.generated_ids) for generation in generations)
        by = "by the numpy reference; nothing was compared or predicted"
        without_check = "computed; nothing was compared with the numpy reference"
        compared = (
            f"{count} token{'' if count == 1 else 's'} {by if run.backend == 'numpy' else without_check}"
        )
    out: list[Part] = [Hanging(compared), *_describe_differences(differences)]
    if differences and run.sampling.temperature > 0:
        out.append("tokens are drawn at random; rounding moves the bounds between candidates")
    out += map(Hanging, describe_full_contexts(generations))
    if run.uneven:
        out.append(Hanging(f"on {run.mesh.tensor} ranks {'; '.join(run.uneven)}"))
    if run.expert_load is not None:
        out.append(Hanging(run.expert_load.text()))
    if predictions:
        out += ["", *_tabulate_times(predictions, run)]
        prediction = next(target for target in predictions if target.per_token.target == run.target)
        if run.mesh.pipeline > 1:
            out.append(_describe_bubble(run, prediction))
        out += _describe_use(prediction)
    return out


def describe_problems(generations: Sequence[Generation]) -> Iterator[str]:
    """Yield a sentence about tokens that differ from the reference, if any, and one about full contexts, if any."""
    differences = sum(len(generation.differences) for generation in generations)
    if differences:
        compared = sum(generation.tokens_compared for generation in generations)
        yield f"{differences} of {compared} tokens differ from the numpy reference"
    yield from describe_full_contexts(generations)


def describe_full_contexts(generations: Sequence[Generation]) -> Iterator[str]:
    """Yield a sentence about the generations that ended because the context was full; nothing if there are none."""
    full = [
        len(generation.generated_ids)
        for generation in generations
        if generation.stopped_by is StopReason.context
    ]
    if full:
        texts = "the text ends" if len(generations) == 1 else f"{len(full)} of {len(generations)} texts end"
        counts = "1 new token" if full == [1] else f"{' and '.join(map(str, sorted({*full})))} new tokens"
        yield f"{texts} after {counts}, before --max-new-tokens: the context of the model is full"


def _describe_differences(differences: Sequence[Difference]) -> Iterator[Part]:
    """Yield lines about the first 5 tokens that differ from the reference, with the differences of their logits."""
    for difference in differences[:_DIFFERENCES]:
        chosen, expected = _quote(difference.text), _quote(difference.reference_text)
        yield f"token {difference.number} is {chosen}, by the reference {expected}"
        gaps = []
        if difference.logits_apart is not None:
            gaps.append(f"{difference.logits_apart:.2g} here")
        if difference.reference_logits_apart is not None:
            gaps.append(f"{difference.reference_logits_apart:.2g} in the reference")
        if gaps:
            yield f"  their logits lie apart by {', '.join(gaps)}"
    if len(differences) > _DIFFERENCES:
        yield f"tokens that differ besides: {len(differences) - _DIFFERENCES}"


def _quote(text: str) -> str:
    """Return the text of a token in quotes, cut to 24 characters."""
    quoted = repr(text)
    return quoted if len(quoted) <= _TOKEN else quoted[: _TOKEN - 1] + "…"


def _tabulate_times(predictions: Sequence[TargetPrediction], run: Run) -> list[Part]:
    """Return a headline, a table of the predicted times on each chip in ms, and a line for each hardware overlay."""
    cores = "1 core" if run.mesh.ranks == 1 else f"{run.mesh.ranks} cores"
    sequences = len(run.prompts)
    noun = "prompts" if run.sampling.n == 1 else "texts"
    batch = "" if sequences == 1 else f" for {sequences} {noun}"
    first, each_token = ("first token", "per token") if sequences == 1 else ("first tokens", "per step")
    rows = [
        (
            f"{target.per_token.target} (LNC {target.per_token.lnc})",
            _format_times(target.first_token),
            _format_times(target.per_token),
        )
        for target in predictions
    ]
    overlays = [target.per_token.overlay for target in predictions if target.per_token.overlay]
    return [
        f"predicted on {cores}{batch}, in ms; in brackets dataflow..serial reading",
        table(f"|{first}|{each_token}", rows, gap=4),
        *(Hanging(f"times of {overlay}") for overlay in overlays),
    ]


def _describe_bubble(run: Run, prediction: TargetPrediction) -> Part:
    """Return a line about the bubble, the share of time in which pipeline stages wait, and that of ideal stages."""
    stages, batches = run.mesh.pipeline, run.micro_batches
    equal = (stages - 1) / (batches + stages - 1)
    counted = "1 micro-batch" if batches == 1 else f"{batches} micro-batches"
    first, step = prediction.first_token.bubble_share, prediction.per_token.bubble_share
    return Hanging(
        f"{run.target}: {counted} through {stages} stages; the bubble is {first:.0%} of the first token, {step:.0%} of "
        f"a step; {equal:.0%} if stages were equal and sent nothing"
    )


def _format_times(prediction: Prediction) -> str:
    """Return the predicted time in ms, with its lower bound (dataflow) and its upper bound (serial) in brackets."""
    dataflow, program, serial = (
        f"{time_ns / 1e6:,.3f}"
        for time_ns in (prediction.dataflow_ns, prediction.program_ns, prediction.serial_ns)
    )
    return f"{program} ({dataflow}..{serial})"


def _describe_use(prediction: TargetPrediction) -> list[Part]:
    """Return lines about the busiest engine and queue of a decode step, and about the peak SBUF and PSUM."""
    prompts, decode = prediction.first_token, prediction.per_token
    engine, queue = decode.busiest_engine, decode.busiest_queue
    return [
        Hanging(
            f"{decode.target}: busiest engine {engine}, {decode.busy_share[engine]:.0%} of the time "
            f"per token; {queue} {decode.busy_share[queue]:.0%}"
        ),
        Hanging(
            f"  SBUF {max(prompts.sbuf_bytes, decode.sbuf_bytes):,} of {decode.sbuf_usable_bytes:,}, "
            f"PSUM {max(prompts.psum_bytes, decode.psum_bytes):,} of {decode.psum_usable_bytes:,} bytes per partition"
        ),
    ]


def build_document(
    run: Run,
    generations: Sequence[Generation],
    predictions: Sequence[TargetPrediction],
    traces: Sequence[TokenTrace] = (),
) -> dict[str, Any]:
    """Return the document of --json as dicts and lists; docs/json.md describes it.

    Args:
        run: The options.
        generations: The finished generations.
        predictions: Predictions by target.
        traces: Traces of --explain.
    """
    load = run.expert_load
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
        "expert_load": None
        if load is None
        else {
            "choices": load.choices,
            "largest_to_mean": load.largest_to_mean,
            "largest_to_mean_of_a_layer": load.uneven,
        },
        "uneven": list(run.uneven),
        "dtype": run.dtype,
        "sampling": {name: getattr(run.sampling, name) for name in SAMPLING},
        "generations": list(map(_describe_generation, run.prompts, generations)),
        "predictions": {
            target.per_token.target: {
                "first_token": _describe_prediction(target.first_token),
                "per_token": _describe_prediction(target.per_token),
            }
            for target in predictions
        },
        "explained": [asdict(token_trace) for token_trace in traces],
        "trace": run.trace,
        "versions": {DISTRIBUTION: version(), "python": platform.python_version(), "numpy": np.__version__},
    }


def _describe_generation(prompt: str, generation: Generation) -> dict[str, Any]:
    """Return a generation as a JSON object.

    Args:
        prompt: Text of its prompt.
        generation: The generation.
    """
    return {
        "prompt": prompt,
        "prompt_ids": list(generation.prompt_ids),
        "generated_ids": list(generation.generated_ids),
        "text": generation.text,
        "stopped_by": generation.stopped_by.value,
        "finish_reason": generation.stopped_by.finish_reason,
        "logprobs": None
        if generation.logprobs is None
        else [_describe_logprobs(tokens) for tokens in generation.logprobs],
        "checks": {
            "reference": "numpy",
            "tokens_compared": generation.tokens_compared,
            "tokens_equal": generation.tokens_equal,
            "differences": [asdict(difference) for difference in generation.differences],
        },
    }


def _describe_logprobs(tokens: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """Return the log-probabilities of one token as JSON objects: the chosen token first, then the likeliest tokens."""
    return [
        {"id": id, "token": token.decoded_token, "logprob": token.logprob, "rank": token.rank}
        for id, token in tokens.items()
    ]


def _describe_prediction(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as a JSON object, with the names of the busiest engine and queue."""
    fields = {name: value for name, value in asdict(prediction).items() if name != "target"}
    return {**fields, "busiest_engine": prediction.busiest_engine, "busiest_queue": prediction.busiest_queue}
