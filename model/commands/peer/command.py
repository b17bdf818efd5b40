"""`nkw peer`: ours are the kernels on simulated cores; the library's times are measured, ours are predicted."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from model.commands.options.inputs import FIRST_PROMPT
from model.commands.peer.comparison import Comparison, GreedyRun, compared
from model.commands.peer.libraries import check_installed, load
from model.config import ModelConfig
from model.config.folder import model_files
from model.device import DryDevice, SimulatedDevice
from model.errors import ModelError
from model.families import load_config
from model.llm.loaded import LoadedModel
from model.loading.tokenizer import Tokenizer
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.bucket_length import bucket_length, positions_needed
from model.runners.contiguous import KernelModel
from nkw.files import Outputs, json_document
from nkw.terminal import show_lines


def peer_command(options: argparse.Namespace) -> int:
    """Compare prompt by prompt; status 1 where a token differs."""
    version = check_installed(options.library)
    config = load_config(options.model)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompts = options.prompt or [FIRST_PROMPT]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    if not all(ids):
        raise ModelError("a prompt has no tokens")
    needed = positions_needed(max(map(len, ids)), options.max_new_tokens, config)
    positions = bucket_length(needed, config.context)
    ours = LoadedModel.open(options.model, options.dtype, config).shards(Mesh(options.tp))
    results = []
    with (
        json_document(options.json, Outputs(lambda: model_files(options.model)), "peer") as contents,
        tempfile.TemporaryDirectory() as work,
    ):
        theirs = load(options.library, options.model, options.tp, options.dtype, positions, Path(work))
        for prompt, own in zip(prompts, ids):
            new = min(options.max_new_tokens, config.context - len(own))
            found = _ours(config, ours, options, positions, own, new)
            other = theirs.generate(own, new)
            result = compared(found, other)
            predicted_ms = _predicted_ms(config, ours, options, positions, len(own), len(found.tokens))
            show_lines(_text(prompt, result, other.seconds, predicted_ms, tokenizer))
            times = {"measured_s": other.seconds, "predicted_ms": predicted_ms}
            results.append({"prompt": prompt, **asdict(result), **times})
        contents.update(library=options.library, version=version, target=options.target, results=results)
    return 0 if all(each["equal"] == each["tokens"] for each in results) else 1


def _ours(
    config: ModelConfig,
    weights: tuple[RankWeights, ...],
    options: argparse.Namespace,
    positions: int,
    ids: list[int],
    new: int,
) -> GreedyRun:
    """What our kernels find for one prompt."""
    model = KernelModel(config, weights, SimulatedDevice(options.target, options.tp), positions)
    tokens: list[int] = []
    logits: list[np.ndarray] = []
    (step,) = model.prefill([ids])
    while True:
        assert step.logits is not None
        tokens.append(step.likeliest)
        logits.append(step.logits)
        if len(tokens) == new or tokens[-1] in config.eos_token_ids:
            return GreedyRun(tuple(tokens), tuple(logits), 0.0)
        (step,) = model.decode(tokens[-1:], [len(ids) + len(tokens) - 1])


def _predicted_ms(
    config: ModelConfig,
    weights: tuple[RankWeights, ...],
    options: argparse.Namespace,
    positions: int,
    prompt: int,
    tokens: int,
) -> float:
    """The predicted time of a prompt and its tokens on the chip, each as the last one."""
    device = DryDevice(options.target, options.tp)
    model = KernelModel(config, weights, device, positions)
    model.prefill([[0] * prompt])
    first = device.take_pass().prediction().program_ns
    if tokens == 1:
        return first / 1e6
    model.decode([0], [prompt + tokens - 2])
    return (first + (tokens - 1) * device.take_pass().prediction().program_ns) / 1e6


def _text(prompt: str, result: Comparison, seconds: float, predicted_ms: float, tokenizer: Tokenizer) -> str:
    """Two or three lines on one prompt."""
    lines = [
        f"{prompt!r:.60}: {result.equal} of {result.tokens} tokens equal; "
        f"logits differ by {result.largest_difference:.3g} at most",
        f"  measured {1e3 * seconds:,.3f} ms with the library, predicted {predicted_ms:,.3f} ms with our kernels",
    ]
    if result.ours is not None and result.theirs is not None:
        own, other = tokenizer.decode([result.ours]), tokenizer.decode([result.theirs])
        lines.append(
            f"  token {result.equal + 1}: ours {own!r}, theirs {other!r}; ours lie {result.gap:.3g} apart"
        )
    return "\n".join(lines)
