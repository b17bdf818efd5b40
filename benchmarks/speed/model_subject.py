"""A process with one side of the comparison with transformers, controlled by lines on stdin.

    python -m benchmarks.speed.model_subject write NAME FOLDER
    python -m benchmarks.speed.model_subject replayed|transformers DTYPE FOLDER

`write` creates the folder's config.json and random weights. A side answers each line of stdin with a line of JSON:
`prefill` and `step` with wall-clock seconds and seconds of CPU time over all threads, `logits FILE` with null when the
last logits are written, `memory` with peak bytes and bytes of weights and state.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PROMPT_TOKENS = 128
STEPS = 4
"""Decode steps after each prefill."""

_ROWS_AT_ONCE = 4096


@dataclass
class Side:
    """One implementation of a model with one sequence; both calls return the logits of the last token.

    prefill: takes the prompt's token ids. decode: takes a token id and its position. held_bytes: bytes of weights and
    state, None if they are not reported.
    """

    prefill: Callable[[list[int]], np.ndarray]
    decode: Callable[[int, int], np.ndarray]
    vocabulary: int
    held_bytes: int | None = None


def main() -> int:
    """Write a folder, or answer the orders on stdin with one side. Returns 0."""
    action, how, folder = sys.argv[1:]
    if action == "write":
        write(how, Path(folder))
        return 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    for answer in _answers(
        {"replayed": replayed, "transformers": transformers_side}[action](Path(folder), how)
    ):
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _answers(side: Side) -> Iterable[Any]:
    """Yield the answer to each line of stdin."""
    ids = np.random.default_rng(0).integers(3, side.vocabulary, PROMPT_TOKENS + STEPS).tolist()
    prompt, after = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
    done, logits = 0, np.empty(0)
    for line in sys.stdin:
        order, *arguments = line.rstrip("\n").split(" ", 1)
        if order in ("prefill", "step"):
            wall, cpu = time.perf_counter(), time.process_time()
            if order == "prefill":
                done, logits = 0, side.prefill(prompt)
            else:
                logits = side.decode(after[done], PROMPT_TOKENS + done)
                done += 1
            yield time.perf_counter() - wall, time.process_time() - cpu
        elif order == "logits":
            np.save(arguments[0], np.asarray(logits, np.float32))
            yield None
        else:
            yield peak_bytes(), side.held_bytes


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, from /proc.

    That of getrusage includes the parent's before the fork.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def replayed(folder: Path, dtype: str) -> Side:
    """Build the side with this project's model on one simulated trn2 core, set up as `nkw generate` does.

    With bfloat16 it sets NKW_SPEED=torch in this process.
    """
    if dtype == "bfloat16":
        os.environ["NKW_SPEED"] = "torch"
    from model.device import SimulatedDevice
    from model.families import load_config
    from model.loading.checkpoint import open_checkpoint
    from model.loading.weights import shard_weights
    from model.runners.bucket_length import bucket_length
    from model.runners.contiguous import KernelModel

    config = load_config(folder)
    checkpoint = open_checkpoint(folder, config)
    shards = shard_weights(config, checkpoint, 1, after_layer=checkpoint.release, dtype=dtype)
    length = bucket_length(PROMPT_TOKENS + STEPS, config.max_position_embeddings)
    model = KernelModel(config, shards, SimulatedDevice("trn2", 1), length)
    tensors = sum(array.nbytes for array in checkpoint.values())
    state = sum(2 * block.mixer.kv_width * length for block in config.blocks) * shards[0].dtype.itemsize
    return Side(
        lambda prompt: model.prefill([prompt])[0].logits,
        lambda token, position: model.decode([token], [position])[0].logits,
        config.vocab_size,
        tensors + state,
    )


def transformers_side(folder: Path, dtype: str) -> Side:
    """Build the side with Hugging Face transformers on the same folder.

    Attention is "eager" for models with soft caps, because "sdpa", the default, leaves them out.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    capped = json.loads((folder / "config.json").read_text()).get("attn_logit_softcapping") is not None
    attention = "eager" if capped else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    cache: list[Any] = [None]

    def forward(tokens: list[int]) -> np.ndarray:
        out = model(torch.tensor([tokens]), past_key_values=cache[0], use_cache=True, logits_to_keep=1)
        cache[0] = out.past_key_values
        return out.logits[0, -1].float().numpy()  # type: ignore[no-any-return]

    def prefill(prompt: list[int]) -> np.ndarray:
        cache[0] = None
        return forward(prompt)

    return Side(prefill, lambda token, position: forward([token]), model.config.vocab_size)


def write(name: str, folder: Path) -> None:
    """Write the config and random weights of a model in MODELS to a folder.

    Matrices are normal and scaled to keep the scale of activations; vectors are around zero for biases, else around
    one.
    """
    import transformers
    from safetensors.numpy import save_file

    from benchmarks.speed.model_shapes import MODELS
    from model.families import compose, load_config

    shape = MODELS[name]
    config = getattr(transformers, f"{shape.family}Config")(
        **{**shape.common, **shape.fields}, dtype=shape.weights
    )
    heads = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    config.architectures = [heads.get(shape.family, f"{shape.family}ForCausalLM")]
    config.save_pretrained(folder)
    dtype = np.dtype(ml_dtypes.bfloat16 if shape.weights == "bfloat16" else np.float32)
    shapes = compose(load_config(folder)).list_tensor_shapes()
    save_file(
        {name: _tensor(name, shapes[name], dtype) for name in shapes},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def _tensor(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return a random tensor that depends on its name, shape and dtype only."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    if len(shape) == 1:
        center = 0.0 if name.endswith("bias") else 1.0
        return (center + 0.1 * generator.standard_normal(shape, np.float32)).astype(dtype)
    tensor = np.empty(shape, dtype)
    for rows in np.array_split(tensor, -(-shape[0] // _ROWS_AT_ONCE)):
        rows[...] = generator.standard_normal(rows.shape, np.float32) * shape[1] ** -0.5
    return tensor


if __name__ == "__main__":
    sys.exit(main())
