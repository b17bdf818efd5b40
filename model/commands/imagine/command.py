"""Entry of `nkw imagine`: draws images, compares them with the numpy model, and predicts times."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np

from model.commands.generate.mesh import MOST_RANKS
from model.commands.generate.prediction import check_cores, check_timelines, iterate_targets, write_timelines
from model.commands.generate.profile import describe_components
from model.commands.imagine.explain import PassRecorder, describe_trace
from model.commands.imagine.png import arrange_grid, write_png
from model.commands.imagine.report import Difference, TargetTimes, summarise
from model.commands.options.images import FIRST_PROMPT
from model.errors import ModelError, check_memory
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.denoise import Drawing, Guidance, ImageRequest, ImageRunner, Sampling, check_count
from model.runners.image_mesh import check_components
from model.runners.image_times import ComponentTime, DryBackend
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.pipeline import Backend, ImagePipeline
from model.runners.png import check_pillow, describe_settings, list_settings
from nkw.files import STDOUT, OutputFile, Outputs, json_document, opened
from nkw.terminal import show, show_lines, working

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.runners.rank_memory import RankMemory

_CODE = "NKW-IMAGE-FILE"


def imagine_command(options: argparse.Namespace) -> int:
    """Draw images as the options ask, and return the exit status 0.

    Raises:
        ModelError: Options or the model are refused, before the first pass.
        InvalidArgument: A file cannot be written.
    """
    check_cores(options)
    check_timelines(options)
    group_ranks = _count_group_ranks(options)
    if group_ranks * options.dp > MOST_RANKS:
        ulysses = f", --ulysses-degree {options.ulysses_degree}" if options.ulysses_degree > 1 else ""
        raise ModelError(
            f"--tp {options.tp}{ulysses} and --dp {options.dp}; one run takes {MOST_RANKS} ranks at most: give smaller "
            "numbers"
        )
    requests = list_requests(options)
    sampling = Sampling(options.steps, options.guidance, Guidance(options.guidance_passes))
    pipeline = open_pipeline(options.model, options.dtype)
    if options.size is not None:
        pipeline = pipeline.with_image_size(options.size[1], options.size[0])
    pipeline = replace(pipeline, denoiser=pipeline.denoiser.quantise(options.quantization, options.target))
    pipeline = pipeline.with_ulysses_ranks(options.ulysses_degree)
    check_components(pipeline.components, group_ranks)
    pipeline.plan(options.steps)
    outputs = Outputs(lambda: [*pipeline.files, *([] if options.latents is None else [options.latents])])
    if options.out is not None or options.save_steps is not None:
        check_pillow()
    files = [outputs.claim(path, "image", _CODE) for path in list_paths(options, len(requests))]
    trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
    page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    noise = None if options.latents is None else read_noise(options.latents)
    backend = _create_backend(options, pipeline)
    recorder = None if options.explain is None else PassRecorder(backend, pipeline, sampling, options.explain)
    with json_document(options.json, outputs, "imagine") as contents:
        drawing, difference = _draw(options, pipeline, requests, sampling, noise, recorder or backend)
        settings = list_settings(
            pipeline,
            sampling,
            options.negative_prompt,
            options.model.name,
            options.dtype,
            options.quantization,
        )
        settings["latents"] = None if options.latents is None else str(options.latents)
        _write_images(options, files, drawing.images, requests, settings)
        times = _predict(options, pipeline, requests, sampling) if options.backend == "simulate" else []
        show(summarise(drawing, difference, times, group_ranks * options.dp))
        for target in times:
            if target.target == options.target:
                _report_timelines(options, target.components, trace, page)
        traces = [] if recorder is None else list(recorder.trace(requests, group_ranks))
        for trace_of_image in traces:
            show(describe_trace(trace_of_image))
        contents["explained"] = list(map(asdict, traces))
        contents.update(_build_document(options, settings, requests, files, drawing, difference, times))
    return 0


def list_requests(options: argparse.Namespace) -> list[ImageRequest]:
    """Return one request for each image: --images of each prompt, with seeds that follow --seed.

    Raises:
        ModelError: There are more than `MOST_IMAGES` images.
    """
    prompts = options.prompt or [FIRST_PROMPT]
    check_count(options.images * len(prompts))
    return [
        ImageRequest(prompt, options.seed + index * options.images + number, options.negative_prompt)
        for index, prompt in enumerate(prompts)
        for number in range(options.images)
    ]


def list_paths(options: argparse.Namespace, images: int) -> list[Path]:
    """Return the paths of the images of --out: one with --grid, else one for each image, numbered if there are several.

    Raises:
        ModelError: --grid comes without --out, or --out is stdout.
    """
    if options.out is None:
        if options.grid:
            raise ModelError("--grid writes one image: give its file with --out")
        return []
    if os.fspath(options.out) == STDOUT:
        raise ModelError("--out - is not supported: images are not written to stdout; give a file")
    if images == 1 or options.grid or not options.out.name:
        return [options.out]
    return [options.out.with_stem(f"{options.out.stem}-{number}") for number in range(1, images + 1)]


def read_noise(path: Path) -> np.ndarray:
    """Return the array of a .npy file with the noise to begin with.

    Raises:
        ModelError: The file cannot be read, is no .npy file of numbers, or is too large.
    """
    try:
        with opened(path) as file:
            check_memory(os.fstat(file.fileno()).st_size, f"the latents of {path}")
            noise = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", _CODE) from None
    except (ValueError, SyntaxError, TokenError, ArithmeticError, MemoryError):
        raise ModelError(f"{path} cannot be read: it is no .npy file of numbers", _CODE) from None
    if noise.dtype.kind != "f":
        raise ModelError(f"{path} has no floating-point numbers", _CODE)
    return noise


def _count_group_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks that compute a batch together: Ulysses ranks of all tensor-parallel ones."""
    ranks: int = options.tp * options.ulysses_degree
    return ranks


def _create_backend(options: argparse.Namespace, pipeline: ImagePipeline) -> Backend:
    """Return the backend of --backend on the ranks of --tp, --ulysses-degree and --dp.

    Raises:
        ModelError: The HBM of a simulated rank does not hold the weights.
    """
    if options.backend == "numpy":
        return ReferenceBackend(_count_group_ranks(options))
    from model.device import SimulatedDevice

    memory = _measure_memory(options, pipeline, options.target)
    memory.check_weights()
    return KernelBackend(SimulatedDevice(options.target, memory.ranks * options.dp), options.dp, memory)


def _draw(
    options: argparse.Namespace,
    pipeline: ImagePipeline,
    requests: Sequence[ImageRequest],
    sampling: Sampling,
    noise: np.ndarray | None,
    backend: Backend,
) -> tuple[Drawing, Difference | None]:
    """Draw the images, and return them with their difference from the numpy model, if it is asked for."""
    passes = pipeline.plan(sampling.steps).passes
    done = [0]
    runner = ImageRunner(pipeline, backend)
    saved: list[Path] = []

    def on_step(count: int, latents: np.ndarray) -> None:
        done[0] = count
        if options.save_steps is not None:
            grid = arrange_grid(runner.decode(latents), len(latents))
            file = OutputFile(options.save_steps / f"step-{count:03}.png", "image of a step", _CODE)
            saved.append(file.path)
            write_png(
                file, grid, describe_settings([request.prompt for request in requests], {"step": count})
            )

    with (
        _new_folder(options.save_steps, saved),
        working(lambda: f"drawing: {done[0]} of {passes} passes"),
    ):
        drawing = runner.draw(requests, sampling, noise, on_step)
    if options.backend == "numpy" or not options.check:
        return drawing, None
    with working(lambda: "comparing with the numpy model"):
        expected = ImageRunner(pipeline, ReferenceBackend(_count_group_ranks(options))).draw(
            requests, sampling, noise
        )
    return drawing, Difference.measure(drawing, expected)


@contextmanager
def _new_folder(path: Path | None, files: Sequence[Path]) -> Iterator[None]:
    """Create the folder of --save-steps; if the block fails, remove its `files`, and the folder if it is then empty.

    Args:
        path: The folder; None to do nothing.
        files: Paths of the images that the block has begun to write; the block appends to it.

    Raises:
        ModelError: The folder exists, or cannot be made.
    """
    if path is None:
        yield
        return
    try:
        path.mkdir()
    except OSError as error:
        raise ModelError(f"--save-steps {path}: {error.strerror}; it writes a new folder", _CODE) from None
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for file in files:
                file.unlink(missing_ok=True)
            path.rmdir()
        raise


def _write_images(
    options: argparse.Namespace,
    files: Sequence[OutputFile | None],
    images: np.ndarray,
    requests: Sequence[ImageRequest],
    settings: dict[str, Any],
) -> None:
    """Write the images to their files: one grid, or each image with its own prompt and seed."""
    if options.grid:
        images = arrange_grid(images, options.images if options.images > 1 else len(images))[None]
        prompts = [[request.prompt for request in requests]]
        seeds: list[int] = [options.seed]
    else:
        prompts = [[request.prompt] for request in requests]
        seeds = [request.seed for request in requests]
    for file, image, texts, seed in zip(files, images, prompts, seeds):
        if file is not None:
            write_png(file, image, describe_settings(texts, {**settings, "seed": seed}))


def _predict(
    options: argparse.Namespace,
    pipeline: ImagePipeline,
    requests: Sequence[ImageRequest],
    sampling: Sampling,
) -> list[TargetTimes]:
    """Return predicted times of these images on each compared chip."""
    from model.device import DryDevice

    times = []
    for target in iterate_targets(options.target):
        memory = _measure_memory(options, pipeline, target)
        device = DryDevice(target, memory.ranks * options.dp, one_for_all=True, lnc=memory.lnc)
        backend = DryBackend(device, target, options.dp)
        passes = ImageRunner(pipeline, backend).draw(requests, sampling).passes
        components = tuple(backend.list_times(passes))
        fits = memory.fits(max(component.activation_bytes for component in components))
        times.append(TargetTimes(target, len(requests), components, fits))
    return times


def _report_timelines(
    options: argparse.Namespace,
    components: Sequence[ComponentTime],
    trace: OutputFile | None,
    page: OutputFile | None,
) -> None:
    """Write one pass of each component to the files of --trace and --html, and print the profile of --profile.

    Args:
        options: The options.
        components: Times of the components on --target.
        trace: File of --trace, or None.
        page: File of --html, or None.
    """
    passes = [(component.label, component.model_pass) for component in components]
    names = [component.name.replace("_", " ") for component in components]
    write_timelines(options, _count_group_ranks(options) * options.dp, passes, names, trace, page)
    for label, path in (("trace", options.trace), ("page", options.html)):
        if path is not None:
            show_lines(f"{label}: {path}")
    if options.profile:
        show(["", *describe_components(options.target, components)])


def _measure_memory(options: argparse.Namespace, pipeline: ImagePipeline, target: str) -> RankMemory:
    """Return the HBM of a rank of a chip, with its part of the weights."""
    from model.device import limit_lnc
    from model.runners.rank_memory import RankMemory

    lnc = limit_lnc(target, options.lnc)
    return RankMemory.measure(pipeline.components, target, _count_group_ranks(options), lnc)


def _build_document(
    options: argparse.Namespace,
    settings: dict[str, Any],
    requests: Sequence[ImageRequest],
    files: Sequence[OutputFile | None],
    drawing: Drawing,
    difference: Difference | None,
    times: Sequence[TargetTimes],
) -> dict[str, Any]:
    """Return the document of --json."""
    return {
        **settings,
        "images": [{"prompt": request.prompt, "seed": request.seed} for request in requests],
        "files": [str(file.path) for file in files if file is not None],
        "passes": [
            {"component": name, "batch": batch, "passes": count}
            for (name, batch), count in drawing.passes.items()
        ],
        "difference": None
        if difference is None
        else {"latents": difference.latents, "bytes": difference.bytes, "share": difference.share},
        "predictions": [target.build_document() for target in times],
        "trace": None if options.trace is None else str(options.trace),
    }
