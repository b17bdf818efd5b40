"""Predicted traffic of images as text and as the JSON document of `nkw traffic --json`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from model.device import chip
from model.traffic.document import build_percentiles
from model.traffic.images import ImageTraffic
from model.traffic.text import build_percentile_table, build_sentences, format_count, join_blocks
from model.traffic.workload import SECOND_NS
from nkw.report import Part, table
from nkw.version import DISTRIBUTION, version


def build_image_text(traffic: ImageTraffic) -> list[Part]:
    """Return the parts of the printed report: deployment, times, stages, rates and the basis of the times."""
    run = traffic.summary
    rows = [("in the queue", run.queue), ("drawing its batch", run.drawing), ("end to end", run.e2e)]
    return join_blocks(
        [
            build_sentences(_describe_deployment(traffic)),
            [build_percentile_table(rows)],
            [_build_stages(traffic)],
            build_sentences(_describe_rates(traffic)),
            build_sentences(_describe_basis(traffic)),
        ]
    )


def _describe_deployment(traffic: ImageTraffic) -> Iterator[str]:
    """Yield sentences about the replicas and the requests."""
    request, stream, (rows, columns) = traffic.request, traffic.stream, traffic.pipeline.image_size
    groups = "" if request.dp == 1 else f"{request.dp} groups of "
    yield (
        f"{columns}x{rows} pixels on {traffic.instance.name}: {groups}{format_count(request.tp, 'rank')} "
        f"(LNC {traffic.lnc}), {format_count(traffic.replicas, 'replica')}, {traffic.pipeline.denoiser.activations}"
    )
    steps = " or ".join(f"{steps:,}" for steps in request.steps)
    yield (
        f"{steps} steps with guidance {request.guidance:g}; a batch takes up to "
        f"{format_count(request.most_images, 'waiting request')} of equal settings"
    )
    if stream.users:
        pause_s = stream.think_ns / SECOND_NS
        arrivals = f"{format_count(stream.users, 'user')}, {pause_s:g} s between image and next"
    else:
        arrivals = "at one moment" if stream.rate is None else f"{stream.rate:,.2f} per second"
    yield f"{format_count(len(stream.queries), 'request')}, {arrivals}"


def _build_stages(traffic: ImageTraffic) -> Part:
    """Return the table of the time of each component: its mean in a batch, that of an image, and its share."""
    run = traffic.summary
    busy_ns = sum(run.stages_ns.values())
    rows = [
        (
            name.replace("_", " "),
            f"{time_ns / run.batches / 1e6:,.2f}",
            f"{time_ns / run.images / 1e6:,.2f}",
            f"{time_ns / busy_ns:.1%}",
        )
        for name, time_ns in [*run.stages_ns.items(), ("together", busy_ns)]
    ]
    return table("stage|ms of a batch, mean|ms of an image|share", rows)


def _describe_rates(traffic: ImageTraffic) -> Iterator[str]:
    """Yield sentences about throughput, batches, the rate of full batches and the price."""
    run = traffic.summary
    yield (
        f"{run.images_per_s:,.2f} images/s; batches take {run.utilisation:.1%} of the time, of "
        f"{run.images_per_batch:,.2f} images on average"
    )
    yield f"full batches would give {traffic.full_rate:,.2f} images/s"
    if traffic.price is not None:
        yield (
            f"${run.dollars_per_thousand(traffic.price.dollars_per_hour):,.3f} per 1,000 images; "
            f"{traffic.instance.name} at {traffic.price}"
        )


def _describe_basis(traffic: ImageTraffic) -> Iterator[str]:
    """Yield sentences about what the times rest on."""
    yield (
        "Times of batches are dry runs of this project's kernels "
        f"({len(traffic.batch_times):,} of different sizes and settings), program order; host, runtime and network "
        "are not counted. Requests go to the replicas in turn."
    )
    record = chip(traffic.instance.target)
    if record.replaced:
        yield f"Times are those of {record.label}."


def build_image_document(traffic: ImageTraffic, name: str) -> dict[str, Any]:
    """Return the JSON document of a prediction; docs/model/planning.md has its schema.

    Args:
        traffic: The prediction.
        name: Name of the model.
    """
    request, run, stream = traffic.request, traffic.summary, traffic.stream
    price = None if traffic.price is None else traffic.price.dollars_per_hour
    return {
        "config": name,
        "instance": traffic.instance.name,
        "lnc": traffic.lnc,
        "tp": request.tp,
        "dp": request.dp,
        "replicas": traffic.replicas,
        "dtype": str(traffic.pipeline.denoiser.activations),
        "image_size": list(traffic.pipeline.image_size),
        "steps": list(request.steps),
        "guidance": request.guidance,
        "max_num_seqs": request.most_images,
        "requests": len(stream.queries),
        "rate": stream.rate,
        "users": stream.users or None,
        "think_s": stream.think_ns / SECOND_NS if stream.users else None,
        "seed": request.seed,
        "full_rate": traffic.full_rate,
        "price": price,
        "price_basis": None if traffic.price is None else asdict(traffic.price),
        "run": {
            "queue_ns": build_percentiles(run.queue),
            "drawing_ns": build_percentiles(run.drawing),
            "e2e_ns": build_percentiles(run.e2e),
            "mean_queue_ns": run.mean_queue_ns,
            "stages_ns": run.stages_ns,
            "images": run.images,
            "batches": run.batches,
            "images_per_s": run.images_per_s,
            "elapsed_ns": run.elapsed_ns,
            "utilisation": run.utilisation,
            "dollars_per_thousand": None if price is None else run.dollars_per_thousand(price),
        },
        "batch_times": [
            {"steps": sampling.steps, "images": images, "stages_ns": stages_ns}
            for (sampling, images), stages_ns in traffic.batch_times.items()
        ],
        "basis": " ".join(_describe_basis(traffic)),
        "versions": {DISTRIBUTION: version(), "python": platform.python_version()},
    }
