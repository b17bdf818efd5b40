"""`nkw traffic` for a diffusion model: what users who ask for images would see."""

from __future__ import annotations

import argparse

from model.commands.traffic.arguments import OPTIONS
from model.commands.unread import refuse_options
from model.plan.images import open_planned_pipeline
from model.traffic.image_report import build_image_document, build_image_text
from model.traffic.images import MOST_IMAGES_OF_BATCH, ImageTrafficRequest, predict_image_traffic
from model.traffic.traffic import REQUESTS
from nkw.files import Outputs, json_document
from nkw.process import disable_collector
from nkw.terminal import show, show_lines, working

IMAGE_OPTIONS = ("steps", "guidance", "size", "dp")
"""Options of images, which traffic of other models does not read."""
_UNREAD = (
    *("stack", "ep", "trace", "prompt_lengths", "output_lengths", "shared_prefix", "sla", "compare"),
    *("prefill_replicas", "speculative_tokens", "acceptance", "acceptance_text", "draft_model"),
    *(
        "max_num_batched_tokens",
        "max_model_len",
        "block_size",
        "buckets",
        "chunked_prefill",
        "prefix_caching",
    ),
    *("family", "quantization", "kv_cache_dtype", "html"),
)


def traffic_of_images(options: argparse.Namespace) -> int:
    """Predict the traffic of images, print the report, write the document of --json, and return the exit status 0.

    The folder needs no weights.

    Raises:
        ModelError: An option is given that such a prediction does not read, or the model, the instance or an option
            does not allow it.
        InvalidArgument: A file cannot be written.
    """
    refuse_options(options, OPTIONS, _UNREAD, "traffic of images has no tokens, pages or service level")
    request = ImageTrafficRequest(
        steps=options.steps,
        guidance=options.guidance,
        instance=options.instance,
        tp=options.tp or 1,
        dp=options.dp,
        lnc=options.lnc,
        replicas=options.replicas,
        rate=options.rate,
        share=options.load,
        users=options.users,
        think_s=options.think,
        requests=options.requests or REQUESTS,
        most_images=options.max_num_seqs or MOST_IMAGES_OF_BATCH,
        price=options.price,
        prices=options.prices,
        seed=options.seed,
    )
    name, doing = options.config.resolve().name, ["reading"]
    pipeline = open_planned_pipeline(options.config, options.dtype, options.size)
    outputs = Outputs(lambda: [*pipeline.files, *([] if options.prices is None else [options.prices])])
    with json_document(options.json, outputs, "traffic", "NKW-TRAFFIC-FILE", "traffic") as contents:
        with working(lambda: f"traffic of {name}: {doing[-1]}"), disable_collector():
            traffic = predict_image_traffic(pipeline, request, doing.append)
        contents.update(build_image_document(traffic, name))
        show_lines(f"{name}:")
        show(build_image_text(traffic))
    return 0
