"""The registry of model families: one row for each `model_type` of config.json.

A family's module reads config.json into the record of its task, in a function named by the row. Where layers
compute all of these parts, `compose(config)` of the module puts the layers together and names the checkpoint's tensors.
A row with an architecture is generated from; the others are planned only.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from model.config import Config, Fields
from model.families.tasks import SPEECH, TEXT, Task
from model.formats import read_format, read_method
from model.network import Network


@dataclass(frozen=True)
class Family:
    """A module, the function in it that reads a config, and the architecture whose checkpoints are run, for a task.

    formats are number formats of weights that the family reads beside the general ones.
    """

    module: str
    reader: str
    architecture: str = ""
    task: Task[Any] = TEXT
    formats: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "llama": Family("model.families.llama", "llama", "LlamaForCausalLM"),
    "mistral": Family("model.families.mistral", "mistral", "MistralForCausalLM"),
    "ministral": Family("model.families.mistral", "ministral", "MinistralForCausalLM"),
    "mixtral": Family("model.families.mixtral", "mixtral", "MixtralForCausalLM"),
    "qwen2": Family("model.families.qwen", "qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("model.families.qwen", "qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": Family("model.families.qwen", "qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_next": Family("model.families.qwen3_next", "qwen3_next", "Qwen3NextForCausalLM"),
    "olmo2": Family("model.families.olmo", "olmo2", "Olmo2ForCausalLM"),
    "olmoe": Family("model.families.olmoe", "olmoe", "OlmoeForCausalLM"),
    "gemma2": Family("model.families.gemma", "gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": Family("model.families.gemma", "gemma3_text", "Gemma3ForCausalLM"),
    "gemma3": Family("model.families.gemma", "gemma3"),
    "gemma3n_text": Family("model.families.gemma3n", "gemma3n_text"),
    "gemma4_text": Family("model.families.gemma4", "gemma4_text", "Gemma4ForCausalLM"),
    "gemma4": Family("model.families.gemma4", "gemma4"),
    "phi3": Family("model.families.phi", "phi3", "Phi3ForCausalLM"),
    "gpt2": Family("model.families.gpt2", "gpt2", "GPT2LMHeadModel"),
    "smollm3": Family("model.families.smollm", "smollm3", "SmolLM3ForCausalLM"),
    "granite": Family("model.families.granite", "granite", "GraniteForCausalLM"),
    "gpt_oss": Family("model.families.gpt_oss", "gpt_oss", "GptOssForCausalLM", formats=("mxfp4",)),
    "deepseek_v2": Family("model.families.deepseek", "deepseek_v2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": Family("model.families.deepseek", "deepseek_v3", "DeepseekV3ForCausalLM"),
    "mamba": Family("model.families.mamba", "mamba", "MambaForCausalLM"),
    "mamba2": Family("model.families.mamba2", "mamba2", "Mamba2ForCausalLM"),
    "whisper": Family("model.families.whisper", "whisper", "WhisperForConditionalGeneration", SPEECH),
}


def single_step_tasks() -> tuple[Task[Any], ...]:
    """Return the tasks whose every step has one size."""
    return tuple({row.task: None for row in FAMILIES.values() if row.task.runner})


def read(model_type: str, fields: Fields) -> Config:
    """The config of a row's model type; what no layer computes is noted in its `refusals`."""
    config: Config = getattr(_module(model_type), FAMILIES[model_type].reader)(fields)
    return replace(
        config,
        weight_format=read_format(fields, FAMILIES[model_type].formats) or config.weight_format,
        quant_method=read_method(fields) or config.quant_method,
        model_type=model_type,
        architecture=FAMILIES[model_type].architecture,
        refusals=tuple(fields.refusals),
    )


def compose(config: Config) -> Network:
    """The layers of a model whose parts are all computed."""
    network: Network = _module(config.model_type).compose(config)
    return network


def _module(model_type: str) -> ModuleType:
    return importlib.import_module(FAMILIES[model_type].module)
