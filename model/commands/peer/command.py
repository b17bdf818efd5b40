"""`nkw peer`: compares our kernels on simulated cores with an inference library of the vendor on real ones.

Tokens and logits are compared. Our times are predicted, and those of the library are measured.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from model.commands.greedy import generate_greedily
from model.commands.options.inputs import FIRST_PROMPT
from model.commands.peer.comparison import Comparison, GreedyRun, compare_runs
from model.commands.peer.libraries import check_installed, load
from model.config.folder import list_model_files
from model.device import DryDevice, SimulatedDevice, choose_lnc
from model.engine.sampler import require_logits
from model.errors import ModelError
from model.families import load_config
from model.llm.loaded import LoadedModel
from model.loading.tokenizer import Tokenizer
from model.mesh import Mesh
from model.runners.bucket_length import bucket_length, count_positions_needed
from model.runners.contiguous import KernelModel
from nkw.files import Outputs, json_document
from nkw.terminal import show_lines


def peer_command(options: argparse.Namespace) -> int:
    """Compare prompt by prompt, and print a report of each.

    Returns:
        The exit status: 0, or 1 if a token differs.

    Raises:
        ModelError: The library is not installed or does not take the model, or an option is refused.
    """
    lnc = choose_lnc(options.target, options.lnc)
    version = check_installed(options.library)
    config = load_config(options.model)
    tokenizer = Tokenizer(options.model, config.vocab_size)
    prompts = options.prompt or [FIRST_PROMPT]
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if not all(encoded):
        raise ModelError("a prompt has no tokens")
    needed = count_positions_needed(max(map(len, encoded)), options.max_new_tokens, config)
    positions = bucket_length(needed, config.context)
    weights = LoadedModel.open(options.model, options.dtype, config, options.target).load_shards(
        Mesh(options.tp)
    )
    results = []
    with (
        json_document(options.json, Outputs(lambda: list_model_files(options.model)), "peer") as contents,
        tempfile.TemporaryDirectory() as work,
    ):
        library = load(options.library, options.model, options.tp, options.dtype, positions, Path(work))
        for prompt, ids in zip(prompts, encoded):
            new_tokens = min(options.max_new_tokens, config.context - len(ids))
            model = KernelModel(config, weights, SimulatedDevice(options.target, options.tp), positions)
            steps = list(generate_greedily(model, config, ids, new_tokens))
            logits = tuple(require_logits(step.logits) for step in steps)
            ours = GreedyRun(tuple(step.likeliest for step in steps), logits, 0.0)
            theirs = library.generate(ids, new_tokens)
            comparison, device = compare_runs(ours, theirs), DryDevice(options.target, options.tp, lnc=lnc)
            model = KernelModel(config, weights, device, positions, lnc=lnc)
            predicted_ms = _predict_ms(model, device, len(ids), len(ours.tokens))
            predicted = f"{predicted_ms:,.3f} ms with our kernels (LNC {lnc})"
            show_lines(_describe(prompt, comparison, theirs.seconds, predicted, tokenizer))
            times = {"measured_s": theirs.seconds, "predicted_ms": predicted_ms}
            results.append({"prompt": prompt, **asdict(comparison), **times})
        contents.update(
            library=options.library, version=version, target=options.target, lnc=lnc, results=results
        )
    return 0 if all(result["equal"] == result["tokens"] for result in results) else 1


def _predict_ms(model: KernelModel, device: DryDevice, prompt: int, tokens: int) -> float:
    """Return the predicted time of a prompt and its new tokens in ms; each decode step counts as the last one.

    Args:
        model: The model on `device`.
        device: The dry device.
        prompt: Number of tokens of the prompt.
        tokens: Number of new tokens, the first of which the prompt's step gives.
    """
    model.prefill([[0] * prompt])
    first = device.take_pass().prediction().program_ns
    if tokens == 1:
        return first / 1e6
    model.decode([0], [prompt + tokens - 2])
    return (first + (tokens - 1) * device.take_pass().prediction().program_ns) / 1e6


def _describe(
    prompt: str, comparison: Comparison, seconds: float, predicted: str, tokenizer: Tokenizer
) -> str:
    """Return two lines about a prompt, and a third line about the first different token, if there is one.

    Args:
        prompt: The prompt.
        comparison: Comparison of the two runs.
        seconds: Measured seconds of the library.
        predicted: Predicted time as text.
        tokenizer: The model's tokenizer.
    """
    lines = [
        f"{prompt!r:.60}: {comparison.equal} of {comparison.tokens} tokens equal; "
        f"logits differ by {comparison.largest_difference:.3g} at most",
        f"  measured {1e3 * seconds:,.3f} ms with the library, predicted {predicted}",
    ]
    if comparison.ours is not None and comparison.theirs is not None:
        ours, theirs = tokenizer.decode([comparison.ours]), tokenizer.decode([comparison.theirs])
        lines.append(
            f"  token {comparison.equal + 1}: ours {ours!r}, theirs {theirs!r}; our logits differ by "
            f"{comparison.gap:.3g}"
        )
    return "\n".join(lines)
