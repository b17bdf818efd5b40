"""Entry of `nkw transcribe`: transcribes a recording, checks every token with the numpy reference, predicts times.

A window is a piece of the recording of up to 30 seconds, which the model transcribes at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from model.commands.generate.generation import Generation, generate
from model.commands.generate.mesh import MOST_RANKS
from model.commands.generate.prediction import check_cores, iterate_targets
from model.commands.generate.report import Run, TargetPrediction, build_document, summarise
from model.config.folder import list_model_files
from model.engine import SamplingParams
from model.engine.inputs import ModelInputs
from model.errors import ModelError
from model.execution.bound_launch import Device
from model.execution.launched_network import Progress
from model.families import SPEECH, load_config
from model.layers.uneven import describe_uneven
from model.llm.loaded import LoadedModel, open_device
from model.loading.tokenizer import Tokenizer
from model.loading.weights import RankWeights, check_ranks
from model.mesh import Mesh
from model.runners.bucket_length import bucket_length, count_positions_needed
from model.runners.contiguous import KernelModel
from model.runners.static_batch import Backend
from model.speech.recording import Recording
from model.speech.rules import Rules, TranscriptionRule, read_rules
from model.speech.timestamps import Segment, split_into_segments
from model.speech.wav import read_wav
from nkw.files import Outputs, json_document
from nkw.terminal import show


def transcribe_command(options: argparse.Namespace) -> int:
    """Transcribe, check, predict and report as the options ask, and return the exit status 0.

    Raises:
        ModelError: Options or files are refused, before the first token.
        InvalidArgument: The document of --json cannot be written.
    """
    check_cores(options)
    config = load_config(options.model, SPEECH)
    if options.tp > MOST_RANKS:
        raise ModelError(f"--tp {options.tp}; one run takes {MOST_RANKS} ranks at most: give a smaller --tp")
    check_ranks(config, options.tp)
    rules = read_rules(options.model, config, options.language, options.timestamps)
    samples = read_wav(options.file)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    model = LoadedModel.open(options.model, options.dtype, config, options.target)
    outputs = Outputs(lambda: [*list_model_files(options.model), *model.checkpoint.files, options.file])
    assert config.spectrum is not None, "loaded for speech"
    job = _Job(options, model, rules, Recording(samples, config.spectrum, options.timestamps))
    with json_document(options.json, outputs, "transcribe") as contents:
        contents.update(_transcribe_and_report(job, tokenizer))
    return 0


@dataclass
class _Job:
    """Model, recording and rules of a transcription, for generation and for prediction."""

    options: argparse.Namespace
    loaded: LoadedModel
    rules: Rules
    recording: Recording

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of every window: greedy, with at most --max-new-tokens tokens."""
        return SamplingParams(temperature=0, seed=0, max_tokens=self.options.max_new_tokens)

    @cached_property
    def shards(self) -> tuple[RankWeights, ...]:
        """Weights of all ranks, loaded at the first use."""
        return self.loaded.load_shards(Mesh(self.options.tp))

    def create_backend(self) -> Backend:
        """Return the backend that --backend names, with loaded weights."""
        options = self.options
        if options.backend == "numpy":
            return self.loaded.create_reference(options.tp)
        return self.create_model(open_device(options.backend, options.target, options.tp))

    def create_model(
        self, device: Device, progress: Progress = lambda done, layers: None, lnc: int = 1
    ) -> KernelModel:
        """Return the model on a device.

        Args:
            device: The device.
            progress: Called with the number of finished layers and of all layers.
            lnc: Number of physical cores of a rank.
        """
        needed = count_positions_needed(
            len(self.rules.prompt), self.options.max_new_tokens, self.loaded.config
        )
        length = bucket_length(needed, self.loaded.config.context)
        return KernelModel(self.loaded.config, self.shards, device, length, progress=progress, lnc=lnc)


@dataclass(frozen=True)
class _Window:
    """Transcribed window: its times as text, its generation, and its segments with --timestamps."""

    seconds: str
    generation: Generation
    segments: tuple[Segment, ...] = ()


def _transcribe_and_report(job: _Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """Transcribe and predict, print texts and summary, and return the document of --json."""
    options = job.options
    windows = _transcribe(job, tokenizer)
    generations = [window.generation for window in windows]
    run = Run(
        model=str(options.model),
        prompts=tuple(window.seconds for window in windows),
        backend=options.backend,
        target=options.target,
        mesh=Mesh(options.tp),
        dtype=job.loaded.activations.name,
        sampling=job.params,
        trace=None,
        uneven=describe_uneven(job.loaded.config, options.tp),
    )
    predictions = _predict(job, generations[-1]) if options.backend == "simulate" else []
    show(summarise(replace(run, prompts=run.prompts[:1]), generations, predictions))
    document = {**build_document(run, generations, predictions), "recording": str(options.file)}
    if options.timestamps:
        document["segments"] = _describe_segments(windows, job.rules, tokenizer)
    return document


def _transcribe(job: _Job, tokenizer: Tokenizer) -> list[_Window]:
    """Transcribe all windows and return them.

    The text of each window is printed token by token or, with --timestamps, segment by segment.
    """
    options = job.options
    backend = job.create_backend()
    reference = (
        job.loaded.create_reference(options.tp) if options.check and options.backend != "numpy" else None
    )
    windows: list[_Window] = []
    recording, column = job.recording, 0
    while column < recording.end:
        features, columns = recording.cut_window(column)
        begin, end = recording.find_times(column)
        seconds = f"{begin:g} s to {end:.1f} s"
        if recording.windows > 1 and not options.timestamps:
            print(f"window {len(windows) + 1} of {recording.windows}, {seconds}")
        (generation,) = generate(
            backend,
            tokenizer,
            job.loaded.config,
            [job.rules.prompt],
            job.params,
            reference,
            emit=lambda _, text: None if options.timestamps else print(text, end="", flush=True),
            inputs=ModelInputs(features, lambda: TranscriptionRule(job.rules, job.loaded.config.vocab_size)),
        )
        segments: list[Segment] = []
        if job.rules.timestamps is not None:
            ids = [token_id for token_id in generation.generated_ids if token_id != job.rules.timestamps.end]
            segments, columns = split_into_segments(ids, job.rules.timestamps.zero, column, columns)
        windows.append(_Window(seconds, generation, tuple(segments)))
        for segment in _describe_segments(windows[-1:], job.rules, tokenizer):
            times = f"{segment['start']:.2f} s to {segment['end']:.2f} s"
            print(f"[{times}] {segment['text'].strip()}", flush=True)
        column += columns
        if not options.timestamps:
            print("\n")
    return windows


def _describe_segments(
    windows: Sequence[_Window], rules: Rules, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return the segments of the windows as JSON objects; their texts have no timestamp tokens."""
    zero = 0 if rules.timestamps is None else rules.timestamps.zero
    return [
        {
            **asdict(segment),
            "ids": list(segment.ids),
            "text": tokenizer.decode([id for id in segment.ids if id < zero]),
        }
        for window in windows
        for segment in window.segments
    ]


def _predict(job: _Job, last: Generation) -> list[TargetPrediction]:
    """Predict times on each compared target: of a window with its prompt, and of the last decode step.

    Args:
        job: The model and the recording.
        last: Generation of the last window, whose prompt and last step are timed.
    """
    from model.device import DryDevice, limit_lnc

    predictions = []
    for target in iterate_targets(job.options.target):
        lnc = limit_lnc(target, job.options.lnc)
        device = DryDevice(target, job.options.tp, lnc=lnc)
        model = job.create_model(device, device.layer_done, lnc)
        model.encode([job.recording.cut_window(0)[0]])
        model.prefill([last.prompt_ids])
        window = device.take_pass()
        model.decode(last.generated_ids[-1:], [last.last_position])
        predictions.append(TargetPrediction(window.prediction(), device.take_pass().prediction()))
    return predictions
