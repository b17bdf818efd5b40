"""Entry of `nkw plan`: memory, meshes and predicted times of a model from its config.json."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from model.commands.plan.arguments import OPTIONS
from model.commands.plan.images import IMAGE_OPTIONS, plan_pipeline
from model.commands.plan.masked_text import UNPLANNED, plan_masked_text
from model.commands.unread import refuse_options
from model.config import Config, ModelConfig
from model.config.folder import list_model_files
from model.config.masked_text import MaskedTextConfig
from model.config.published import describe_config
from model.config.quantization import GLOBAL, RANK
from model.device import choose_lnc, find_instance
from model.errors import ModelError
from model.families import read_record
from model.loading.pipeline import is_pipeline
from model.plan.bench_script import script_plan, script_recommendation
from model.plan.document import build_document
from model.plan.plan import DEFAULT_INSTANCE, Request, make_plan
from model.plan.recommend import recommend
from model.plan.recommend_document import build_recommendation
from model.plan.recommend_text import format_recommendation
from model.plan.row_scales import compare_row_scales, describe_row_scales, format_row_scales
from model.plan.schemes import compare_schemes, describe_schemes, format_schemes
from model.plan.service_level import ServiceLevel
from model.plan.single_step import plan_step
from model.plan.sizes import ModelSizes, load_model
from model.plan.text import format_plan
from nkw.files import STDOUT, Outputs, json_document
from nkw.process import disable_collector
from nkw.terminal import show, show_lines, working

_SIZES = ("tp", "batch", "prompt", "generate")
"""Options of the sizes of steps, for models whose steps have several."""


def plan_command(options: argparse.Namespace) -> int:
    """Print the plan of a config, or with --recommend a comparison of instances, and write the files of the options.

    Returns:
        The exit status: 0, or 1 if the batch does not fit or no instance keeps the service level.

    Raises:
        ModelError: Options exclude each other, or the config or the instance cannot be used.
        InvalidArgument: A file cannot be written.
    """
    if is_pipeline(options.config):
        return plan_pipeline(options)
    refuse_options(options, OPTIONS, IMAGE_OPTIONS, "only images of a diffusion model have it")
    config = read_record(options.config, options.family)
    if isinstance(config, MaskedTextConfig):
        return plan_masked_text(options, config)
    if not isinstance(config, ModelConfig):
        return _plan_step(options, config)
    model = _load_model(options, config, options.row_scales)
    names = _list_instances(options)
    if options.recommend and options.rate is None:
        raise ModelError("--recommend compares instances for a load: give --rate, its requests a second")
    if not options.recommend and options.rate is not None:
        raise ModelError("--rate is the load of --recommend: add --recommend, or leave --rate out")
    if options.recommend and options.schemes:
        raise ModelError("--schemes compares schemes on one instance: leave it or --recommend out")
    if not options.recommend and len(names) > 1:
        raise ModelError(f"a plan is for one instance, not for {len(names)}: --recommend compares them")
    if options.bench_script is not None and options.accelerator is not None:
        raise ModelError("--bench-script starts a server on an instance: leave --accelerator out")
    request = Request(
        instance=next(iter(names), None),
        accelerator=options.accelerator,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        sp=options.sp,
        batch=options.batch or 1,
        prompt=options.prompt,
        generate=options.generate,
        dtype=None if options.dtype == "auto" else options.dtype,
        price=options.price,
        prices=options.prices,
        level=ServiceLevel.parse(options.sla),
        stack=options.stack,
        lnc=options.lnc,
    )
    outputs = Outputs(lambda: _list_inputs(options))
    if options.recommend:
        return _recommend(options, model, request, names, outputs)
    name = describe_config(options.config)
    with (
        _bench_script(options, outputs) as script,
        json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents,
    ):
        with working(lambda: f"plan of {name}: dry runs of its kernels"), disable_collector():
            plan = make_plan(model, request)
            schemes = compare_schemes(plan) if options.schemes else None
            costs = None
            if options.row_scales == GLOBAL:
                costs = compare_row_scales(plan, _load_model(options, config, RANK))
        contents.update(build_document(plan, name))
        show_lines(f"{name}:")
        show(format_plan(plan))
        if schemes is not None:
            contents["schemes"] = describe_schemes(schemes)
            show(["", *format_schemes(plan, schemes)])
        if costs is not None:
            contents["row_scales"] = describe_row_scales(costs)
            show(["", *format_row_scales(plan, costs)])
        if options.bench_script is not None and plan.rate.fits:
            script.append(script_plan(plan, options.config))
    return 0 if plan.rate.fits else 1


def _load_model(options: argparse.Namespace, config: ModelConfig, row_scales: str) -> ModelSizes:
    """Return the sizes of the model of a plan, with row scales of a rank's or of all columns (`ROW_SCALES`).

    Raises:
        ModelError: The options do not fit the config.
    """
    return load_model(
        options.config,
        config,
        quantization=options.quantization,
        cache_dtype=options.kv_cache_dtype,
        row_scales=row_scales,
    )


def _recommend(
    options: argparse.Namespace, model: ModelSizes, request: Request, names: Sequence[str], outputs: Outputs
) -> int:
    """Print a comparison of instances for the load of --rate, and write the files of the options.

    Args:
        options: The parsed options.
        model: The model.
        request: What is asked of each instance.
        names: Names of the instances; empty for all.
        outputs: Output files of the command.

    Returns:
        The exit status: 0, or 1 if no instance keeps the service level.
    """
    name, progress = describe_config(options.config), ["instances"]
    with (
        _bench_script(options, outputs) as script,
        json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents,
    ):
        with working(lambda: f"plan of {name}: {progress[-1]}"), disable_collector():
            recommendation = recommend(model, request, names, options.rate, options.batch, progress.append)
        contents.update(build_recommendation(recommendation, name))
        show_lines(f"{name}:")
        show(format_recommendation(recommendation))
        if options.bench_script is not None and recommendation.chosen is not None:
            script.append(script_recommendation(recommendation, options.config))
    return 0 if recommendation.chosen is not None else 1


def _list_instances(options: argparse.Namespace) -> list[str]:
    """Return the names in --instance, which may be repeated and have commas between names; empty without it."""
    return [name.strip() for names in options.instance or () for name in names.split(",")]


def _list_inputs(options: argparse.Namespace) -> list[Path]:
    """Return the files that a plan reads, which no output may replace."""
    return [*list_model_files(options.config), *([] if options.prices is None else [options.prices])]


@contextmanager
def _bench_script(options: argparse.Namespace, outputs: Outputs) -> Iterator[list[str]]:
    """Yield a list of texts, which are written as the file of --bench-script when the block ends, unless it is empty.

    With `-` the script goes to stdout, and all other output of the block to stderr. Without the option nothing is
    written.

    Raises:
        ModelError: Both the script and the document of --json go to stdout.
        InvalidArgument: The file cannot be written.
    """
    to_stdout = str(options.bench_script) == STDOUT
    if to_stdout and str(options.json) == STDOUT:
        raise ModelError("--bench-script and --json cannot both go to stdout: give one of them a file")
    output = None if to_stdout else outputs.claim(options.bench_script, "script", "NKW-PLAN-FILE")
    script: list[str] = []
    with redirect_stdout(sys.stderr) if to_stdout else nullcontext():
        yield script
    if to_stdout:
        print(*script, sep="", end="")
    elif output is not None and script:
        with output.writing() as file:
            file.write("".join(script))


def _plan_step(options: argparse.Namespace, config: Config) -> int:
    """Print the plan of a model whose steps all have the same size, on one rank; return the exit status 0.

    Raises:
        ModelError: An option is given that such a plan does not read, or several instances are.
    """
    reason = f"a step of a {config.model_type} has one size, and is planned on one rank"
    refuse_options(options, OPTIONS, _SIZES + UNPLANNED, reason)
    names = _list_instances(options)
    if len(names) > 1:
        raise ModelError(f"a step of a {config.model_type} is planned on one instance, not on {len(names)}")
    target = find_instance(next(iter(names), DEFAULT_INSTANCE)).target
    name, outputs = describe_config(options.config), Outputs(lambda: _list_inputs(options))
    with json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents:
        plan = plan_step(config, target, options.dtype, choose_lnc(target, options.lnc, largest=True))
        contents.update(plan.build_document(name))
        for line in plan.format_lines(name):
            show_lines(line)
    return 0
