"""Entry of `nkw quantize`: quantises a folder, or plans it, and prints and writes the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from model.commands.quantize.report import Report, build_blocks, build_document, render_page
from model.config import ModelConfig, read_json
from model.config.folder import list_model_files
from model.config.published import describe_config
from model.errors import ModelError, check_memory, read_text_file
from model.families import compose, load_config, read_config
from model.layers.layer import Layer
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.shipped import find_model_name
from model.loading.tokenizer import Tokenizer
from model.network import Network
from model.quantize.calibration import LONGEST_TEXT, encode_texts, require_texts, split_texts
from model.quantize.containers import OUTLIER_THRESHOLD, build_quantization_config, choose_scale_dtype, store
from model.quantize.evaluation import Evaluation
from model.quantize.folder import QuantisedFolder, check_output, read_stored_tensors, writing
from model.quantize.linears import HEAD, Selection, select_linears
from model.quantize.output import (
    Output,
    check_shapes,
    choose_plain_dtype,
    describe_output,
    estimate_memory,
    plan_sizes,
)
from model.quantize.process import Findings, Settings, quantise
from model.quantize.rounding import Rounded
from model.quantize.schemes import SCHEMES, Method, Scheme
from model.quantize.step_times import predict_steps
from nkw.files import Outputs, json_document
from nkw.terminal import progress, show, show_lines

Sequenced = list[list[int]]
"""Token ids of texts."""
_CODE = "NKW-QUANTIZE-FILE"
_HELD_OUT_PARTS = 10


def quantize_command(options: argparse.Namespace) -> int:
    """Quantise a folder or plan it, print the report, write the files of the options, and return the exit status 0.

    Raises:
        ModelError: Options exclude each other, or the model, a text or the folder cannot be used.
        InvalidArgument: A file of the report cannot be written.
    """
    scheme = _choose_scheme(options)
    outputs = Outputs(lambda: _list_inputs(options))
    page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    with json_document(options.json, outputs, "quantize", _CODE, "report") as contents:
        report = _plan(options, scheme) if options.plan else _quantise_folder(options, scheme)
        contents.update(build_document(report))
        show(build_blocks(report))
        if page is not None:
            with page.writing() as file:
                file.write(render_page(report))
            show_lines(f"page: {options.html}")
    return 0


def _choose_scheme(options: argparse.Namespace) -> Scheme:
    """Return the scheme of the options.

    Raises:
        ModelError: An option does not belong to the scheme, or one is missing.
    """
    scheme = SCHEMES[options.scheme].with_group(options.group_size)
    if options.act_order and scheme.method is not Method.gptq:
        raise ModelError(
            f"--act-order belongs to --scheme gptq, and the scheme is {scheme.name}: leave it out"
        )
    if options.plan:
        if options.out is not None:
            raise ModelError("--plan writes no folder: leave --out out, or leave --plan out")
        return scheme
    if options.out is None:
        raise ModelError("--out is needed, the folder to write: give --out DIR, or --plan to write nothing")
    if scheme.needs_calibration and options.calibration is None:
        raise ModelError(
            f"--scheme {scheme.name} reads the inputs of layers: give --calibration FILE, with texts like those that "
            "the model will read"
        )
    return scheme


def _plan(options: argparse.Namespace, scheme: Scheme) -> Report:
    """Return the report of a config without weights: sizes and predicted times."""
    config = read_config(options.model)
    _check_plain(config, options.model)
    network = compose(config)
    selection = _select(network, options, scheme)
    sizes = plan_sizes(network, selection, scheme, choose_plain_dtype(config))
    quantization_config = build_quantization_config(scheme, [HEAD, *selection.plain])
    steps = predict_steps(options.model, quantization_config, options.tp)
    name = describe_config(options.model)
    return Report(name, scheme, len(selection.linears), sizes.before, sizes.after, steps)


def _select(network: Network, options: argparse.Namespace, scheme: Scheme) -> Selection:
    """Return the weights that are quantised, whose columns are whole groups of the scheme."""
    selection = select_linears(network, options.ignore)
    check_shapes(selection.linears, scheme)
    return selection


def _check_plain(config: ModelConfig, path: Path) -> None:
    """Raise ModelError if the weights of a model are quantised already."""
    if config.quant_method is not None:
        raise ModelError(
            f"{path} is quantised already, by {config.quant_method}: give the folder of the plain model",
            "NKW-MODEL-FOLDER",
        )


def _quantise_folder(options: argparse.Namespace, scheme: Scheme) -> Report:
    """Quantise the folder of the options, write the result, and return the report."""
    folder: Path = options.model
    config = load_config(folder)
    _check_plain(config, folder)
    check_output(options.out, folder)
    network = compose(config)
    selection = _select(network, options, scheme)
    calibration, held_out = read_texts(options, config)
    stated = estimate_memory(
        config, network, selection, scheme, sum(map(len, calibration)), sum(map(len, held_out))
    )
    check_memory(stated, f"quantising {folder}")
    show_lines(f"memory: at most {stated / 1e9:.2f} GB beside mapped files", sys.stderr)
    checkpoint = open_checkpoint(folder, config)
    files = read_stored_tensors(checkpoint.files)
    output = describe_output(files, network, checkpoint, selection, scheme)
    quantization_config = build_quantization_config(scheme, output.ignored)
    steps = predict_steps(folder, quantization_config, options.tp)
    with writing(options.out, folder, output.files) as target:
        settings = Settings(scheme, options.damping, options.act_order)
        findings, evaluation = _write_weights(
            network, checkpoint, selection, settings, output, target, (calibration, held_out)
        )
        for name in target.missing:
            target.write(name, next(tensors[name] for tensors in files.values() if name in tensors))
        if len(output.files) > 1:
            target.write_index()
        if findings.outliers:
            target.write_json(
                "outlier_columns.json", {"threshold": OUTLIER_THRESHOLD, "columns": findings.outliers}
            )
        target.write_json(
            "config.json", {**read_json(folder / "config.json"), "quantization_config": quantization_config}
        )
    return Report(
        find_model_name(folder),
        scheme,
        len(selection.linears),
        output.before,
        output.after,
        steps,
        findings,
        evaluation,
        stated,
        _measure_most_resident(),
    )


def _write_weights(
    network: Network,
    checkpoint: Checkpoint,
    selection: Selection,
    settings: Settings,
    output: Output,
    target: QuantisedFolder,
    texts: tuple[Sequenced, Sequenced],
) -> tuple[Findings, Evaluation | None]:
    """Quantise all layers with a progress bar, and write every weight when it is ready."""

    def write(name: str, weight: Rounded | np.ndarray) -> None:
        stored = output.stored[name]
        if not isinstance(weight, Rounded):
            target.write(stored, weight)
            return
        scale_dtype = choose_scale_dtype(settings.scheme, checkpoint[name].dtype)
        for tensor, array in store(stored, weight, settings.scheme, scale_dtype).items():
            target.write(tensor, array)

    def iterate(layers: Sequence[Layer]) -> Iterator[Layer]:
        return progress(layers, "quantised layers")

    calibration, held_out = texts
    return quantise(network, checkpoint, selection, settings, write, calibration, held_out, iterate)


def read_texts(options: argparse.Namespace, config: ModelConfig) -> tuple[Sequenced, Sequenced]:
    """Return the token ids of calibration and held-out texts; each may be empty.

    Without --held-out the last tenth of the calibration texts, at least one of several, is held out.

    Raises:
        ModelError: A file cannot be read or has no text, or the tokenizer cannot be used.
    """
    files = {}
    for name, path in (("calibration", options.calibration), ("held_out", options.held_out)):
        files[name] = [] if path is None else split_texts(read_text_file(path, _CODE))[: options.texts]
        if path is not None:
            require_texts(files[name], path)
    calibration, held_out = files["calibration"], files["held_out"]
    if options.held_out is None and len(calibration) > 1:
        count = -(-len(calibration) // _HELD_OUT_PARTS)
        calibration, held_out = calibration[:-count], calibration[-count:]
    if not calibration and not held_out:
        return [], []
    tokenizer = Tokenizer(options.model, config.vocab_size)
    context = config.max_position_embeddings or LONGEST_TEXT
    encoded = [
        encode_texts(tokenizer, texts, context, config.eos_token_ids) for texts in (calibration, held_out)
    ]
    for texts, path in zip(encoded, (options.calibration, options.held_out)):
        if path is not None:
            require_texts(["" for _ in texts], path)
    return encoded[0], encoded[1]


def _measure_most_resident() -> int:
    """Return the largest resident memory of this process so far in bytes, mapped files included."""
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _list_inputs(options: argparse.Namespace) -> list[Path]:
    """Return the files that the command reads, which no report may replace."""
    texts = [path for path in (options.calibration, options.held_out) if path is not None]
    return [*list_model_files(options.model), *texts]
