"""Inference libraries of the vendor, called through `generate` of Hugging Face. They have not run on a chip here yet.

transformers-neuronx 0.13 (SDK 2.21 to 2.25; support ended in September 2025), for Trn1 and Inf2:
https://awsdocs-neuron.readthedocs-hosted.com/en/v2.21.0/libraries/transformers-neuronx/transformers-neuronx-developer-guide.html

neuronx-distributed-inference 0.3 and later (SDK 2.23 and later), of which this module uses Llama:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/feature-guide.html
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.commands.options.device import LIBRARIES
from model.commands.peer.comparison import GreedyRun
from model.device.neuron import installed_version
from model.errors import ModelError

LEGACY, NXD = LIBRARIES


def check_installed(name: str) -> str:
    """Return the version of an installed library.

    Raises:
        ModelError: Only a placeholder package, or none, is installed.
    """
    version = installed_version(name)
    if version is None:
        how = "pip install 'nki-workbench[legacy]'" if name == LEGACY else f"pip install {name}"
        raise ModelError(
            f"{name} is not installed here: on a Trainium or Inferentia instance run {how} with AWS Neuron's package "
            "repository configured"
        )
    return version


def load(name: str, folder: Path, tp: int, dtype: str, positions: int, work: Path) -> HuggingFaceGeneration:
    """Load a model folder with a library, and compile the model for a sequence of `positions` positions.

    Args:
        name: Name of the library, one of LIBRARIES.
        folder: The model's folder.
        tp: Number of tensor-parallel ranks.
        dtype: float32 or bfloat16.
        positions: Most positions of a sequence.
        work: Folder for compiled files.

    Raises:
        ModelError: The architecture is not supported.
    """
    load_model = _load_legacy if name == LEGACY else _load_nxd
    return HuggingFaceGeneration(load_model(folder, tp, dtype, positions, work))


class HuggingFaceGeneration:
    """Model of a library whose `generate` of Hugging Face is called greedily, with the logits of each token."""

    def __init__(self, model: Any) -> None:
        """Take a loaded model of a library."""
        self._model = model

    def generate(self, ids: Sequence[int], new_tokens: int) -> GreedyRun:
        """Generate `new_tokens` tokens after a prompt twice, and return the run with the seconds of the second call.

        The first call may compile.
        """
        import torch

        input_ids = torch.tensor([list(ids)])
        for _ in range(2):
            began = time.perf_counter()
            output = self._model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_length=len(ids) + new_tokens,
                return_dict_in_generate=True,
                output_scores=True,
            )
            seconds = time.perf_counter() - began
        tokens = tuple(map(int, output.sequences[0, len(ids) :]))
        logits = tuple(np.asarray(scores[0].float().cpu(), np.float32) for scores in output.scores)
        return GreedyRun(tokens, logits, seconds)


def _load_legacy(folder: Path, tp: int, dtype: str, positions: int, work: Path) -> Any:
    """Return a model of transformers-neuronx on the cores, with Hugging Face's `generate`; `work` is not used."""
    library = importlib.import_module("transformers_neuronx")
    config = importlib.import_module("transformers").AutoConfig.from_pretrained(str(folder))
    amp = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    model = library.NeuronAutoModelForCausalLM.from_pretrained(
        str(folder), batch_size=1, n_positions=positions, tp_degree=tp, amp=amp
    )
    model.to_neuron()
    return library.HuggingFaceGenerationModelAdapter(config, model)


def _load_nxd(folder: Path, tp: int, dtype: str, positions: int, work: Path) -> Any:
    """Compile a Llama of NxD Inference into the folder `work`, load it, and return it with Hugging Face's `generate`.

    Raises:
        ModelError: The architecture in config.json is another one.
    """
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
