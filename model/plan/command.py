"""`nkw plan`: reads a config, plans, reports."""

from __future__ import annotations

import argparse
import json

from model.families import model_files
from model.plan.document import document
from model.plan.parameters import load_model
from model.plan.plan import Request, make_plan
from model.plan.text import parts
from simulate.files import Outputs
from simulate.terminal import show, show_lines


def plan_command(options: argparse.Namespace) -> int:
    """Plan the model of a config; returns the exit status."""
    model = load_model(options.config)
    request = Request(
        instance=options.instance,
        accelerator=options.accelerator,
        tp=options.tp,
        batch=options.batch,
        prompt=options.prompt,
        generate=options.generate,
        dtype=None if options.dtype == "auto" else options.dtype,
        price=options.price,
    )
    name = str(options.config)
    results = Outputs(lambda: model_files(options.config)).claim(options.json, "plan", "NKW-PLAN-FILE")
    plan = make_plan(model, request)
    if results is not None:
        with results.writing() as file:
            json.dump(document(plan, name), file, indent=2, ensure_ascii=False, allow_nan=False)
            file.write("\n")
    show_lines(f"{name}:")
    show(parts(plan))
    return 0
