"""Entry of `nkw plan`."""

from __future__ import annotations

import argparse

from model.commands.plan.arguments import OPTIONS
from model.config import Config, ModelConfig
from model.config.folder import list_model_files
from model.config.published import describe_config
from model.device import choose_lnc, find_instance
from model.errors import ModelError
from model.families import read_record
from model.plan.document import build_document
from model.plan.plan import DEFAULT_INSTANCE, Request, make_plan
from model.plan.service_level import ServiceLevel
from model.plan.single_step import plan_step
from model.plan.sizes import load_model
from model.plan.text import format_plan
from nkw.files import Outputs, json_document
from nkw.process import collector_off
from nkw.terminal import show, show_lines, working

_DEFAULTS = {option.name.strip("-").partition("=")[0]: option.keywords.get("default") for option in OPTIONS}


def plan_command(options: argparse.Namespace) -> int:
    """Plan the model of a config and return the exit status: 1 if the batch does not fit."""
    config = read_record(options.config, options.family)
    if not isinstance(config, ModelConfig):
        return _plan_step(options, config)
    model = load_model(options.config, config)
    request = Request(
        instance=options.instance,
        accelerator=options.accelerator,
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        sp=options.sp,
        batch=options.batch,
        prompt=options.prompt,
        generate=options.generate,
        dtype=None if options.dtype == "auto" else options.dtype,
        price=options.price,
        prices=options.prices,
        level=ServiceLevel.parse(options.sla),
        stack=options.stack,
        lnc=options.lnc,
    )
    name = describe_config(options.config)
    outputs = Outputs(lambda: list_model_files(options.config))
    with json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents:
        with working(lambda: f"plan of {name}: dry runs of its kernels"), collector_off():
            plan = make_plan(model, request)
        contents.update(build_document(plan, name))
        show_lines(f"{name}:")
        show(format_plan(plan))
    return 0 if plan.rate.fits else 1


def _plan_step(options: argparse.Namespace, config: Config) -> int:
    """Plan a model whose steps all have the same size, on a rank of an instance.

    Raises:
        ModelError: an option is set that such a plan does not read.
    """
    unread = (
        "accelerator",
        "tp",
        "pp",
        "ep",
        "sp",
        "batch",
        "prompt",
        "generate",
        "price",
        "prices",
        "sla",
        "stack",
    )
    for name in unread:
        if (getattr(options, name) or None) != _DEFAULTS.get(name):
            raise ModelError(
                f"--{name}: a step of a {config.model_type} has one size, and is planned on one rank"
            )
    target = find_instance(options.instance or DEFAULT_INSTANCE).target
    name, outputs = describe_config(options.config), Outputs(lambda: list_model_files(options.config))
    with json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents:
        plan = plan_step(config, target, options.dtype, choose_lnc(target, options.lnc, largest=True))
        contents.update(plan.document(name))
        for line in plan.text(name):
            show_lines(line)
    return 0
