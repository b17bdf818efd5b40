"""`nkw compile`: lists the graphs of an engine; the vendor's tools compile the graphs that the cache lacks.

On torch_xla `neuron_parallel_compile` runs a process that launches every graph once. The process records graphs and
executes none of them; the tool then compiles all at a time and keeps them in the folder NEURON_COMPILE_CACHE_URL:
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.28.0/frameworks/torch/torch-neuronx/api-reference-guide/training/pytorch-neuron-parallel-compile.html
Whether it needs a chip is not said there. TorchNeuron compiles on instances of Trn2 and Trn3 alone; there the process
launches the kernels, each of which is compiled at its first call:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/pytorch-native-overview.html
NEURON_PLATFORM_TARGET_OVERRIDE names the chip to compile for (nki/get-started/quickstart-implement-run-kernel.html).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from model.commands.compile.graphs import (
    CopyGraph,
    Environment,
    Graph,
    StepGraph,
    graph_key,
    graphs_of,
    summary,
)
from model.commands.compile.sources import source_digest
from model.device.neuron import Framework, Software, cache_variables, installed_software
from model.errors import ModelError
from model.layers.paged import STATES
from model.llm.engine_args import EngineParts, args_of, engine_parts
from model.llm.loaded import LoadedModel
from model.runners.paged import largest_step
from nkw.files import complete, read_text
from nkw.terminal import show_lines

MANIFEST = "graphs.json"
_SCHEMA = 1
_TOOL = "neuron_parallel_compile"
_OPTIONS = (
    *(
        "target",
        "tp",
        "ep",
        "dtype",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "mamba_block_size",
    ),
    *("max_model_len", "num_pages", "num_state_slots", "speculative_config", "buckets"),
)


def compile_command(options: argparse.Namespace) -> int:
    """List the graphs, or compile the missing ones. ModelError where the vendor's software is not installed."""
    parts = engine_parts(args_of(options, backend="neuron"))
    if options.launch:
        launch_all(parts)
        return 0
    graphs = engine_graphs(parts)
    if not options.list:
        show_lines("\n".join(summary(graphs)))
    try:
        software = installed_software()
    except ModelError as missing:
        if options.list:
            _show(graphs, _keys(graphs, _environment(options, {})))
            return 0
        raise ModelError(f"none of {len(graphs)} graphs is compiled: {missing.message}") from missing
    keys = _keys(graphs, _environment(options, software.versions))
    if options.list:
        _show(graphs, keys)
        return 0
    if options.out is None:
        raise ModelError("--out is needed: the folder of the compiled graphs")
    _compile(options, software, dict(zip(keys, map(str, graphs))))
    return 0


def engine_graphs(parts: EngineParts) -> list[Graph]:
    """Every graph of an engine; of the weights nothing is read but their dtypes."""
    config, args = parts.config, parts.args
    model = LoadedModel.open(parts.folder, args.dtype, config)
    largest = largest_step(
        config,
        parts.mesh,
        model.activations,
        model.weight_dtypes,
        parts.pools,
        parts.slots,
        parts.buckets,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    groups = [*(pool.window for pool in parts.pools), *([STATES] if parts.slots else [])]
    return graphs_of(config, parts.buckets.for_model(config, largest), groups)


def launch_all(parts: EngineParts) -> None:
    """Launch every graph once, with padding alone."""
    graphs, model = engine_graphs(parts), parts.model()
    for graph in graphs:
        if isinstance(graph, CopyGraph):
            model.launch_copies(graph.count, graph.kind)
        elif isinstance(graph, StepGraph):  # prompts launch an encoder as well
            model.launch_padding(graph.step)


def _environment(options: argparse.Namespace, versions: Mapping[str, str]) -> Environment:
    text = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1")
    if text not in ("1", "2"):
        raise ModelError(f"NEURON_LOGICAL_NC_CONFIG is {text!r:.40}; a rank has 1 or 2 physical cores")
    return Environment(options.target, options.tp * options.ep, int(text), versions)


def _keys(graphs: Sequence[Graph], environment: Environment) -> list[str]:
    return list(map(partial(graph_key, environment=environment, source_digest=source_digest), graphs))


def _show(graphs: Sequence[Graph], keys: Sequence[str]) -> None:
    show_lines("\n".join(f"{key}  {graph}" for key, graph in zip(keys, graphs)))


def _compile(options: argparse.Namespace, software: Software, wanted: Mapping[str, str]) -> None:
    """Compile the graphs that the cache lacks, and note them."""
    known = read_manifest(options.out)
    lacking = [key for key in wanted if key not in known]
    if lacking:
        # inf2 has the cores of trn1; the variable knows trn1, trn2 and trn3.
        platform = "trn1" if options.target == "inf2" else options.target
        cache = cache_variables(software.framework, str(options.out))
        variables = {**cache, "NEURON_PLATFORM_TARGET_OVERRIDE": platform}
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"{options.out}: {error.strerror}") from None
        done = subprocess.run(_command(options, software), env={**os.environ, **variables}, check=False)
        if done.returncode:
            raise ModelError(
                f"the compilation ended with status {done.returncode}; {options.out} lists nothing new"
            )
        document = {"schema": _SCHEMA, "versions": dict(software.versions), "graphs": {**known, **wanted}}
        with complete(options.out / MANIFEST, "list of graphs", "NKW-COMPILE-FILE") as file:
            json.dump(document, file, indent=1)
    show_lines(
        f"{len(lacking)} graphs compiled, {len(wanted) - len(lacking)} known; {options.out / MANIFEST}"
    )


def _command(options: argparse.Namespace, software: Software) -> list[str]:
    """The process that launches every graph once, below the vendor's tool where that gathers graphs."""
    python = [sys.executable, "-m"]
    if options.tp * options.ep > 1:
        python += ["torch.distributed.run", "--nproc-per-node", str(options.tp * options.ep), "-m"]
    command = [*python, "model", "compile", str(options.model), "--launch"]
    for name in _OPTIONS:
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if software.framework is Framework.native:
        if not any(Path("/dev").glob("neuron*")):
            raise ModelError(
                "TorchNeuron compiles on an instance of Trn2 or Trn3 alone, and there is no Neuron device here"
            )
        return command
    tool = shutil.which(_TOOL)
    if tool is None:
        raise ModelError(f"{_TOOL} is not on the path; it comes with torch-neuronx")
    return [tool, *command]


def read_manifest(folder: Path) -> dict[str, str]:
    """The graphs that a folder has, by their keys; ModelError for a list that cannot be read."""
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        document: Any = json.loads(read_text(file))
        graphs = document["graphs"]
        if document["schema"] != _SCHEMA or not all(isinstance(each, str) for each in graphs.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(
            f"{file} is no list of compiled graphs; remove it, and all are compiled again"
        ) from None
    return dict(graphs)
