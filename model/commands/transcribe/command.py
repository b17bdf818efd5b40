"""`nkw transcribe`: puts recording, config, weights, tokenizer, backend and outputs together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from model.commands.generate.generation import Generation, generate
from model.commands.generate.report import Run, TargetPrediction, document, summary
from model.config import ModelConfig
from model.config.folder import model_files
from model.engine import SamplingParams
from model.engine.inputs import ModelInputs
from model.errors import ModelError
from model.execution.bound_launch import Device
from model.execution.launched_network import Progress
from model.families import SPEECH, load_config
from model.layers.uneven import uneven
from model.llm.loaded import LoadedModel, open_device
from model.loading.tokenizer import Tokenizer
from model.loading.weights import RankWeights, check_ranks
from model.mesh import Mesh
from model.runners.bucket_length import bucket_length, positions_needed
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from model.runners.static_batch import Backend
from model.speech.recording import Recording
from model.speech.rules import Rules, read_rules
from model.speech.timestamps import Segment, segments_of
from model.speech.wav import read_wav
from nkw.files import Outputs, json_document
from nkw.terminal import progress, show

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Pass

COMPARED_TARGETS = ("trn1", "inf2", "trn2")
_MOST_RANKS = 32


def transcribe_command(options: argparse.Namespace) -> int:
    """Transcribe, check, predict, report. Everything that can be refused is refused before the first token."""
    config = load_config(options.model, SPEECH)
    if options.tp > _MOST_RANKS:
        raise ModelError(f"--tp {options.tp}; one run takes {_MOST_RANKS} ranks at most")
    check_ranks(config, options.tp)
    rules = read_rules(options.model, config, options.language, options.timestamps)
    samples = read_wav(options.file)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    model = LoadedModel.open(options.model, options.dtype, config)
    outputs = Outputs(lambda: [*model_files(options.model), *model.checkpoint.files, options.file])
    assert config.spectrum is not None, "loaded for speech"
    job = _Job(options, model, rules, Recording(samples, config.spectrum, options.timestamps))
    with json_document(options.json, outputs, "transcribe") as contents:
        contents.update(_reported(job, tokenizer))
    return 0


@dataclass
class _Job:
    """One model and one recording: the input of transcribing and of predicting."""

    options: argparse.Namespace
    loaded: LoadedModel
    rules: Rules
    recording: Recording

    def seconds(self, begins: int) -> str:
        """The window from a column on, by the seconds that it spans."""
        begin, end = self.recording.span(begins)
        return f"{begin:g} s to {end:.1f} s"

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.loaded.config

    @property
    def params(self) -> SamplingParams:
        """Greedy choice."""
        return SamplingParams(temperature=0, seed=0, max_tokens=self.options.max_new_tokens)

    @cached_property
    def shards(self) -> tuple[RankWeights, ...]:
        """The weights of every rank."""
        return self.loaded.shards(Mesh(self.options.tp))

    def backend(self) -> Backend:
        """The backend that --backend names."""
        options = self.options
        if options.backend == "numpy":
            return self.reference()
        return self.model(open_device(options.backend, options.target, options.tp))

    def reference(self) -> ReferenceModel:
        """The same model in plain numpy."""
        return self.loaded.reference(self.options.tp)

    def model(self, device: Device, progress: Progress = lambda done, layers: None) -> KernelModel:
        """The model on a device."""
        needed = positions_needed(len(self.rules.prompt), self.options.max_new_tokens, self.config)
        length = bucket_length(needed, self.config.context)
        return KernelModel(self.config, self.shards, device, length, progress=progress)


@dataclass(frozen=True)
class _Window:
    """A window: its seconds, the generation, and the segments of it where they were asked for."""

    seconds: str
    generation: Generation
    segments: tuple[Segment, ...] = ()


def _reported(job: _Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """Transcribe and predict, and print the summary; returns the document."""
    options = job.options
    windows = _transcribed(job, tokenizer)
    generations = [each.generation for each in windows]
    run = Run(
        model=str(options.model),
        prompts=tuple(each.seconds for each in windows),
        backend=options.backend,
        target=options.target,
        mesh=Mesh(options.tp),
        dtype=job.loaded.activations.name,
        sampling=job.params,
        trace=None,
        uneven=uneven(job.config, options.tp),
    )
    predictions = _predicted(job, generations[-1]) if options.backend == "simulate" else []
    show(summary(replace(run, prompts=run.prompts[:1]), generations, predictions))
    segments = {} if not options.timestamps else {"segments": _listed(windows, job.rules, tokenizer)}
    return {**document(run, generations, predictions), "recording": str(options.file), **segments}


def _transcribed(job: _Job, tokenizer: Tokenizer) -> list[_Window]:
    """Write what is said to stdout: window after window as it comes, or segment after segment."""
    options = job.options
    backend = job.backend()
    reference = job.reference() if options.check and options.backend != "numpy" else None
    found: list[_Window] = []
    recording, begins = job.recording, 0
    while begins < recording.end:
        features, columns = recording.window(begins)
        if recording.windows > 1 and not options.timestamps:
            print(f"window {len(found) + 1} of {recording.windows}, {job.seconds(begins)}")
        (generation,) = generate(
            backend,
            tokenizer,
            job.config,
            [job.rules.prompt],
            job.params,
            reference,
            emit=lambda _, text: None if options.timestamps else print(text, end="", flush=True),
            inputs=ModelInputs(features, lambda: job.rules.of_text(job.config.vocab_size)),
        )
        segments: list[Segment] = []
        if job.rules.timestamps is not None:
            ids = [each for each in generation.generated_ids if each != job.rules.timestamps.end]
            segments, columns = segments_of(ids, job.rules.timestamps.zero, begins, columns)
        window = _Window(job.seconds(begins), generation, tuple(segments))
        for each in _listed([window], job.rules, tokenizer):
            print(f"[{each['start']:.2f} s to {each['end']:.2f} s] {each['text'].strip()}", flush=True)
        found.append(window)
        begins += columns
        if not options.timestamps:
            print("\n")
    return found


def _listed(windows: Sequence[_Window], rules: Rules, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """All segments with their texts, in which the tokens of times have no part."""
    zero = 0 if rules.timestamps is None else rules.timestamps.zero
    return [
        {
            **asdict(each),
            "ids": list(each.ids),
            "text": tokenizer.decode([id for id in each.ids if id < zero]),
        }
        for window in windows
        for each in window.segments
    ]


def _predicted(job: _Job, last: Generation) -> list[TargetPrediction]:
    """Predicted times of a window with its prompt, and of its last decode step, on each compared target."""
    from model.device import DryDevice

    targets = dict.fromkeys((*COMPARED_TARGETS, job.options.target))
    return [
        _on_target(job, last, DryDevice(each, job.options.tp))
        for each in progress(list(targets), "predictions")
    ]


def _on_target(job: _Job, last: Generation, device: Any) -> TargetPrediction:
    model = job.model(device, device.layer_done)
    model.encode([job.recording.window(0)[0]])
    model.prefill([last.prompt_ids])
    window: Pass = device.take_pass()
    at = len(last.prompt_ids) + max(1, len(last.generated_ids) - 1) - 1
    model.decode(_last_token(last), [at])
    token: Pass = device.take_pass()
    return TargetPrediction(window.prediction(), token.prediction())


def _last_token(generation: Generation) -> Sequence[int]:
    return generation.generated_ids[-1:]
