"""`nkw transcribe`: puts recording, config, weights, tokenizer, backend and outputs together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from model.cache import bucket_length
from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig
from model.config.parts import SpeechEncoder
from model.errors import ModelError
from model.families import load_config
from model.folder import model_files
from model.generate import Generation, generate, positions_needed
from model.kernel_model import KernelModel
from model.launched import Device, Progress
from model.layers.uneven import uneven
from model.mesh import Mesh
from model.precision import activation_dtype
from model.reference import ReferenceModel
from model.report import Run, TargetPrediction, document, summary
from model.sampling import SamplingOptions
from model.tokenizer import Tokenizer
from model.transcribe.rules import Hearing, Listener, Rules, read_rules
from model.transcribe.spectrum import HOP, log_mel, windows_of
from model.transcribe.wav import SAMPLE_RATE, read_wav
from model.weights import RankWeights, check_ranks, shard_weights
from simulate.files import Outputs, json_document
from simulate.terminal import progress, show

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Pass

COMPARED_TARGETS = ("trn1", "inf2", "trn2")
_MOST_RANKS = 32
_GREEDY = SamplingOptions()


def transcribe_command(options: argparse.Namespace) -> int:
    """Transcribe, check, predict, report. Everything that can be refused is refused before the first token."""
    config = load_config(options.model, of_speech=True)
    if options.tp > _MOST_RANKS:
        raise ModelError(f"--tp {options.tp}; one run takes {_MOST_RANKS} ranks at most")
    check_ranks(config, options.tp)
    rules = read_rules(options.model, config, options.language)
    samples = read_wav(options.file)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    weights = open_checkpoint(options.model, config)
    outputs = Outputs(lambda: [*model_files(options.model), *weights.files, options.file])
    job = _Job(options, config, weights, rules, samples)
    with json_document(options.json, outputs, "transcribe") as contents:
        contents.update(_reported(job, tokenizer))
    return 0


@dataclass
class _Job:
    """One model and one recording: the input of transcribing and of predicting."""

    options: argparse.Namespace
    config: ModelConfig
    weights: Checkpoint
    rules: Rules
    samples: np.ndarray

    @cached_property
    def spectra(self) -> list[np.ndarray]:
        """The log-mel spectrum of each window."""
        encoder = self.config.encoder
        assert isinstance(encoder, SpeechEncoder)
        return [log_mel(each, encoder.mel_bins) for each in windows_of(self.samples, self.columns)]

    @property
    def columns(self) -> int:
        """Of a spectrum: the first two of them give the encoder's first position."""
        assert self.config.encoder is not None
        return 2 * self.config.encoder.positions

    @cached_property
    def shards(self) -> tuple[RankWeights, ...]:
        """The weights of every rank."""
        options = self.options
        return shard_weights(
            self.config, self.weights, options.tp, taken=self.weights.let_go, dtype=options.dtype
        )

    def backend(self) -> Hearing:
        """The backend that --backend names."""
        options = self.options
        if options.backend == "simulate":
            from model.device import SimulatedDevice

            return self.model(SimulatedDevice(options.target, options.tp))
        if options.backend == "neuron":
            from model.device.neuron import NeuronDevice

            return self.model(NeuronDevice(options.tp))
        return self.reference()

    def reference(self) -> ReferenceModel:
        """The same model in plain numpy."""
        return ReferenceModel(self.config, self.weights, self.options.dtype, ranks=self.options.tp)

    def model(self, device: Device, progress: Progress = lambda done, layers: None) -> KernelModel:
        """The model on a device."""
        needed = positions_needed(len(self.rules.prompt), self.options.max_new_tokens, self.config)
        length = bucket_length(needed, self.config.context)
        return KernelModel(self.config, self.shards, device, length, progress=progress)


def _reported(job: _Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """Transcribe and predict, and print the summary; returns the document."""
    options = job.options
    generations = _transcribed(job, tokenizer)
    run = Run(
        model=str(options.model),
        prompts=tuple(_title(job, number) for number in range(len(generations))),
        backend=options.backend,
        target=options.target,
        mesh=Mesh(options.tp),
        dtype=activation_dtype(options.dtype, job.config, job.weights).name,
        sampling=_GREEDY,
        trace=None,
        uneven=uneven(job.config, options.tp),
    )
    predictions = _predicted(job, generations[-1]) if options.backend == "simulate" else []
    show(summary(replace(run, prompts=run.prompts[:1]), generations, predictions))
    return {**document(run, generations, predictions), "recording": str(options.file)}


def _title(job: _Job, number: int) -> str:
    """A window by the seconds that it spans."""
    each = job.columns * HOP / SAMPLE_RATE
    end = min((number + 1) * each, len(job.samples) / SAMPLE_RATE)
    return f"{number * each:g} s to {end:.1f} s"


def _transcribed(job: _Job, tokenizer: Tokenizer) -> list[Generation]:
    """Stream what is said in each window to stdout."""
    options = job.options
    backend = job.backend()
    reference = job.reference() if options.check and options.backend != "numpy" else None
    found = []
    for number, features in enumerate(job.spectra):
        if len(job.spectra) > 1:
            print(f"window {number + 1} of {len(job.spectra)}, {_title(job, number)}")
        found += generate(
            Listener(backend, features, job.rules),
            tokenizer,
            job.config,
            [job.rules.prompt],
            options.max_new_tokens,
            _GREEDY,
            None if reference is None else Listener(reference, features, job.rules),
            emit=lambda _, text: print(text, end="", flush=True),
        )
        print("\n")
    return found


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
    model.encode(job.spectra[-1:])
    model.prefill([last.prompt_ids])
    window: Pass = device.take_pass()
    at = len(last.prompt_ids) + max(1, len(last.generated_ids) - 1) - 1
    model.decode(_last_token(last), [at])
    token: Pass = device.take_pass()
    return TargetPrediction(window.prediction(), token.prediction())


def _last_token(generation: Generation) -> Sequence[int]:
    return generation.generated_ids[-1:]
