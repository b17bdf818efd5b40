"""Fit a serving stack's constants to published runs of whole models; print published and predicted values."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from benchmarks.stacks.entries import Half, read_published
from benchmarks.stacks.fit import DeviceTimes, Prediction, cross_validate, fit_stack, predict_device
from benchmarks.stacks.host import SLOTS, fit_line, measure_steps
from benchmarks.stacks.shares import list_shares
from model.device import chip
from model.plan.stack_records import STACKS
from model.plan.stacks import METRICS, PublishedRun, Stack
from nkw.process import disable_collector

_FITTED = "transformers-neuronx"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, one line at a time, and return 0.

    --host prints CPU times of this project's engine instead, --shares the shares of the peaks.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.stacks", description=__doc__
    )
    parser.add_argument(
        "--host", action="store_true", help="measure the host's part of this project's engine"
    )
    parser.add_argument(
        "--shares", action="store_true", help="list the shares of the peaks that prompts and steps reach"
    )
    options = parser.parse_args(argv)
    lines = measure_host() if options.host else list_shares() if options.shares else compare()
    for line in lines:
        print(line)
    return 0


def measure_host() -> Iterator[str]:
    """Yield a Markdown table of CPU times of this project's engine by number of slots, and the fitted lines."""
    times = {slots: measure_steps(slots) for slots in SLOTS}
    yield "| slots | prompts of 128 tokens, ms | decode step, ms |"
    yield "|---:|---:|---:|"
    for slots, (prompts_ms, step_ms) in times.items():
        yield f"| {slots} | {prompts_ms:.2f} | {step_ms:.2f} |"
    yield ""
    for name, column in (("prompts", 0), ("decode step", 1)):
        base, slot = fit_line({slots: values[column] for slots, values in times.items()})
        yield f"{name}: {base:.2f} ms + {slot:.3f} ms a slot"


def predict_all() -> tuple[DeviceTimes, ...]:
    """Return the device times of all published runs that are not excluded."""
    times = []
    for run in read_published().runs:
        with disable_collector():
            times.append(predict_device(run))
    return tuple(times)


def fit_half(times: Iterable[DeviceTimes]) -> Stack:
    """Return the transformers-neuronx stack with its constants fitted to the runs of the fitted half."""
    return fit_stack(STACKS[_FITTED], select_half(times, Half.fitted))


def select_half(times: Iterable[DeviceTimes], half: Half) -> list[DeviceTimes]:
    """Return the device times of the runs in a half, in their order."""
    return [device_times for device_times in times if device_times.run.half is half]


def list_runs(times: Iterable[DeviceTimes], stack: Stack) -> tuple[PublishedRun, ...]:
    """Return the runs of the fitted half as the stack's record stores them, with published over predicted values.

    Each run is predicted by constants fitted without the runs of its model and instance. Numbers are rounded.
    """
    fitted = select_half(times, Half.fitted)
    return tuple(
        PublishedRun(
            chip(device_times.run.chip).generation,
            round(device_times.parameters, 1),
            device_times.run.batch,
            device_times.run.prompt,
            *(round(ratios[metric], 2) for metric in METRICS),
        )
        for device_times, ratios in zip(fitted, cross_validate(stack, fitted))
    )


def compare() -> Iterator[str]:
    """Yield the fitted constants, published and predicted values, errors, and excluded entries, as Markdown."""
    times = predict_all()
    stack = fit_half(times)
    stack = replace(stack, runs=list_runs(times, stack))
    yield from _describe_fit(stack)
    stacks = {**STACKS, _FITTED: stack}
    predictions = {
        half: [
            device_times.serve(stacks[device_times.run.stack.name])
            for device_times in select_half(times, half)
        ]
        for half in Half
    }
    for half, title in (
        (Half.fitted, "Fitted half"),
        (Half.other, "Other half"),
        (Half.apart, "Kept apart from both"),
    ):
        yield from _list_predictions(title, predictions[half])
    yield from _summarise(predictions)
    yield from _cover(times, stack)
    yield "## Entries that are not predicted"
    yield ""
    for id, reason in read_published().excluded:
        yield f"- {id}: {reason}"


def _describe_fit(stack: Stack) -> Iterator[str]:
    """Yield a section with the fitted constants, and the runs as lines for `model.plan.stack_records`."""
    yield f"## {stack.title}, fitted"
    yield ""
    yield f"- decode step: {stack.decode_scale.value} x device time"
    yield f"- engine, decode step: {stack.step_engine.base_ms} ms + {stack.step_engine.slot_ms} ms a slot"
    yield (
        f"- prompts: {stack.prompt_scale.value} x device time, attention {stack.attention_scale.value} x device time"
    )
    yield f"- engine, prompts: {stack.prompt_engine.base_ms} ms + {stack.prompt_engine.slot_ms} ms a prompt"
    yield ""
    for run in stack.runs:
        values = run.generation, run.parameters, run.batch, run.prompt, run.ttft, run.tpot, run.throughput
        yield f"    PublishedRun({', '.join(map(str, values))}),"
    yield ""


def _list_predictions(title: str, predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield a section with a table of predictions; a cell is published / predicted."""
    yield f"## {title}"
    yield ""
    yield "| model, instance, stack | batch | prompt | output | TTFT ms | TPOT ms | tokens/s | share of peaks |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for prediction in sorted(predictions, key=_sort_by_run):
        run = prediction.run
        published = {"ttft": run.ttft_ms, "tpot": run.tpot_ms, "throughput": run.throughput}
        cells = [
            "" if value is None else f"{value:,.1f} / {prediction.values[metric]:,.1f}"
            for metric, value in published.items()
        ]
        share = prediction.floor_ns / (1e6 * run.ttft_ms)
        yield (
            f"| {run.model}, {run.instance}, {run.stack.name} | {run.batch} | {run.prompt:,} | {run.generate:,} | "
            f"{' | '.join(cells)} | {share:.2f} |"
        )
    yield ""


def _sort_by_run(prediction: Prediction) -> tuple[str, str, int]:
    """Return the sort key of a prediction: instance, model and batch of its run."""
    return prediction.run.instance, prediction.run.model, prediction.run.batch


def _summarise(predictions: dict[Half, list[Prediction]]) -> Iterator[str]:
    """Yield a section with the median and 90th percentile of the errors by half, stack and chip."""
    yield "## Errors by metric, stack and chip"
    yield ""
    yield "Errors are |predicted / published - 1|: median and 90 %."
    yield ""
    yield "| half | stack | chip | runs | TTFT | TPOT | tokens/s |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for half, listed in predictions.items():
        groups = sorted({(prediction.run.stack.name, prediction.run.chip) for prediction in listed})
        names = sorted({name for name, _ in groups})
        for name, chip_name in [*groups, *((name, "all") for name in names)]:
            chosen = [
                prediction
                for prediction in listed
                if prediction.run.stack.name == name and chip_name in ("all", prediction.run.chip)
            ]
            cells = [_format_errors(chosen, metric) for metric in METRICS]
            yield f"| {half.value} | {name} | {chip_name} | {len(chosen)} | {' | '.join(cells)} |"
    yield ""


def _format_errors(predictions: Sequence[Prediction], metric: str) -> str:
    """Return the median and 90th percentile of |predicted / published - 1| for a metric, or "" if none is published."""
    errors = [
        abs(1 / prediction.ratios[metric] - 1) for prediction in predictions if metric in prediction.ratios
    ]
    if not errors:
        return ""
    return f"{median(errors):.0%}, {float(np.quantile(errors, 0.9)):.0%}"


def _cover(times: Sequence[DeviceTimes], stack: Stack) -> Iterator[str]:
    """Yield a section on the ranges that a report prints, applied to the other half of the runs.

    It says how many values are inside the range, and the median ratio of a range's ends.
    """
    yield "## Ranges on the other half"
    yield ""
    yield "| metric | chip | values | inside | width |"
    yield "|---|---|---:|---:|---:|"
    other_half = select_half(times, Half.other)
    for metric in METRICS:
        for chip_name in (*sorted({device_times.run.chip for device_times in other_half}), "all"):
            chosen = [
                device_times for device_times in other_half if chip_name in ("all", device_times.run.chip)
            ]
            inside, widths = 0, []
            for device_times in chosen:
                run = device_times.run
                ratios = stack.find_ratios(metric, run.chip, device_times.parameters, run.batch, run.prompt)
                assert ratios is not None, "runs of both chips are fitted"
                inside += ratios.low <= device_times.serve(stack).ratios[metric] <= ratios.high
                widths.append(ratios.high / ratios.low)
            yield f"| {metric} | {chip_name} | {len(chosen)} | {inside} | {median(widths):.2f} |"
    yield ""


if __name__ == "__main__":
    raise SystemExit(main())
