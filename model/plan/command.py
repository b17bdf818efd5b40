"""`nkw plan`: reads a config, plans, reports."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack

from model.output import OutputFile
from model.plan.document import document
from model.plan.parameters import load_model
from model.plan.plan import Request, make_plan
from model.plan.text import parts
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
    with ExitStack() as files:
        results = files.enter_context(OutputFile(options.json)) if options.json else None
        plan = make_plan(model, request)
        if results is not None:
            written = json.dumps(document(plan, name), indent=2, ensure_ascii=False)
            results.temporary.write_text(written + "\n", encoding="utf-8", errors="backslashreplace")
            results.commit()
        show_lines(f"{name}:")
        show(parts(plan))
    return 0
