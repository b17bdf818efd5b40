"""Report of `nkw quantize`: parts for the terminal and the page, and the JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from model.quantize.evaluation import ACTIVATIONS, CACHE, ORIGINAL, SCHEME, WEIGHTS, Evaluation
from model.quantize.process import Findings
from model.quantize.schemes import Scheme
from model.quantize.step_times import StepTimes
from nkw.report import Hanging, Part, as_html, table

_SHOWN_WEIGHTS = 8
"""Weights with the largest errors that the terminal shows; page and document have all."""
_MEANINGS = {
    WEIGHTS: "rounded weights, plain rows and cache",
    ACTIVATIONS: "plain weights, rows rounded before their products",
    CACHE: "plain weights, keys and values in fp8, a scale for each array",
    SCHEME: "rounded weights and rows, as a runtime of the scheme computes",
}


@dataclass(frozen=True)
class Report:
    """What a quantisation was asked for and what it found.

    name        name of the model
    scheme      the scheme
    linears     number of quantised weights
    before      bytes of the original's tensors
    after       bytes of the quantised model's tensors
    findings    errors of weights; None for a plan
    evaluation  errors on held-out texts; None without texts
    steps       predicted decode steps
    stated      upper bound of the memory in bytes that was stated before
    reached     largest resident memory in bytes, mapped files included; None for a plan
    """

    name: str
    scheme: Scheme
    linears: int
    before: int
    after: int
    steps: StepTimes
    findings: Findings | None = None
    evaluation: Evaluation | None = None
    stated: int | None = None
    reached: int | None = None


def build_blocks(report: Report, most_weights: int = _SHOWN_WEIGHTS) -> list[Part]:
    """Return the parts of the printed report.

    Args:
        report: The report.
        most_weights: Weights whose errors are shown, largest first.
    """
    blocks: list[Part] = [*_describe_bytes(report)]
    if report.evaluation is not None:
        blocks += ["", _build_runs(report.evaluation), *_describe_missing_runs(report)]
        blocks += ["", *_describe_layers(report.evaluation)]
    elif report.findings is not None:
        blocks += ["", "No text was held out, so the loss was not measured: give --held-out FILE."]
    if report.findings is not None:
        blocks += ["", *_build_weights(report.findings, most_weights), *_describe_exceptions(report.findings)]
    blocks += ["", *_build_steps(report.steps)]
    return [Hanging(block, indent=0) if isinstance(block, str) and block else block for block in blocks]


def _describe_bytes(report: Report) -> Iterator[Part]:
    scheme = report.scheme
    group = "row" if scheme.group is None else f"{scheme.group} columns of a row"
    scales = f"{scheme.numbers.value}, a scale for each {group}"
    yield (
        f"{report.name}, {scheme.name}: {report.linears} linear weights as {scales}, by {scheme.method.value}; stored "
        f"as {scheme.container}."
    )
    yield (
        f"{report.before:,} bytes before, {report.after:,} after: {report.after / report.before:.3f} of them. The "
        "embedding, the head and routers stay plain."
    )
    if report.stated is not None and report.reached is not None:
        yield (
            f"Memory: at most {report.stated / 1e9:.2f} GB were expected beside mapped files; "
            f"{report.reached / 1e9:.2f} GB were resident at most, mapped files included."
        )


def _build_runs(evaluation: Evaluation) -> Part:
    """Return the table of the runs on held-out texts."""
    original = evaluation.measured[ORIGINAL]
    rows = [("original", f"{original.mean_loss:.4f}", f"{original.perplexity:.3f}", "", "", "")]
    for name in (WEIGHTS, ACTIVATIONS, CACHE, SCHEME):
        run = evaluation.measured.get(name)
        if run is not None:
            change = run.mean_loss - original.mean_loss
            rows.append(
                (
                    name,
                    f"{run.mean_loss:.4f}",
                    f"{run.perplexity:.3f}",
                    f"{change:+.4f}",
                    f"{run.kl / run.tokens:.5f}",
                    f"{run.same / run.tokens:.1%}",
                )
            )
    return table(f"{original.tokens:,} held-out tokens|loss|perplexity|change|KL|same top token", rows)


def _describe_missing_runs(report: Report) -> Iterator[str]:
    """Yield a sentence for each of the three runs that does not exist, and one about the cache."""
    evaluation = report.evaluation
    assert evaluation is not None
    if ACTIVATIONS not in evaluation.measured:
        yield f"No run with activations only: {report.scheme.name} rounds no activations."
    if CACHE in evaluation.measured:
        yield "The scheme does not quantise the cache; its run shows what a cache in fp8 would add."
    else:
        yield "No run with the cache only: the model keeps no keys and values as arrays of their own."


def _describe_layers(evaluation: Evaluation) -> Iterator[str]:
    errors = evaluation.layer_errors
    worst = int(np.argmax(errors))
    yield (
        f"Error of the hidden states by layer, relative: {errors[worst]:.4f} at most, after layer {worst} of "
        f"{len(errors)} (embedding, mixer and MLP count); {errors[-1]:.4f} of the logits."
    )


def _build_weights(findings: Findings, most: int) -> list[Part]:
    """Return the table of the weights with the largest errors."""
    sizes = {
        module: error.weight if error.product is None else error.product
        for module, error in findings.errors.items()
    }
    errors = [
        (module, findings.errors[module]) for module in sorted(sizes, key=lambda module: -sizes[module])
    ]
    rows = [
        (module, f"{error.weight:.4f}", "" if error.product is None else f"{error.product:.4f}")
        for module, error in errors[:most]
    ]
    heading = "largest errors, relative" if most < len(errors) else "errors, relative"
    return [table(f"{heading}|of the weight|of products", rows)]


def _describe_exceptions(findings: Findings) -> Iterator[str]:
    if findings.unreached:
        yield (
            f"Calibration never reached {len(findings.unreached)} weights of experts, which were rounded to nearest: "
            f"{', '.join(findings.unreached)}."
        )
    if findings.unfolded:
        yield (
            f"No factors were folded into {len(findings.unfolded)} norms, because something else reads them: "
            f"{', '.join(findings.unfolded)}."
        )
    if findings.outliers:
        total = sum(map(len, findings.outliers.values()))
        yield (
            f"{total:,} columns of {len(findings.outliers)} weights have outliers; outlier_columns.json in the folder "
            "lists them."
        )


def _build_steps(steps: StepTimes) -> list[Part]:
    """Return the table of predicted decode steps, and what they rest on."""
    rows = [
        (
            step.chip,
            str(step.batch),
            f"{step.original_ns / 1e6:,.3f}",
            "" if step.quantised_ns is None else f"{step.quantised_ns / 1e6:,.3f}",
            "" if step.quantised_ns is None else f"{step.original_ns / step.quantised_ns:.2f}",
        )
        for step in steps.steps
    ]
    ranks = "1 rank" if steps.tp == 1 else f"{steps.tp} ranks"
    heading = "decode step|batch|original, ms|quantised, ms|times as fast"
    shown: list[Part] = [table(heading, rows)] if rows else []
    return [
        *shown,
        f"Predicted for {ranks} of 1 physical core, {steps.context:,} positions, activations and cache in "
        f"{steps.dtype}: {steps.note}.",
    ]


def build_document(report: Report) -> dict[str, Any]:
    """Return the report as a JSON object."""
    scheme = report.scheme
    document: dict[str, Any] = {
        "model": report.name,
        "scheme": scheme.name,
        "method": scheme.method.value,
        "numbers": scheme.numbers.value,
        "group_size": scheme.group,
        "container": scheme.container,
        "weights": report.linears,
        "bytes_before": report.before,
        "bytes_after": report.after,
        "memory": {"stated_bytes": report.stated, "reached_bytes": report.reached},
        "step_times": {
            "context": report.steps.context,
            "tp": report.steps.tp,
            "dtype": report.steps.dtype,
            "note": report.steps.note,
            "steps": [
                {
                    "chip": step.chip,
                    "batch": step.batch,
                    "original_ns": step.original_ns,
                    "quantised_ns": step.quantised_ns,
                }
                for step in report.steps.steps
            ],
        },
    }
    if report.evaluation is not None:
        document["held_out"] = _build_runs_document(report.evaluation)
        document["layer_errors"] = report.evaluation.layer_errors
    if report.findings is not None:
        findings = report.findings
        document["weight_errors"] = {
            module: {"weight": error.weight, "product": error.product}
            for module, error in findings.errors.items()
        }
        document |= {
            "unreached_experts": findings.unreached,
            "unfolded_norms": findings.unfolded,
            "outlier_columns": {module: len(columns) for module, columns in findings.outliers.items()},
        }
    return document


def _build_runs_document(evaluation: Evaluation) -> Mapping[str, Any]:
    """Return the measured runs as a JSON object by name; a run that does not exist is null."""
    original = evaluation.measured[ORIGINAL]
    runs: dict[str, Any] = {}
    for name in (ORIGINAL, WEIGHTS, ACTIVATIONS, CACHE, SCHEME):
        run = evaluation.measured.get(name)
        runs[name.replace(" ", "_")] = run and {
            "tokens": run.tokens,
            "loss": run.mean_loss,
            "perplexity": run.perplexity,
            "change": run.mean_loss - original.mean_loss,
            "kl": run.kl / run.tokens,
            "same_top_token": run.same / run.tokens,
        }
    return runs


def render_page(report: Report) -> str:
    """Return the report as one HTML page without scripts; text of the model is escaped."""
    from model.device import page_style

    title = escape(f"{report.name}: {report.scheme.name}")
    sections: Iterable[str] = (
        f"<section>{as_html(build_blocks(report, most_weights=10**6))}</section>",
        *([] if report.evaluation is None else [_render_layers(report.evaluation)]),
        f"<section><h2>Runs</h2>{as_html([f'{name}: {text}.' for name, text in _MEANINGS.items()])}</section>",
    )
    style = page_style() + ".nkw-report p { white-space: normal; }"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<header><h1>{title}</h1></header>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _render_layers(evaluation: Evaluation) -> str:
    """Return the section of the page with the error after each layer."""
    rows = [(str(index), f"{error:.5f}") for index, error in enumerate(evaluation.layer_errors)]
    return f"<section><h2>Error by layer</h2>{as_html([table('layer|relative error', rows)])}</section>"
