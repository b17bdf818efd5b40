"""Entry of `nkw generate`: generates texts, compares every token with the numpy reference, and predicts times."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from model.commands.generate import explain
from model.commands.generate.arguments import OPTIONS, UNMASKING
from model.commands.generate.generation import Generation, generate
from model.commands.generate.job import Job, Progress, get_rank
from model.commands.generate.masked_text import generate_masked_text
from model.commands.generate.mesh import check_groups, create_mesh
from model.commands.generate.prediction import check_cores, check_timelines, predict, write_timelines
from model.commands.generate.profile import describe_passes
from model.commands.generate.prompts import (
    MOST_PROMPTS,
    encode_prompts,
    read_prompts,
    read_sampling_params,
)
from model.commands.generate.report import Run, TargetPrediction, build_document, describe_problems, summarise
from model.commands.generate.texts import escape_text, format_prompt, print_texts
from model.commands.unread import refuse_options
from model.config import ModelConfig
from model.config.folder import list_model_files
from model.config.masked_text import MaskedTextConfig
from model.config.quantization import quantise_config
from model.errors import ModelError
from model.families import TEXT, load_config
from model.families.tasks import MASKED_TEXT, Task
from model.layers.uneven import describe_uneven
from model.llm.loaded import LoadedModel
from model.loading.tokenizer import Tokenizer
from nkw.files import STDOUT, OutputFile, Outputs, json_document
from nkw.terminal import EVERY_SECONDS, show, show_lines

_TASKS: tuple[Task[Any], ...] = (TEXT, MASKED_TEXT)


def generate_command(options: argparse.Namespace) -> int:
    """Generate, check, predict and report as the options ask, and return the exit status 0.

    Under torchrun, ranks other than 0 compute and print nothing.

    Raises:
        ModelError: Options or files are refused, before the first token.
        InvalidArgument: A file of the results cannot be written.
    """
    if get_rank() is not None and options.backend == "numpy":
        raise ModelError("torchrun starts ranks of the backends simulate and neuron; --backend is numpy")
    config = load_config(options.model, *_TASKS)
    if isinstance(config, MaskedTextConfig):
        return generate_masked_text(options, config)
    reason = f"a {config.model_type} continues texts token by token; models that fill masks take it"
    refuse_options(options, OPTIONS, UNMASKING, reason)
    if get_rank():
        return _follow(options, config)
    check_timelines(options)
    if options.logprobs is not None and options.json is None:
        raise ModelError("--logprobs are written to --json FILE: give it as well")
    if options.explain is not None and options.explain > options.max_new_tokens:
        raise ModelError(f"--explain {options.explain}: --max-new-tokens is {options.max_new_tokens}")
    check_cores(options)
    job, tokenizer = _read_job(options, config)
    prompt_files = [options.prompt_file] if options.prompt_file not in (None, STDOUT) else []
    outputs = Outputs(lambda: [*list_model_files(options.model), *job.model.checkpoint.files, *prompt_files])
    trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
    page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    with json_document(options.json, outputs, "generate", "NKW-GENERATE-FILE") as contents:
        contents.update(_generate_and_report(job, tokenizer, trace, page))
    return 0


def _read_job(options: argparse.Namespace, config: ModelConfig) -> tuple[Job, Tokenizer]:
    """Read the model and the prompts, and return the job and the model's tokenizer; `config` is that of the folder.

    Raises:
        ModelError: Options exclude each other or do not fit the model, or a file cannot be read.
    """
    config = quantise_config(config, options.quantization, options.row_scales)
    mesh = create_mesh(options, config)
    sampling = read_sampling_params(options)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompts = read_prompts(options, shared=get_rank() is not None)
    if len(prompts) * sampling.n > MOST_PROMPTS:
        raise ModelError(
            f"{len(prompts)} prompts with --n {sampling.n}; one batch takes {MOST_PROMPTS} texts: give fewer prompts "
            "or a smaller --n"
        )
    check_groups(mesh, prompts * sampling.n)
    ids = encode_prompts(prompts, options, tokenizer, config)
    model = LoadedModel.open(options.model, options.dtype, config, options.target)
    return Job(options, model, prompts, ids, sampling, mesh), tokenizer


def _generate_and_report(
    job: Job, tokenizer: Tokenizer, trace: OutputFile | None, page: OutputFile | None
) -> dict[str, Any]:
    """Generate and predict, write the timelines, print texts and summary, and return the document of --json.

    Args:
        job: The model and the prompts.
        tokenizer: The model's tokenizer.
        trace: File of --trace, or None.
        page: File of --html, or None.
    """
    options = job.options
    generations = _generate(job, tokenizer)
    run = Run(
        model=str(options.model),
        prompts=tuple(job.prompts),
        backend=options.backend,
        target=options.target,
        mesh=job.mesh,
        dtype=job.model.activations.name,
        sampling=job.sampling,
        trace=None if trace is None else str(options.trace),
        uneven=describe_uneven(job.config, job.mesh.tensor),
        micro_batches=len(job.micro_batches),
        expert_load=None if options.backend == "numpy" else job.expert_load,
    )
    predictions: list[TargetPrediction] = []
    reports = (options.json, options.trace, options.html, options.profile or None)
    if options.backend == "simulate" and (not options.quiet or any(report is not None for report in reports)):
        predictions, passes = predict(job, generations)
        names = [name for name in ("prompt", "token") for _ in job.micro_batches]
        write_timelines(options, job.mesh.ranks, passes, names, trace, page)
    if options.quiet:
        for problem in describe_problems(generations):
            show_lines(f"nkw generate: {problem}", sys.stderr)
    else:
        show(summarise(run, generations, predictions))
    if trace is not None and not options.quiet:
        show_lines(f"trace: {options.trace}")
    if options.replay_report and options.backend == "simulate":
        print("\n" + job.replay_report())
    if page is not None and not options.quiet:
        show_lines(f"page: {options.html}")
    if options.profile:
        show(["", *describe_passes(options.target, passes)])
    traces = [] if options.explain is None else _trace_tokens(job, tokenizer, generations)
    for trace_of_token in traces:
        show(explain.describe_trace(trace_of_token))
    return build_document(run, generations, predictions, traces)


def _trace_tokens(
    job: Job, tokenizer: Tokenizer, generations: Sequence[Generation]
) -> list[explain.TokenTrace]:
    """Return the trace of one new token of each generation: the token of number --explain, or the last token."""
    traces = []
    for generation in generations:
        number = min(job.options.explain, len(generation.generated_ids))
        ids = (*generation.prompt_ids, *generation.generated_ids[:number])
        traces.append(
            explain.trace_token(job.config, job.model.checkpoint, tokenizer, ids, number, job.options.dtype)
        )
    return traces


def _follow(options: argparse.Namespace, config: ModelConfig) -> int:
    """Compute a generation as a rank other than 0, which prints and writes nothing; return the exit status 0."""
    job, tokenizer = _read_job(options, config)
    backend = job.create_backend(ignore_progress)
    generate(backend, tokenizer, job.config, job.prompt_ids, job.sampling)
    return 0


def _generate(job: Job, tokenizer: Tokenizer) -> list[Generation]:
    """Generate and return the continuations, and print their texts on stdout.

    A single continuation is printed token by token, and several ones at the end.
    """
    options = job.options
    backend = job.create_backend(ignore_progress if options.quiet else create_prompt_progress())
    compares = options.check and options.backend != "numpy"
    streams = len(job.prompts) == 1
    generations = generate(
        backend,
        tokenizer,
        job.config,
        job.prompt_ids,
        job.sampling,
        job.create_reference() if compares else None,
        emit=lambda number, text: print(escape_text(text) if streams else "", end="", flush=True),
        prompts_done=lambda: print(
            format_prompt(job.prompts[0], options) if streams else "", end="", flush=True
        ),
    )
    if streams:
        print("" if options.quiet else "\n")
    else:
        noun = "prompt" if job.sampling.n == 1 else "text"
        print_texts(job.prompts, [generation.text for generation in generations], options, noun)
    return generations


def ignore_progress(done: int, layers: int) -> None:
    """Do nothing: progress of a rank that does not print, and of --quiet."""


def create_prompt_progress(every: float = EVERY_SECONDS) -> Progress:
    """Return a function for the number of finished layers and of all layers, which shows the progress of the prompts.

    Passes after the first one, which computes the prompts, are not shown. The text goes to stderr.

    Args:
        every: Seconds between two lines if stderr is not a terminal. A terminal has one line, which is erased.
    """
    on_terminal, shown_at, first_pass = sys.stderr.isatty(), time.monotonic(), True

    def show(done: int, layers: int) -> None:
        """Show the number of finished layers of the first pass; do nothing in later passes."""
        nonlocal first_pass, shown_at
        text = f"prompt: layer {done} of {layers}"
        if first_pass and on_terminal:
            print(f"\r\x1b[K{text if done < layers else ''}", end="", file=sys.stderr, flush=True)
        elif first_pass and time.monotonic() - shown_at >= every:
            print(text, file=sys.stderr, flush=True)
            shown_at = time.monotonic()
        first_pass = first_pass and done < layers

    return show
