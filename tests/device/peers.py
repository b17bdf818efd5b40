"""The vendor's inference libraries with the names and orders of calls of their pages; transformers computes.

v2.21.0/libraries/transformers-neuronx/transformers-neuronx-developer-guide.html and
latest/libraries/nxd-inference/developer_guides/feature-guide.html, below https://awsdocs-neuron.readthedocs-hosted.com/en/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.core import DocumentedModule, NotDocumented

LEGACY_GUIDE = "transformers-neuronx-developer-guide.html"
NXD_GUIDE = "nxd-inference/developer_guides/feature-guide.html"


class Adapter:
    """`generate` of Hugging Face on a model of a library, which has to be on the cores."""

    change = 0.0

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, **arguments: Any) -> Any:
        """Return the greedy continuation by transformers; `change` is added to a weight."""
        if not self._model.on_cores:
            raise NotDocumented("generate before the model is on the cores")
        if arguments["input_ids"].shape[0] != 1 or arguments["max_length"] > self._model.positions:
            raise NotDocumented("another batch or more positions than were compiled")
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(self._model.folder, dtype=torch.float32)
        with torch.no_grad():
            model.lm_head.weight[7] += self.change
            return model.generate(**arguments, pad_token_id=0)


class LegacyModel:
    """A model of transformers-neuronx."""

    def __init__(self, folder: str, positions: int) -> None:
        self.folder, self.positions, self.on_cores = folder, positions, False

    @classmethod
    def from_pretrained(
        cls, folder: str, *, batch_size: int, n_positions: int, tp_degree: int, amp: str
    ) -> LegacyModel:
        """Create a model, as `NeuronAutoModelForCausalLM.from_pretrained` does."""
        if amp not in ("f32", "bf16", "f16") or tp_degree not in (1, 2, 4, 8, 24, 32):
            raise NotDocumented(f"amp {amp!r}, tp_degree {tp_degree}")
        return cls(folder, n_positions)

    def to_neuron(self) -> None:
        """Compile and load."""
        self.on_cores = True


class LegacyAdapter(Adapter):
    """`HuggingFaceGenerationModelAdapter(config, model)`."""

    def __init__(self, config: Any, model: LegacyModel) -> None:
        super().__init__(model)


class NeuronConfig:
    """`NeuronConfig` of NxD Inference, of its attributes those that are used here."""

    def __init__(self, *, batch_size: int, tp_degree: int, seq_len: int, torch_dtype: torch.dtype) -> None:
        assert isinstance(torch_dtype, torch.dtype)
        self.seq_len = seq_len


COMPILED: dict[str, tuple[str, int]] = {}
"""Folders of compiled models, with the folder of the weights and the positions."""


class NxdModel:
    """`NeuronLlamaForCausalLM(path, config=None)`: compiled into a folder, then made and loaded from there."""

    def __init__(self, path: str, config: Any = None) -> None:
        self._path, self._config, self.on_cores = path, config, False

    def compile(self, folder: str) -> None:
        """Compile into a folder."""
        if self._config is None:
            raise NotDocumented("compile without a configuration")
        COMPILED[folder] = self._path, self._config.seq_len

    def load(self, folder: str) -> None:
        """Load what was compiled."""
        if self._path != folder or folder not in COMPILED:
            raise NotDocumented("load before compile, or of another folder")
        (self.folder, self.positions), self.on_cores = COMPILED[folder], True


def llama_config(neuron: NeuronConfig, *, load_config: Any) -> NeuronConfig:
    """Return a `LlamaInferenceConfig(neuron_config, load_config=…)`."""
    load_config()
    return neuron


def load_pretrained_config(path: str) -> Any:
    """Return a function that reads a folder's configuration."""
    return lambda: Path(path, "config.json").read_text()


def installed(patch: pytest.MonkeyPatch) -> None:
    """Let this process find both libraries."""
    root = "neuronx_distributed_inference"
    names: dict[str, dict[str, Any]] = {
        "transformers_neuronx": dict(
            NeuronAutoModelForCausalLM=LegacyModel, HuggingFaceGenerationModelAdapter=LegacyAdapter
        ),
        root: {},
        f"{root}.models": {},
        f"{root}.models.config": dict(NeuronConfig=NeuronConfig),
        f"{root}.models.llama": {},
        f"{root}.models.llama.modeling_llama": dict(
            LlamaInferenceConfig=llama_config, NeuronLlamaForCausalLM=NxdModel
        ),
        f"{root}.utils": {},
        f"{root}.utils.hf_adapter": dict(
            load_pretrained_config=load_pretrained_config, HuggingFaceGenerationAdapter=Adapter
        ),
    }
    for name, documented in names.items():
        page = LEGACY_GUIDE if name == "transformers_neuronx" else NXD_GUIDE
        patch.setitem(sys.modules, name, DocumentedModule(name, page, **documented))
