"""`nkw generate`: puts config, weights, tokenizer, backend and outputs together."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from model.cache import bucket_length
from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig
from model.errors import ModelError
from model.families import load_config, model_files
from model.generate import Backend, Generation, encode_prompt, generate, positions_needed
from model.kernel_model import Device, KernelModel
from model.precision import activation_dtype
from model.profile import parts as profile_parts
from model.reference import ReferenceModel
from model.report import Run, TargetPrediction, document, summary
from model.sampling import SamplingOptions
from model.tokenizer import Tokenizer
from model.weights import RankWeights, check_ranks, shard_weights, weights_of_all
from simulate.errors import shown
from simulate.files import OutputFile, Outputs, json_document
from simulate.terminal import EVERY_SECONDS, progress, show, show_lines

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Pass

Progress = Callable[[int, int], None]
COMPARED_TARGETS = ("trn1", "inf2", "trn2")


def generate_command(options: argparse.Namespace) -> int:
    """Generate, check, predict, report. Everything that can be refused is refused before the first token."""
    if _rank() is not None and options.backend != "simulate":
        raise ModelError(f"torchrun starts ranks of the simulate backend; --backend is {options.backend}")
    if _rank():
        return _follow(options)
    for option in ("trace", "profile", "html"):
        if getattr(options, option) and options.backend != "simulate":
            raise ModelError(f"--{option} needs the simulate backend; {options.backend} predicts no timeline")
    for option, ignored in (("--top-k", options.top_k is not None), ("--top-p", options.top_p < 1)):
        if ignored and not options.temperature:
            raise ModelError(
                f"{option} chooses among candidates, and temperature 0 always takes the most likely one: give "
                "--temperature T as well"
            )
    config = load_config(options.model)
    check_ranks(config, options.tp)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompt_ids = encode_prompt(options.prompt, tokenizer, config)
    weights = open_checkpoint(options.model, config)
    outputs = Outputs(lambda: [*model_files(options.model), *weights.files])
    trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
    page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    job = _Job(options, config, weights, prompt_ids)
    with json_document(options.json, outputs, "generate", "NKW-GENERATE-FILE") as contents:
        contents.update(_reported(job, tokenizer, trace, page))
    return 0


def _reported(
    job: _Job, tokenizer: Tokenizer, trace: OutputFile | None, page: OutputFile | None
) -> dict[str, Any]:
    """Generate and predict, write timelines and print the summary; returns the document."""
    options = job.options
    generation = _generate(job, tokenizer)
    run = Run(
        model=str(options.model),
        prompt=options.prompt,
        backend=options.backend,
        target=options.target,
        ranks=options.tp,
        dtype=activation_dtype(options.dtype, job.config, job.weights).name,
        sampling=job.sampling,
        trace=None if trace is None else str(options.trace),
    )
    predictions: list[TargetPrediction] = []
    if options.backend == "simulate":
        predictions, passes = _predict(job, generation)
        _write_timelines(job, passes, trace, page)
    show(summary(run, generation, predictions))
    if trace is not None:
        show_lines(f"trace: {options.trace}")
    if options.replay_report and options.backend == "simulate":
        print("\n" + job.replay_report())
    if page is not None:
        show_lines(f"page: {options.html}")
    if options.profile:
        show(["", *profile_parts(options.target, passes)])
    return document(run, generation, predictions)


def _rank() -> int | None:
    """The rank of this process, where torchrun started one process per rank; None for a single process."""
    if "RANK" not in os.environ:  # the simulator need not be loaded to know that
        return None
    from model.device import rank_of_this_process

    return rank_of_this_process()


def _follow(options: argparse.Namespace) -> int:
    """Take part in a generation as a rank that prints and writes nothing; rank 0 does."""
    config = load_config(options.model)
    check_ranks(config, options.tp)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompt_ids = encode_prompt(options.prompt, tokenizer, config)
    job = _Job(options, config, open_checkpoint(options.model, config), prompt_ids)
    backend = job.backend(lambda done, layers: None)
    generate(backend, tokenizer, config, prompt_ids, options.max_new_tokens, job.sampling)
    return 0


class _Job:
    """One model, cut for its ranks, and one prompt: the input of generating and of predicting."""

    def __init__(
        self, options: argparse.Namespace, config: ModelConfig, weights: Checkpoint, prompt_ids: list[int]
    ) -> None:
        self.options = options
        self.config = config
        self.weights = weights
        self.prompt_ids = prompt_ids
        self.replay_report = lambda: "replay: nothing was launched"
        self.sampling = SamplingOptions(options.temperature, options.top_k, options.top_p, options.seed)
        needed = positions_needed(len(prompt_ids), options.max_new_tokens, config)
        self._cache_length = bucket_length(needed, config.context)

    @cached_property
    def _own_shards(self) -> tuple[RankWeights, ...]:
        """The weights of the ranks in this process."""
        rank = _rank()
        own = range(self.options.tp) if rank is None else range(rank, rank + 1)
        return shard_weights(
            self.config, self.weights, self.options.tp, own, self.weights.let_go, self.options.dtype
        )

    def backend(self, progress: Progress) -> Backend:
        """The backend that --backend names."""
        options = self.options
        if options.backend == "simulate":
            from model.device import SimulatedDevice

            processes = _rank() is not None
            device = SimulatedDevice(
                options.target,
                options.tp,
                processes=processes,
                exact=options.exact,
                verify=options.verify_replay,
            )
            self.replay_report = device.replays.report.text
            return self._model(device, progress)
        if options.backend == "neuron":
            from model.device.neuron import NeuronDevice

            return self._model(NeuronDevice(options.tp), progress)
        return self.reference()

    def reference(self) -> ReferenceModel:
        """The same model in plain numpy."""
        return ReferenceModel(self.config, self.weights, self.options.dtype, ranks=self.options.tp)

    def dry_model(self, device: Device, progress: Progress) -> KernelModel:
        """The model on a device that only plans; ranks of other processes are planned here as well."""
        shards = self._own_shards
        if len(shards) < self.options.tp:
            shards = weights_of_all(self.config, shards[0])
        return self._model(device, progress, shards)

    def _model(
        self, device: Device, progress: Progress, shards: tuple[RankWeights, ...] | None = None
    ) -> KernelModel:
        candidates = self.sampling.candidates_needed or 1
        return KernelModel(
            self.config, shards or self._own_shards, device, self._cache_length, candidates, progress
        )


def _generate(job: _Job, tokenizer: Tokenizer) -> Generation:
    """Stream the prompt's continuation to stdout."""
    options = job.options
    backend = job.backend(prompt_progress())
    compares = options.check and options.backend != "numpy"
    generation = generate(
        backend,
        tokenizer,
        job.config,
        job.prompt_ids,
        options.max_new_tokens,
        job.sampling,
        job.reference() if compares else None,
        emit=lambda text: print(_printed(text), end="", flush=True),
        prompt_done=lambda: print(options.prompt, end="", flush=True),
    )
    print("\n")
    return generation


def _printed(text: str) -> str:
    """Generated text; on a terminal its control characters are escaped."""
    return shown(text, len(text)) if sys.stdout.isatty() else text


def _predict(job: _Job, generation: Generation) -> tuple[list[TargetPrediction], list[tuple[str, Pass]]]:
    """Predicted times of the prompt and of the last decode step on each compared target; the chosen one's passes."""
    from model.device import DryDevice

    options = job.options
    last_position = len(generation.prompt_ids) + max(1, len(generation.generated_ids) - 1) - 1
    predictions, chosen = [], []
    for target in progress(list(dict.fromkeys((*COMPARED_TARGETS, options.target))), "predictions"):
        device = DryDevice(target, options.tp)
        model = job.dry_model(device, device.layer_done)
        model.prefill(job.prompt_ids)
        prompt = device.take_pass()
        model.decode(generation.generated_ids[-1], last_position)
        token = device.take_pass()
        predictions.append(TargetPrediction(prompt.prediction(), token.prediction()))
        if target == options.target:
            count = len(job.prompt_ids)
            tokens = f"{count} token" + ("" if count == 1 else "s")
            chosen = [(f"prompt of {tokens}", prompt), (f"token at position {last_position}", token)]
    return predictions, chosen


def _write_timelines(
    job: _Job, passes: list[tuple[str, Pass]], trace: OutputFile | None, page: OutputFile | None
) -> None:
    from model.device import write_page, write_passes

    if trace is not None:
        write_passes(trace, [(label.split()[0], done) for label, done in passes])
    if page is not None:
        options = job.options
        cores = "1 core" if options.tp == 1 else f"{options.tp} cores"
        write_page(page, f"{options.model.name} on {cores} of {options.target}", passes)


def prompt_progress(every: float = EVERY_SECONDS) -> Progress:
    """What counts the prompt's layers on stderr, later passes not.

    A terminal shows one line that is wiped out after them, any other stderr a line every `every` seconds.
    """
    on_terminal, told, first_pass = sys.stderr.isatty(), time.monotonic(), True

    def show(done: int, layers: int) -> None:
        nonlocal first_pass, told
        text = f"prompt: layer {done} of {layers}"
        if first_pass and on_terminal:
            print(f"\r\x1b[K{text if done < layers else ''}", end="", file=sys.stderr, flush=True)
        elif first_pass and time.monotonic() - told >= every:
            print(text, file=sys.stderr, flush=True)
            told = time.monotonic()
        first_pass = first_pass and done < layers

    return show
