"""`nkw generate`: puts config, weights, tokenizer, backend and outputs together."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from model.commands.generate import explain
from model.commands.generate.generation import Generation, generate
from model.commands.generate.job import Job, Progress, this_rank
from model.commands.generate.mesh import check_groups, mesh_of
from model.commands.generate.prediction import predict, write_timelines
from model.commands.generate.profile import parts as profile_parts
from model.commands.generate.prompts import MOST_PROMPTS, encoded, read_prompts, sampling_params
from model.commands.generate.report import Run, TargetPrediction, document, summary
from model.config.folder import model_files
from model.errors import ModelError
from model.families import load_config
from model.layers.uneven import uneven
from model.llm.loaded import LoadedModel
from model.loading.tokenizer import Tokenizer
from nkw.errors import shown
from nkw.files import STDOUT, OutputFile, Outputs, json_document
from nkw.terminal import EVERY_SECONDS, show, show_lines


def generate_command(options: argparse.Namespace) -> int:
    """Generate, check, predict, report. Everything that can be refused is refused before the first token."""
    if this_rank() is not None and options.backend == "numpy":
        raise ModelError("torchrun starts ranks of the backends simulate and neuron; --backend is numpy")
    if this_rank():
        return _follow(options)
    for option in ("trace", "profile", "html"):
        if getattr(options, option) and options.backend != "simulate":
            raise ModelError(f"--{option} needs the simulate backend; {options.backend} predicts no timeline")
    if options.logprobs is not None and options.json is None:
        raise ModelError("--logprobs are written to --json FILE: give it as well")
    if options.explain is not None and options.explain > options.max_new_tokens:
        raise ModelError(f"--explain {options.explain}: --max-new-tokens is {options.max_new_tokens}")
    job, tokenizer = _read_job(options)
    given = [options.prompt_file] if options.prompt_file not in (None, STDOUT) else []
    outputs = Outputs(lambda: [*model_files(options.model), *job.model.checkpoint.files, *given])
    trace = outputs.claim(options.trace, "trace", "NKW-TRACE-PATH")
    page = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
    with json_document(options.json, outputs, "generate", "NKW-GENERATE-FILE") as contents:
        contents.update(_reported(job, tokenizer, trace, page))
    return 0


def _read_job(options: argparse.Namespace) -> tuple[Job, Tokenizer]:
    """Read the model and the prompts. Raises ModelError for what does not fit together."""
    config = load_config(options.model)
    mesh = mesh_of(options, config)
    sampling = sampling_params(options)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompts = read_prompts(options, shared=this_rank() is not None)
    if len(prompts) * sampling.n > MOST_PROMPTS:
        raise ModelError(
            f"{len(prompts)} prompts with --n {sampling.n}; one batch takes {MOST_PROMPTS} texts"
        )
    check_groups(mesh, prompts * sampling.n)
    ids = encoded(prompts, options, tokenizer, config)
    model = LoadedModel.open(options.model, options.dtype, config)
    return Job(options, model, prompts, ids, sampling, mesh), tokenizer


def _reported(
    job: Job, tokenizer: Tokenizer, trace: OutputFile | None, page: OutputFile | None
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
        dtype=job.model.activations.name,
        sampling=job.sampling,
        trace=None if trace is None else str(options.trace),
        uneven=uneven(job.config, job.mesh.tensor),
        micro_batches=len(job.micro_batches),
        expert_load=None if options.backend == "numpy" else job.expert_load,
    )
    predictions: list[TargetPrediction] = []
    if options.backend == "simulate":
        predictions, passes = predict(job, generations)
        write_timelines(job, passes, trace, page)
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


def _explained(job: Job, tokenizer: Tokenizer, generations: Sequence[Generation]) -> list[explain.TokenPath]:
    """How the new token that `--explain` names came about in each generation; the last one where it ended before."""
    if job.options.explain is None:
        return []
    paths = []
    for each in generations:
        number = min(job.options.explain, len(each.generated_ids))
        ids = (*each.prompt_ids, *each.generated_ids[:number])
        paths.append(
            explain.token_path(job.config, job.model.checkpoint, tokenizer, ids, number, job.options.dtype)
        )
    return paths


def _follow(options: argparse.Namespace) -> int:
    """Take part in a generation as a rank that prints and writes nothing; rank 0 does."""
    job, tokenizer = _read_job(options)
    backend = job.backend(lambda done, layers: None)
    generate(backend, tokenizer, job.config, job.prompt_ids, job.sampling)
    return 0


def _generate(job: Job, tokenizer: Tokenizer) -> list[Generation]:
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
        job.sampling,
        job.reference() if compares else None,
        emit=lambda number, text: print(_printed(text) if alone else "", end="", flush=True),
        prompts_done=lambda: print(_before(job.prompts[0], options) if alone else "", end="", flush=True),
    )
    if alone:
        print("\n")
    else:
        for number, (prompt, each) in enumerate(zip(job.prompts, generations), 1):
            noun = "prompt" if job.sampling.n == 1 else "text"
            print(f"{noun} {number} of {len(generations)}")
            print(f"{_printed(_before(prompt, options))}{_printed(each.text)}\n")
    return generations


def _before(prompt: str, options: argparse.Namespace) -> str:
    """The text before a continuation: the prompt; in a chat the answer stands alone."""
    return "" if options.chat else prompt


def _printed(text: str) -> str:
    """Generated text; on a terminal its control characters are escaped."""
    return shown(text, len(text)) if sys.stdout.isatty() else text


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
