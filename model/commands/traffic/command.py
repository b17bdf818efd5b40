"""Entry of `nkw traffic`: predicts what users of a model would see, and prints and writes the report."""

from __future__ import annotations

import argparse
from pathlib import Path

from model.commands.traffic.arguments import OPTIONS
from model.commands.traffic.images import IMAGE_OPTIONS, traffic_of_images
from model.commands.unread import refuse_options
from model.config.folder import list_model_files
from model.config.published import describe_config
from model.engine import SchedulerOptions
from model.loading.pipeline import is_pipeline
from model.plan.service_level import ServiceLevel
from model.traffic.deployment import LIMITS
from model.traffic.document import build_document
from model.traffic.lengths import Lengths
from model.traffic.page import render_page
from model.traffic.text import build_text
from model.traffic.traffic import Request, predict_traffic
from model.traffic.workload import SharedPrefix
from nkw.files import Outputs, json_document
from nkw.process import disable_collector
from nkw.terminal import show, show_lines, working


def traffic_command(options: argparse.Namespace) -> int:
    """Predict the traffic of a model, print the report, write the files of the options, and return the exit status 0.

    Raises:
        ModelError: An option, the model, the instance or a file does not allow the prediction.
        InvalidArgument: A file cannot be written.
    """
    if is_pipeline(options.config):
        return traffic_of_images(options)
    refuse_options(options, OPTIONS, IMAGE_OPTIONS, "only images of a diffusion model have it")
    request = Request(
        config=options.config,
        family=options.family,
        quantization=options.quantization,
        instance=options.instance,
        tp=options.tp,
        ep=options.ep,
        replicas=options.replicas,
        dtype=None if options.dtype == "auto" else options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        rate=options.rate,
        share=options.load,
        trace=options.trace,
        users=options.users,
        think_s=options.think,
        requests=options.requests,
        prompts=None if options.prompt_lengths is None else Lengths.parse(options.prompt_lengths),
        outputs=Lengths.parse(options.output_lengths),
        prefix=None if options.shared_prefix is None else SharedPrefix.parse(options.shared_prefix),
        level=ServiceLevel.parse(options.sla),
        price=options.price,
        prices=options.prices,
        seed=options.seed,
        block_size=options.block_size,
        options=SchedulerOptions(
            options.max_num_seqs or LIMITS.max_num_seqs,
            options.max_num_batched_tokens,
            chunked_prefill=options.chunked_prefill,
            prefix_caching=options.prefix_caching,
            speculative_tokens=options.speculative_tokens,
        ),
        max_model_len=options.max_model_len,
        compare=options.compare,
        buckets=options.buckets,
        prefill_replicas=options.prefill_replicas,
        acceptance=options.acceptance,
        acceptance_text=options.acceptance_text,
        draft_model=options.draft_model,
        curve=options.html is not None,
        lnc=options.lnc,
        stack=options.stack,
    )
    name = describe_config(options.config)
    outputs = Outputs(lambda: _list_inputs(options))
    doing = ["reading"]
    html = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    with json_document(options.json, outputs, "traffic", "NKW-TRAFFIC-FILE", "traffic") as contents:
        with working(lambda: f"traffic of {name}: {doing[-1]}"), disable_collector():
            traffic = predict_traffic(request, doing.append)
        contents.update(build_document(traffic, name))
        show_lines(f"{name}:")
        show(build_text(traffic))
        if html is not None:
            with html.writing() as file:
                file.write(render_page(traffic, name))
            show_lines(f"page: {options.html}")
    return 0


def _list_inputs(options: argparse.Namespace) -> list[Path]:
    """Return the files that a prediction reads, which no output may replace."""
    drafts = [] if options.draft_model is None else list_model_files(options.draft_model)
    texts = [path for path in (options.trace, options.acceptance_text, options.prices) if path is not None]
    return [*list_model_files(options.config), *drafts, *texts]
