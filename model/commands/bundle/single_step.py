"""`nkw bundle` for a model whose steps all have the same size, one of whose sections --layer names.

A section is a layer of such a model.
"""

from __future__ import annotations

import argparse
from typing import Any

from model.config import Config
from model.config.folder import list_model_files
from model.device.bundling import BundlingDevice, Written
from model.errors import ModelError
from model.execution.launched_network import LaunchedNetwork
from model.families import compose
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.runners.single_step import draw_inputs, make_step
from nkw.files import Outputs, json_document
from nkw.terminal import show, working


def bundle_section(options: argparse.Namespace, config: Config, lnc: int) -> None:
    """Write a bundle of the launches of the section --layer with random inputs, and print its report.

    Args:
        options: The parsed options.
        config: The model.
        lnc: Number of physical cores of the rank.

    Raises:
        ModelError: --layer is missing or too large, or --tokens is given.
    """
    network = compose(config)
    if options.layer is None or options.tokens is not None:
        raise ModelError(
            f"a {config.model_type} is bundled by layers, whose size is fixed: give --layer N, and leave --tokens out"
        )
    if options.layer >= len(network.sections):
        raise ModelError(f"--layer {options.layer}: this model has layers 0 to {len(network.sections) - 1}")
    weights = open_checkpoint(options.model, config)
    outputs = Outputs(lambda: [*list_model_files(options.model), *weights.files])
    with json_document(options.json, outputs, "bundle") as contents:
        (rank,) = shard_weights(config, weights, 1, after_layer=weights.release, dtype=options.dtype)
        device = BundlingDevice(options.target, options.layer, {}, lnc)
        device.phase = "step"
        step = make_step(config, rank.dtype, rank.dtypes)
        model = LaunchedNetwork(
            *(network, [rank], device, step, Mesh(1), "states"),
            progress=lambda done, sections: device.layer_done(done + 1, sections),
        )
        device.layer_done(0, len(network.sections))
        with working(lambda: f"{device.launches} launches of layer {options.layer}"):
            model.run(step, draw_inputs(network, step))
        report_bundle(device.write(options.out, None), contents)


def report_bundle(written: Written, contents: dict[str, Any]) -> None:
    """Print the report of a written bundle, and add its JSON keys to `contents`, the document of --json."""
    show(written.make_report())
    contents.update(written.make_document())
