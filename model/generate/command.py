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
from model.expert_load import ExpertLoad
from model.families import compose, load_config
from model.folder import model_files
from model.generate import explain
from model.generate.loop import Backend, Generation, generate, positions_needed
from model.generate.micro_batches import MicroBatches, micro_batch_sizes, of_micro_batches
from model.generate.profile import parts as profile_parts
from model.generate.prompts import encoded, read_prompts, sampling_options
from model.generate.report import Run, TargetPrediction, document, summary
from model.kernel_model import KernelModel
from model.launched import Device
from model.layers.uneven import uneven
from model.mesh import Mesh, check_experts, check_sequence
from model.precision import activation_dtype
from model.reference import ReferenceModel
from model.sampling import SamplingOptions
from model.stages import SEND, layers_of_stage
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
    if _rank() is not None and options.backend == "numpy":
        raise ModelError("torchrun starts ranks of the backends simulate and neuron; --backend is numpy")
    if _rank():
        return _follow(options)
    for option in ("trace", "profile", "html"):
        if getattr(options, option) and options.backend != "simulate":
            raise ModelError(f"--{option} needs the simulate backend; {options.backend} predicts no timeline")
    if options.explain is not None and options.explain > options.max_new_tokens:
        raise ModelError(f"--explain {options.explain}: --max-new-tokens is {options.max_new_tokens}")
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
        micro_batches=len(job.micro_batches),
        expert_load=None if options.backend == "numpy" else job.expert_load,
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
    explained = _explained(job, tokenizer, generations)
    for path in explained:
        show(explain.text(path))
    return document(run, generations, predictions, explained)


def _explained(job: _Job, tokenizer: Tokenizer, generations: Sequence[Generation]) -> list[explain.TokenPath]:
    """How the new token that `--explain` names came about in each generation; the last one where it ended before."""
    if job.options.explain is None:
        return []
    paths = []
    for each in generations:
        number = min(job.options.explain, len(each.generated_ids))
        ids = (*each.prompt_ids, *each.generated_ids[:number])
        paths.append(explain.token_path(job.config, job.weights, tokenizer, ids, number, job.options.dtype))
    return paths


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
    """The mesh of the options; ModelError for too many ranks, or ranks that cannot share the model."""
    check_sequence(options.sp, options.tp)
    check_experts(config, options.ep, options.dp)
    mesh = Mesh(options.tp, options.dp, options.sp, options.pp, options.ep)
    if mesh.pipeline > 1:
        _check_pipeline(mesh, config)
    elif mesh.ranks > MOST_RANKS:
        groups = MOST_RANKS // mesh.tensor
        works = f"--tp {mesh.tensor} with --dp 1 to {groups}" if groups else f"--tp 1 to {MOST_RANKS}"
        raise ModelError(
            f"--tp {mesh.tensor} times --dp {mesh.data} are {mesh.ranks} ranks; one run takes {MOST_RANKS}: {works}"
        )
    check_ranks(config, options.tp)
    return mesh


def _check_pipeline(mesh: Mesh, config: ModelConfig) -> None:
    """Raise ModelError for more stages than layers, or too many ranks."""
    if mesh.pipeline > len(config.blocks):
        raise ModelError(
            f"{mesh.pipeline} pipeline stages for {len(config.blocks)} layers; this model takes --pp 1 to "
            f"{len(config.blocks)}"
        )
    if mesh.ranks > MOST_RANKS:
        raise ModelError(
            f"--pp {mesh.pipeline} times --tp {mesh.tensor} times --dp {mesh.data} are {mesh.ranks} ranks; one run "
            f"takes {MOST_RANKS}"
        )


def _micro_batches(options: argparse.Namespace, mesh: Mesh, prompts: int) -> int:
    """As many as --micro-batches asks for, else as there are stages, where each group has a prompt of each.

    ModelError for more than there are prompts of a group.
    """
    most = prompts // mesh.data
    if options.micro_batches is None:
        return min(mesh.pipeline, most)
    if options.micro_batches > most:
        of_each = f" in {mesh.data} groups" if mesh.data > 1 else ""
        count = f"{prompts} prompt{'s' if prompts > 1 else ''}{of_each}"
        works = f"--micro-batches 1{f' to {most}' if most > 1 else ''}"
        raise ModelError(f"{options.micro_batches} micro-batches of {count}; this run takes {works}")
    return options.micro_batches  # type: ignore[no-any-return]


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
        self.expert_load = ExpertLoad.of(config, mesh)
        self.sampling = sampling
        self.micro_batches = micro_batch_sizes(
            len(prompt_ids), _micro_batches(options, mesh, len(prompt_ids))
        )
        needed = positions_needed(max(map(len, prompt_ids)), options.max_new_tokens, config)
        self._cache_length = bucket_length(needed, config.context, mesh.row_multiple)

    @cached_property
    def _own_shards(self) -> tuple[RankWeights, ...]:
        """The weights of the ranks in this process: of one rank alone those of its stage."""
        rank = _rank()
        ranks = range(self.mesh.ranks) if rank is None else [rank]
        own = list(dict.fromkeys(map(self.mesh.shard, ranks)))
        layers = None if rank is None else layers_of_stage(compose(self.config), self.mesh, rank)
        given = self.config, self.weights, self.options.tp, own, self.weights.let_go, self.options.dtype
        return shard_weights(*given, layers)

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
            return self._model(device, progress, expert_load=self.expert_load)
        if options.backend == "neuron":
            from model.device.neuron import NeuronDevice

            return self._model(NeuronDevice(self.mesh.ranks), progress, expert_load=self.expert_load)
        return self.reference()

    def reference(self) -> ReferenceModel:
        """The same model in plain numpy."""
        return ReferenceModel(self.config, self.weights, self.options.dtype, ranks=self.options.tp)

    def dry_model(self, device: Device, progress: Progress, done: Callable[[], None]) -> MicroBatches:
        """The model on a device that only plans; ranks of other processes are planned here as well.

        `done` is called after a step of each micro-batch.
        """
        shards = self._own_shards
        if _rank() is not None:
            shards = weights_of_all(self.config, shards[0])
        return self._model(device, progress, shards, done)

    def _model(
        self,
        device: Device,
        progress: Progress,
        shards: tuple[RankWeights, ...] | None = None,
        done: Callable[[], None] = lambda: None,
        expert_load: ExpertLoad | None = None,
    ) -> MicroBatches:
        candidates = self.sampling.candidates_needed or 1
        parts = [
            KernelModel(
                self.config,
                shards or self._own_shards,
                device,
                self._cache_length,
                candidates,
                progress,
                sequences,
                self.mesh,
                expert_load,
            )
            for sequences in self.micro_batches
        ]
        return MicroBatches(parts, self.micro_batches, done)


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
    from model.device import PipelinedPass

    options = job.options
    last = [len(each.prompt_ids) + max(1, len(each.generated_ids) - 1) - 1 for each in generations]
    tokens_fed = [each.generated_ids[-1] for each in generations]
    predictions, chosen = [], []
    for target in progress(list(dict.fromkeys((*COMPARED_TARGETS, options.target))), "predictions"):
        passes = _passes(job, target, tokens_fed, last)
        count = len(job.micro_batches)
        first, token = (PipelinedPass(tuple(own), SEND) for own in (passes[:count], passes[count:]))
        predictions.append(TargetPrediction(first.prediction(), token.prediction()))
        if target == options.target:
            labels = [_prompt_label(own) for own in of_micro_batches(job.prompt_ids, job.micro_batches)]
            labels += [_step_label(own) for own in of_micro_batches(last, job.micro_batches)]
            chosen = list(zip(labels, passes))
    return predictions, chosen


def _passes(job: _Job, target: str, tokens: Sequence[int], positions: Sequence[int]) -> list[Pass]:
    """The passes of the prompts of every micro-batch, then those of a step of each."""
    from model.device import DryDevice

    device = DryDevice(target, job.mesh.ranks)
    passes: list[Pass] = []
    model = job.dry_model(device, device.layer_done, lambda: passes.append(device.take_pass()))
    model.prefill(job.prompt_ids)
    model.decode(tokens, positions)
    return passes


def _prompt_label(prompt_ids: Sequence[list[int]]) -> str:
    longest = max(map(len, prompt_ids))
    tokens = f"{longest} token" + ("" if longest == 1 else "s")
    return f"prompt of {tokens}" if len(prompt_ids) == 1 else f"{len(prompt_ids)} prompts of up to {tokens}"


def _step_label(positions: Sequence[int]) -> str:
    if len(positions) == 1:
        return f"token at position {positions[0]}"
    return f"{len(positions)} tokens at positions up to {max(positions)}"


def _write_timelines(
    job: _Job, passes: list[tuple[str, Pass]], trace: OutputFile | None, page: OutputFile | None
) -> None:
    from model.device import write_page, write_passes

    if trace is not None:
        names = [name for name in ("prompt", "token") for _ in job.micro_batches]
        write_passes(trace, [(name, done) for name, (_, done) in zip(names, passes)])
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
