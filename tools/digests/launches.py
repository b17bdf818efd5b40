"""Digests of the launch lists of models: hashes of kernels, arguments by parameter name, results and least work."""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
from model.errors import ModelError
from model.execution.launch_list import list_copies, list_launches
from model.families import SPEECH, TEXT, compose, load_config
from model.layers.launch import DrawVariant, Launch, Phase, StepShape, WeightDtypes, compute_table_length
from model.layers.layer import Layer
from model.layers.paged import STATES
from model.loading.shipped import SHIPPED
from model.network import Network
from tests.model.tiny_families import TINY, write_tiny
from tests.model.whisper_folders import write_whisper

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_PAGES = {"pages": 9, "block_size": 16, "slots": 5}


def launch_digests() -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of each launch list: all models, ranks and kinds of steps."""
    for model, network in _networks():
        windows = sorted({window for layer in network.layers if (window := _window_of(layer))})
        for name, step in _steps(tuple((window, 7) for window in windows)):
            yield f"launches {model}: {name}", _digest(network, step)


def _window_of(layer: Layer) -> int | None:
    """Return the window of an attention layer; None of other layers."""
    return getattr(getattr(layer, "heads", None), "window", None)


def _networks() -> Iterator[tuple[str, Network]]:
    """Yield (name, network) of each shipped model, and of each tiny test model in a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: SHIPPED[name] for name in ("stories", "stories-moe")}
        for name in TINY:
            folders[name] = write_tiny(Path(scratch) / name.replace(" ", "-"), name)
        folders["whisper"] = write_whisper(Path(scratch) / "whisper")
        for name, folder in folders.items():
            yield name, compose(load_config(folder, TEXT, SPEECH))


def _steps(window_pages: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, StepShape]]:
    """Yield (name, shape) of each kind of step, with several numbers of ranks and dtypes.

    window_pages: pairs of an attention window and its number of pages.
    """
    base = StepShape(Phase.decode, 2, 2, 128, 64, 1, FLOAT32, WeightDtypes(FLOAT32), padded=True)
    paged = replace(base, cache_length=compute_table_length(64, 16), window_pages=window_pages, **_PAGES)
    prompt = {"phase": Phase.prefill, "tokens": 24, "sequences": 2}
    decoding = replace(paged, tokens=3, sequences=3, cache_length=128)
    steps = {
        "decode": base,
        "prefill": replace(base, **prompt),
        "prefill of one, unpadded": replace(base, phase=Phase.prefill, tokens=9, sequences=1, padded=False),
        "cut rows": replace(base, phase=Phase.prefill, tokens=24, sequences=1, cuts_sequence=True),
        "paged decode": paged,
        "paged drafts": replace(paged, tokens=6),
        "paged draws": replace(paged, draws=DrawVariant(8), candidates=8),
        "paged draws of all": replace(paged, draws=DrawVariant(8, full_vocabulary=True), candidates=8),
        "paged prefill": replace(paged, **prompt),
        "paged prefill behind a prefix": replace(paged, **prompt, prefix=32),
        "paged scores": replace(paged, **prompt, scores=True),
        "mixed": replace(paged, **{**prompt, "tokens": 27}, prefix=16, decoding=decoding),
    }
    for name, step in steps.items():
        for ranks, expert_ranks in ((1, 1), (2, 1), (4, 1), (2, 2)):
            for dtypes in ((FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16)):
                for rank in {0, ranks - 1}:
                    changes = {
                        "ranks": ranks,
                        "expert_ranks": expert_ranks,
                        "rank": rank,
                        "activations": dtypes[0],
                        "weights": WeightDtypes(dtypes[1]),
                    }
                    shape = replace(step, **changes)
                    if step.decoding is not None:
                        shape = replace(shape, decoding=replace(step.decoding, **changes))
                    yield f"{name}, rank {rank} of {ranks}, ep {expert_ranks}, {dtypes[0].name}", shape


def _digest(network: Network, step: StepShape) -> str:
    """Return the number of launches of a step and a hash of them, or "refused: ..." with the error."""
    try:
        launches = [launch for section in network.sections for launch in list_launches(section, step)]
        if step.block_size:
            groups = [None, STATES, *(window for window, _ in step.window_pages)]
            launches += [launch for group in groups for launch in list_copies(network.layers, step, 3, group)]
        if step.phase is Phase.prefill:
            layers = [layer for earlier in network.before.values() for layer in earlier.layers]
            launches += [launch for layer in layers for launch in layer.launches(step)]
        text = "\n".join(map(describe, launches))
    except (AssertionError, ModelError, ValueError, ZeroDivisionError) as error:
        return f"refused: {type(error).__name__} {str(error).splitlines()[:1]}"
    return f"{len(launches)} {hashlib.sha256(text.encode()).hexdigest()[:24]}"


def describe(launch: Launch) -> str:
    """Return a launch as one line, with all arguments by the names of the kernel's parameters."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in sorted(by_name(launch).items()))
    fused = "".join(f"; {describe(single)}" for single in launch.fused)
    scalars = (launch.rows, launch.label, launch.growth.value, launch.window, launch.repeat)
    return f"{launch.kernel}({arguments}) -> {launch.results} {launch.work} {scalars}{fused}"


def by_name(launch: Launch) -> Mapping[str, Any]:
    """Return the arguments of a launch by parameter name of its kernel, defaults included."""
    kernel = getattr(nki_kernels, launch.kernel)
    signature = inspect.signature(getattr(kernel, "func", kernel))
    bound = signature.bind(**launch.arguments)
    bound.apply_defaults()
    return bound.arguments
