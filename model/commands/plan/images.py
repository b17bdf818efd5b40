"""`nkw plan` for a diffusion model: time by component, images a second, and what 1,000 images cost."""

from __future__ import annotations

import argparse
from dataclasses import replace

from model.commands.generate.profile import describe_components
from model.commands.plan.arguments import OPTIONS
from model.commands.plan.masked_text import UNPLANNED
from model.commands.unread import refuse_options
from model.device import choose_lnc, find_instance
from model.errors import ModelError
from model.plan.images import open_planned_pipeline, plan_images
from model.plan.plan import DEFAULT_INSTANCE
from model.plan.prices import find_price
from model.runners.denoise import Sampling
from nkw.files import Outputs, json_document
from nkw.terminal import show, show_lines, working

_READ = ("price", "prices", "quantization")
IMAGE_OPTIONS = ("steps", "guidance", "size", "ulysses_degree", "profile")
"""Options of images, which plans of other models do not read."""


def plan_pipeline(options: argparse.Namespace) -> int:
    """Print the plan of images, and write the document of --json; return the exit status 0.

    The folder needs no weights.

    Raises:
        ModelError: An option is given that such a plan does not read, or the folder describes what no layer computes.
    """
    unread = (*(name for name in UNPLANNED if name not in _READ), "prompt", "generate")
    refuse_options(options, OPTIONS, unread, "images are planned on tensor and Ulysses ranks of one instance")
    names = [name.strip() for names in options.instance or () for name in names.split(",")]
    if len(names) > 1:
        raise ModelError(f"images are planned on one instance, not on {len(names)}")
    instance = find_instance(next(iter(names), DEFAULT_INSTANCE))
    lnc = choose_lnc(instance.target, options.lnc, largest=True)
    pipeline = open_planned_pipeline(options.config, options.dtype, options.size)
    denoiser = pipeline.denoiser.quantise(options.quantization, instance.target)
    pipeline = replace(pipeline, denoiser=denoiser)
    price = find_price(instance, options.price, options.prices)
    outputs = Outputs(lambda: [*pipeline.files, *([] if options.prices is None else [options.prices])])
    name = options.config.resolve().name
    with json_document(options.json, outputs, "plan", "NKW-PLAN-FILE", "plan") as contents:
        with working(lambda: f"plan of {name}: dry runs of its kernels"):
            plan = plan_images(
                pipeline,
                instance.target,
                instance.physical_cores,
                Sampling(options.steps, options.guidance),
                options.batch or 1,
                options.tp or 1,
                lnc,
                price,
                options.ulysses_degree,
            )
        contents.update(plan.build_document(name))
        show_lines("\n".join(plan.format_lines(name)))
        if options.profile:
            show(["", *describe_components(plan.target, plan.components)])
    return 0
