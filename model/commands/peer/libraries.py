"""The vendor's own inference libraries, each behind `generate` of Hugging Face. Neither file has run on a chip.

transformers-neuronx 0.13 (SDK 2.21 to 2.25; ended in September 2025), for Trn1 and Inf2:
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.21.0/libraries/transformers-neuronx/transformers-neuronx-developer-guide.html
neuronx-distributed-inference 0.3 and later (SDK 2.23 on), whose Llama is taken here:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/feature-guide.html
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from model.commands.options.device import LIBRARIES
from model.commands.peer.comparison import GreedyRun
from model.device.neuron import installed_version
from model.errors import ModelError

LEGACY, NXD = LIBRARIES


class Library(Protocol):
    """A loaded model of one library."""

    def generate(self, ids: Sequence[int], new_tokens: int) -> GreedyRun:
        """The likeliest tokens after a prompt."""


def check_installed(name: str) -> str:
    """The version of a library. ModelError where it is not installed, or only a placeholder of its name is."""
    version = installed_version(name)
    if version is None:
        how = "pip install 'nki-workbench[legacy]'" if name == LEGACY else f"pip install {name}"
        raise ModelError(
            f"{name} is not installed here: on a Trainium or Inferentia instance run {how} with AWS Neuron's package "
            "repository configured"
        )
    return version


def load(name: str, folder: Path, tp: int, dtype: str, positions: int, work: Path) -> Library:
    """Load a folder with a library, compiled for one sequence of so many positions; `work` takes what it compiles.

    ModelError for a library that is not installed, and for an architecture that it is not called for here.
    """
    check_installed(name)
    loaded = _legacy if name == LEGACY else _nxd
    return HuggingFaceGeneration(loaded(folder, tp, dtype, positions, work))


class HuggingFaceGeneration:
    """A model with `generate` of Hugging Face: greedy, with the scores of each token."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, ids: Sequence[int], new_tokens: int) -> GreedyRun:
        """The likeliest tokens after a prompt. The seconds are those of the second of two equal calls."""
        import torch

        given = torch.tensor([list(ids)])
        seconds, found = 0.0, None
        for _ in range(2):
            began = time.perf_counter()
            found = self._model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_length=len(ids) + new_tokens,
                return_dict_in_generate=True,
                output_scores=True,
            )
            seconds = time.perf_counter() - began
        assert found is not None
        tokens = tuple(int(each) for each in found.sequences[0, len(ids) :])
        logits = tuple(np.asarray(each[0].float().cpu(), np.float32) for each in found.scores)
        return GreedyRun(tokens, logits, seconds)


def _legacy(folder: Path, tp: int, dtype: str, positions: int, work: Path) -> Any:
    """A model of transformers-neuronx, on the cores."""
    library = importlib.import_module("transformers_neuronx")
    config = importlib.import_module("transformers").AutoConfig.from_pretrained(str(folder))
    amp = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    model = library.NeuronAutoModelForCausalLM.from_pretrained(
        str(folder), batch_size=1, n_positions=positions, tp_degree=tp, amp=amp
    )
    model.to_neuron()
    return library.HuggingFaceGenerationModelAdapter(config, model)


def _nxd(folder: Path, tp: int, dtype: str, positions: int, work: Path) -> Any:
    """A Llama of NxD Inference, compiled into a folder and loaded from there."""
    architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise ModelError(f"{NXD} is called for LlamaForCausalLM here, not for {architectures}")
    import torch

    configs = importlib.import_module("neuronx_distributed_inference.models.config")
    llama = importlib.import_module("neuronx_distributed_inference.models.llama.modeling_llama")
    adapter = importlib.import_module("neuronx_distributed_inference.utils.hf_adapter")
    neuron = configs.NeuronConfig(
        batch_size=1, tp_degree=tp, seq_len=positions, torch_dtype=getattr(torch, dtype)
    )
    config = llama.LlamaInferenceConfig(neuron, load_config=adapter.load_pretrained_config(str(folder)))
    llama.NeuronLlamaForCausalLM(str(folder), config).compile(str(work))
    model = llama.NeuronLlamaForCausalLM(str(work))
    model.load(str(work))
    return adapter.HuggingFaceGenerationAdapter(model)
