"""A Llama of Llama-3.2-1B's shape with random bfloat16 weights: prefill, a decode step and memory.

    python -m benchmarks.speed.large_model                    this model and Hugging Face transformers
    python -m benchmarks.speed.large_model --only replayed    one: replayed, replayed-bfloat16, transformers-float32
                                                              or transformers-bfloat16

`replayed` has float32 activations; `replayed-bfloat16` has bfloat16 ones, with torch multiplying (NKW_SPEED=torch).

Each subject has a process of its own, which makes the same weights and takes one prompt of 128 tokens as warm-up (the
simulator checks and records its launches then). It reports the median of several more prompts, the median of the decode
steps after them, and its peak memory. On a machine with other work, CPU time of one thread (OMP_NUM_THREADS=1
OPENBLAS_NUM_THREADS=1) says most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PROMPT_TOKENS = 128
STEPS = 4
RUNS = 3
SUBJECTS = ("replayed", "replayed-bfloat16", "transformers-float32", "transformers-bfloat16")

CONFIG: dict[str, Any] = {  # the published config.json of Llama-3.2-1B, but for what does not change its work
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


class RandomWeights(Mapping[str, np.ndarray]):
    """Every tensor of a model, made of its name when it is asked for: normal, of a scale that keeps activations'."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, ml_dtypes.bfloat16)
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        tensor = np.empty(shape, ml_dtypes.bfloat16)
        for rows in np.array_split(tensor, -(-shape[0] // 4096)):
            rows[...] = generator.standard_normal(rows.shape, np.float32) * shape[1] ** -0.5
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def main() -> int:
    """Run what --only names, or each subject in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=SUBJECTS)
    parser.add_argument(
        "--layers", type=int, default=CONFIG["num_hidden_layers"], help="fewer, for a quick look"
    )
    options = parser.parse_args()
    config = {**CONFIG, "num_hidden_layers": options.layers}
    if options.only:
        print(json.dumps(_measure(options.only, config)))
        return 0
    print("| subject | prefill of 128 | CPU time | a decode step | CPU time | peak memory |")
    print("|---|---:|---:|---:|---:|---:|")
    for subject in SUBJECTS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.speed.large_model",
            "--only",
            subject,
            "--layers",
            str(options.layers),
        ]
        done = json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        )
        memory = f"{done['peak_bytes'] / 2**30:.2f} GiB"
        if "floor_bytes" in done:
            memory += f", weights and cache {done['floor_bytes'] / 2**30:.2f}"
        keys = ("prefill_ms", "prefill_cpu_ms", "step_ms", "step_cpu_ms")
        print(
            f"| {subject} | " + " | ".join(f"{done[key]:.0f} ms" for key in keys) + f" | {memory} |",
            flush=True,
        )
    return 0


def _measure(subject: str, config: dict[str, Any]) -> dict[str, float]:
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], PROMPT_TOKENS).tolist()
    floor: dict[str, float] = {}
    library, _, dtype = subject.partition("-")
    if library == "replayed":
        prefill, decode, floor["floor_bytes"] = _ours(config, dtype or "float32")
    else:
        prefill, decode = _transformers(config, dtype)
    first: list[tuple[float, float]] = []
    steps: list[tuple[float, float]] = []
    for run in range(RUNS + 1):
        first.append(_timed(prefill, ids))
        for step in range(STEPS):
            steps.append(_timed(decode, 1000 + step, PROMPT_TOKENS + step))
        wall = f"prefill {first[-1][0]:.2f} s, step {steps[-1][0]:.2f} s"
        print(f"{subject}: run {run}: {wall}", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    prefill_ms, prefill_cpu_ms = _medians_ms(first[1:])
    step_ms, step_cpu_ms = _medians_ms(steps[STEPS:])
    return {
        "prefill_ms": prefill_ms,
        "prefill_cpu_ms": prefill_cpu_ms,
        "step_ms": step_ms,
        "step_cpu_ms": step_cpu_ms,
        "first_prefill_ms": first[0][0] * 1e3,
        "peak_bytes": peak,
        **floor,
    }


def _timed(work: Callable[..., object], *given: Any) -> tuple[float, float]:
    """Seconds by the clock, and of CPU time over all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work(*given)
    return time.perf_counter() - wall, time.process_time() - cpu


def _medians_ms(taken: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*taken)
    return statistics.median(wall) * 1e3, statistics.median(cpu) * 1e3


Prefill = Callable[[list[int]], object]
Decode = Callable[[int, int], object]


def _ours(config: dict[str, Any], dtype: str) -> tuple[Prefill, Decode, float]:
    if dtype == "bfloat16":
        os.environ["NKW_SPEED"] = "torch"
    from model.cache import bucket_length
    from model.device import SimulatedDevice
    from model.families import load_config
    from model.kernel_model import KernelModel
    from model.weights import shard_weights, tensor_shapes

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        loaded = load_config(folder)
    shapes = tensor_shapes(loaded)
    length = bucket_length(PROMPT_TOKENS + STEPS, loaded.max_position_embeddings)
    shards = shard_weights(loaded, RandomWeights(shapes), 1, dtype=dtype)
    model = KernelModel(loaded, shards, SimulatedDevice("trn2", 1), length)
    weights = sum(int(np.prod(shape)) for shape in shapes.values()) * 2
    positions = sum(2 * block.mixer.kv_width * length for block in loaded.blocks)
    cache = positions * shards[0].dtype.itemsize
    return model.prefill, model.decode, float(weights + cache)


def _transformers(config: dict[str, Any], dtype: str) -> tuple[Prefill, Decode]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_grad_enabled(False)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model = model.to_empty(device="cpu").to(getattr(torch, dtype))
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    weights = RandomWeights(shapes)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(weights[name].astype(np.float32)))
    rotary = type(model.model.rotary_emb)(model.config)
    model.model.rotary_emb = rotary
    model.eval()
    held: list[Any] = [None]

    def prefill(ids: list[int]) -> object:
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        held[0] = out.past_key_values
        return out.logits

    def decode(token: int, position: int) -> object:
        out = model(torch.tensor([[token]]), past_key_values=held[0], use_cache=True)
        return out.logits

    return prefill, decode


if __name__ == "__main__":
    sys.exit(main())
