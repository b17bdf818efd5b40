"""`nkw generate`: puts config, weights, tokenizer, backend and outputs together."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from model.cache import bucket_length
from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig
from model.errors import ModelError
from model.families import load_config
from model.folder import model_files
from model.generate import Backend, Generation, generate, positions_needed
from model.kernel_model import KernelModel
from model.launched import Device
from model.layers.uneven import uneven
from model.mesh import Mesh, check_sequence
from model.precision import activation_dtype
from model.profile import parts as profile_parts
from model.prompts import encoded, read_prompts, sampling_options
from model.reference import ReferenceModel
from model.report import Run, TargetPrediction, document, summary
from model.sampling import SamplingOptions
from model.tokenizer import Tokenizer
from model.weights import RankWeights, check_ranks, shard_weights, weights_of_all
from simulate.errors import shown
from simulate.files import STDOUT, OutputFile, Outputs, json_document
from simulate.terminal import EVERY_SECONDS, progress, show, show_lines

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Pass

Progress = Callable[[int, int], None]
MOST_RANKS = 32
"""Of one run: they compute in turn, in one process or in one each."""
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
    config = load_config(options.model)
    mesh = _mesh(options, config)
    sampling = sampling_options(options)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompts = read_prompts(options, shared=_rank() is not None)
    _check_groups(mesh, prompts)
    ids = encoded(prompts, options, tokenizer, config)
    weights = open_checkpoint(options.model, config)
    given = [options.prompt_file] if options.prompt_file not in (None, STDOUT) else []
    outputs = Outputs(lambda: [*model_files(options.model), *weights.files, *given])
    trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
    page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    job = _Job(options, config, weights, prompts, ids, sampling, mesh)
    with json_document(options.json, outputs, "generate", "NKW-GENERATE-FILE") as contents:
        contents.update(_reported(job, tokenizer, trace, page))
    return 0


def _reported(
    job: _Job, tokenizer: Tokenizer, trace: OutputFile | None, page: OutputFile | None
) -> dict[str, Any]:
    """Generate and predict, write timelines and print the summary; returns the document."""
    options = job.options
    generations = _generate(job, tokenizer)
    run = Run(
        model=str(options.model),
        prompts=tuple(job.prompts),
        backend=options.backend,
        target=options.target,
        mesh=job.mesh,
        dtype=activation_dtype(options.dtype, job.config, job.weights).name,
        sampling=job.sampling,
        trace=None if trace is None else str(options.trace),
        uneven=uneven(job.config, job.mesh.tensor),
    )
    predictions: list[TargetPrediction] = []
    if options.backend == "simulate":
        predictions, passes = _predict(job, generations)
        _write_timelines(job, passes, trace, page)
    show(summary(run, generations, predictions))
    if trace is not None:
        show_lines(f"trace: {options.trace}")
    if options.replay_report and options.backend == "simulate":
        print("\n" + job.replay_report())
    if page is not None:
        show_lines(f"page: {options.html}")
    if options.profile:
        show(["", *profile_parts(options.target, passes)])
    return document(run, generations, predictions)


def _rank() -> int | None:
    """The rank of this process, where torchrun started one process per rank; None for a single process."""
    if "RANK" not in os.environ:  # the simulator need not be loaded to know that
        return None
    from model.device import rank_of_this_process

    return rank_of_this_process()


def _follow(options: argparse.Namespace) -> int:
    """Take part in a generation as a rank that prints and writes nothing; rank 0 does."""
    config = load_config(options.model)
    mesh = _mesh(options, config)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompts = read_prompts(options, shared=_rank() is not None)
    _check_groups(mesh, prompts)
    ids = encoded(prompts, options, tokenizer, config)
    weights = open_checkpoint(options.model, config)
    job = _Job(options, config, weights, prompts, ids, sampling_options(options), mesh)
    backend = job.backend(lambda done, layers: None)
    generate(backend, tokenizer, config, ids, options.max_new_tokens, job.sampling, stops=options.stop)
    return 0


def _mesh(options: argparse.Namespace, config: ModelConfig) -> Mesh:
    """The mesh of `--tp`, `--dp` and `--sp`; ModelError for too many ranks, or ranks that cannot share the model."""
    check_sequence(options.sp, options.tp)
    mesh = Mesh(options.tp, options.dp, options.sp)
    if mesh.ranks > MOST_RANKS:
        groups = MOST_RANKS // mesh.tensor
        works = f"--tp {mesh.tensor} with --dp 1 to {groups}" if groups else f"--tp 1 to {MOST_RANKS}"
        raise ModelError(
            f"--tp {mesh.tensor} times --dp {mesh.data} are {mesh.ranks} ranks; one run takes {MOST_RANKS}: {works}"
        )
    check_ranks(config, options.tp)
    return mesh


def _check_groups(mesh: Mesh, prompts: Sequence[str]) -> None:
    """Raise ModelError where there are fewer prompts than groups."""
    if mesh.data > len(prompts):
        count = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        works = "--dp 1" if len(prompts) == 1 else f"--dp 1 to {len(prompts)}"
        raise ModelError(f"--dp {mesh.data} makes {mesh.data} groups for {count}; this run takes {works}")


class _Job:
    """One model, cut for its ranks, and its prompts: the input of generating and of predicting."""

    def __init__(
        self,
        options: argparse.Namespace,
        config: ModelConfig,
        weights: Checkpoint,
        prompts: list[str],
        prompt_ids: list[list[int]],
        sampling: SamplingOptions,
        mesh: Mesh,
    ) -> None:
        self.mesh = mesh
        self.options = options
        self.config = config
        self.weights = weights
        self.prompts = prompts
        self.prompt_ids = prompt_ids
        self.replay_report = lambda: "replay: nothing was launched"
        self.sampling = sampling
        needed = positions_needed(max(map(len, prompt_ids)), options.max_new_tokens, config)
        self._cache_length = bucket_length(needed, config.context, mesh.row_multiple)

    @cached_property
    def _own_shards(self) -> tuple[RankWeights, ...]:
        """The weights of the ranks in this process."""
        rank = _rank()
        index = None if rank is None else self.mesh.shard(rank).rank
        own = range(self.options.tp) if index is None else range(index, index + 1)
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
                self.mesh.ranks,
                processes=processes,
                exact=options.exact,
                verify=options.verify_replay,
            )
            self.replay_report = device.replays.report.text
            return self._model(device, progress)
        if options.backend == "neuron":
            from model.device.neuron import NeuronDevice

            return self._model(NeuronDevice(self.mesh.ranks), progress)
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
            self.config,
            shards or self._own_shards,
            device,
            self._cache_length,
            candidates,
            progress,
            len(self.prompt_ids),
            self.mesh,
        )


def _generate(job: _Job, tokenizer: Tokenizer) -> list[Generation]:
    """Stream the continuation of one prompt to stdout; those of several are printed when all of them have ended."""
    options = job.options
    backend = job.backend(prompt_progress())
    compares = options.check and options.backend != "numpy"
    alone = len(job.prompts) == 1
    generations = generate(
        backend,
        tokenizer,
        job.config,
        job.prompt_ids,
        options.max_new_tokens,
        job.sampling,
        job.reference() if compares else None,
        emit=lambda number, text: print(_printed(text) if alone else "", end="", flush=True),
        prompts_done=lambda: print(_before(job.prompts[0], options) if alone else "", end="", flush=True),
        stops=options.stop,
    )
    if alone:
        print("\n")
    else:
        for number, (prompt, each) in enumerate(zip(job.prompts, generations), 1):
            print(f"prompt {number} of {len(generations)}")
            print(f"{_printed(_before(prompt, options))}{_printed(each.text)}\n")
    return generations


def _before(prompt: str, options: argparse.Namespace) -> str:
    """The text before a continuation: the prompt; in a chat the answer stands alone."""
    return "" if options.chat else prompt


def _printed(text: str) -> str:
    """Generated text; on a terminal its control characters are escaped."""
    return shown(text, len(text)) if sys.stdout.isatty() else text


def _predict(
    job: _Job, generations: list[Generation]
) -> tuple[list[TargetPrediction], list[tuple[str, Pass]]]:
    """Predicted times of the prompts and of the last decode step on each compared target; the chosen one's passes."""
    from model.device import DryDevice

    options = job.options
    last = [len(each.prompt_ids) + max(1, len(each.generated_ids) - 1) - 1 for each in generations]
    tokens_fed = [each.generated_ids[-1] for each in generations]
    predictions, chosen = [], []
    for target in progress(list(dict.fromkeys((*COMPARED_TARGETS, options.target))), "predictions"):
        device = DryDevice(target, job.mesh.ranks)
        model = job.dry_model(device, device.layer_done)
        model.prefill(job.prompt_ids)
        prompt = device.take_pass()
        model.decode(tokens_fed, last)
        token = device.take_pass()
        predictions.append(TargetPrediction(prompt.prediction(), token.prediction()))
        if target == options.target:
            chosen = [(_prompt_label(job.prompt_ids), prompt), (_step_label(last), token)]
    return predictions, chosen


def _prompt_label(prompt_ids: list[list[int]]) -> str:
    longest = max(map(len, prompt_ids))
    tokens = f"{longest} token" + ("" if longest == 1 else "s")
    return f"prompt of {tokens}" if len(prompt_ids) == 1 else f"{len(prompt_ids)} prompts of up to {tokens}"


def _step_label(positions: list[int]) -> str:
    if len(positions) == 1:
        return f"token at position {positions[0]}"
    return f"{len(positions)} tokens at positions up to {max(positions)}"


def _write_timelines(
    job: _Job, passes: list[tuple[str, Pass]], trace: OutputFile | None, page: OutputFile | None
) -> None:
    from model.device import write_page, write_passes

    if trace is not None:
        write_passes(trace, [(name, done) for name, (_, done) in zip(("prompt", "token"), passes)])
    if page is not None:
        options = job.options
        cores = "1 core" if job.mesh.ranks == 1 else f"{job.mesh.ranks} cores"
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
