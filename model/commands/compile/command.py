"""`nkw compile`: lists the graphs of an engine, and compiles missing graphs with the vendor's tools.

On torch_xla `neuron_parallel_compile` runs a process that launches every graph once. The process records the graphs
and executes none; the tool then compiles them in parallel and keeps them in the folder NEURON_COMPILE_CACHE_URL:
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.28.0/frameworks/torch/torch-neuronx/api-reference-guide/training/pytorch-neuron-parallel-compile.html
The page does not say whether it needs a chip. TorchNeuron compiles only on instances of Trn2 and Trn3; there the
process launches the kernels, and each kernel is compiled at its first call:
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.commands.compile.graphs import (
    CopyGraph,
    Environment,
    Graph,
    PackGraph,
    StepGraph,
    hash_graph,
    list_graphs,
    summarise_graphs,
)
from model.commands.compile.sources import hash_sources
from model.device import choose_lnc
from model.device.neuron import Framework, Software, cache_variables, installed_software
from model.errors import ModelError
from model.layers.paged import STATES
from model.llm.engine_args import EngineSetup, read_engine_args, set_up_engine
from model.llm.loaded import LoadedModel
from model.runners.paged import largest_step
from nkw.files import complete, read_text
from nkw.targets import LNC_VARIABLE
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
        "kv_cache_dtype",
        "quantization",
        "row_scales",
    ),
    *("max_model_len", "num_pages", "num_state_slots", "speculative_config", "buckets"),
)


def compile_command(options: argparse.Namespace) -> int:
    """List the graphs of an engine, or compile those that are missing in --out; return the exit status 0.

    Raises:
        ModelError: Graphs are to be compiled, and the vendor's software or --out is missing, or the compilation fails.
    """
    lnc = choose_lnc(options.target, options.lnc)
    setup = set_up_engine(read_engine_args(options, backend="neuron"))
    if options.launch:
        launch_all(setup)
        return 0
    graphs, software = list_engine_graphs(setup), None
    if not options.list:
        show_lines("\n".join(summarise_graphs(graphs)))
    try:
        software = installed_software()
    except ModelError as missing:
        if not options.list:
            raise ModelError(f"none of {len(graphs)} graphs is compiled: {missing.message}") from missing
    versions = {} if software is None else software.versions
    environment = Environment(options.target, options.tp * options.ep, lnc, versions)
    keys = [hash_graph(graph, environment, hash_sources) for graph in graphs]
    if options.list or software is None:
        show_lines("\n".join(f"{key}  {graph}" for key, graph in zip(keys, graphs)))
        return 0
    if options.out is None:
        raise ModelError(
            "--out is needed, the folder of the compiled graphs: give --out CACHE, or --list to compile nothing"
        )
    _compile(options, software, lnc, dict(zip(keys, map(str, graphs))))
    return 0


def list_engine_graphs(setup: EngineSetup) -> list[Graph]:
    """Return all graphs that an engine may launch. Of the weights, only the dtypes are read."""
    from model.device import find_sorted_expert_width

    config, args = setup.config, setup.args
    model = LoadedModel.open(setup.folder, args.dtype, config, args.target)
    largest = largest_step(
        config,
        setup.mesh,
        model.activations,
        model.weight_dtypes,
        setup.pools,
        setup.slots,
        setup.buckets,
        kv_cache_dtype=model.choose_cache_format(args.kv_cache_dtype),
        sorted_expert_width=find_sorted_expert_width(args.target),
    )
    groups = [*(pool.window for pool in setup.pools), *([STATES] if setup.slots else [])]
    return list_graphs(config, setup.buckets.for_model(config, largest), groups)


def launch_all(setup: EngineSetup) -> None:
    """Load the model and launch every graph of an engine once, with padding in place of requests.

    This runs in the process whose launches the vendor's tool compiles.
    """
    graphs, model = list_engine_graphs(setup), setup.load_model()
    for graph in graphs:
        if isinstance(graph, CopyGraph):
            model.launch_copies(graph.count, graph.cache_group)
        elif isinstance(graph, PackGraph):
            model.launch_packs(graph.count)
        elif isinstance(graph, StepGraph):  # prompts launch the encoder too
            model.launch_padding(graph.shape)


def _compile(options: argparse.Namespace, software: Software, lnc: int, graphs: Mapping[str, str]) -> None:
    """Compile the graphs that are missing in the folder --out, and add them to its list; print how many.

    Args:
        options: The parsed options.
        software: The vendor's packages.
        lnc: Number of physical cores of a rank.
        graphs: Labels of all graphs by key.

    Raises:
        ModelError: The folder cannot be written, or the compilation fails.
    """
    known = read_manifest(options.out)
    missing = graphs.keys() - known.keys()
    if missing:
        # inf2 has the cores of trn1; the variable knows trn1, trn2 and trn3.
        platform = "trn1" if options.target == "inf2" else options.target
        cache = cache_variables(software.framework, str(options.out))
        settings = {"NEURON_PLATFORM_TARGET_OVERRIDE": platform, LNC_VARIABLE: str(lnc)}
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(
                f"the folder of --out, {options.out}, cannot be made: {error.strerror}; give another one"
            ) from None
        command = _build_command(options, software)
        status = subprocess.run(command, env={**os.environ, **cache, **settings}, check=False).returncode
        if status:
            raise ModelError(
                f"the compilation ended with status {status}, and {options.out} lists nothing new: see the messages of "
                "the compiler above"
            )
        document = {"schema": _SCHEMA, "versions": dict(software.versions), "graphs": {**known, **graphs}}
        with complete(options.out / MANIFEST, "list of graphs", "NKW-COMPILE-FILE") as file:
            json.dump(document, file, indent=1)
    show_lines(
        f"{len(missing)} graphs compiled, {len(graphs) - len(missing)} known; {options.out / MANIFEST}"
    )


def _build_command(options: argparse.Namespace, software: Software) -> list[str]:
    """Return the words of the command that launches every graph; on torch_xla the vendor's tool starts it.

    Raises:
        ModelError: The native framework has no Neuron device here, or the tool is not installed.
    """
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
        raise ModelError(f"{_TOOL} is not on the path; install torch-neuronx, which has it")
    return [tool, *command]


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the labels of the compiled graphs in a folder, by key; empty if the folder has no list.

    Raises:
        ModelError: The list cannot be read or has another form.
    """
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        document: Any = json.loads(read_text(file))
        graphs = document["graphs"]
        if document["schema"] != _SCHEMA or not all(isinstance(name, str) for name in graphs.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(
            f"{file} is no list of compiled graphs; remove it, and all are compiled again"
        ) from None
    return dict(graphs)
