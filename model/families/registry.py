"""Registry of model families: one row for each `model_type` of config.json.

The reader that a row names turns config.json into the record of the family's task. A module with `NAMES` has the layers
of `dense.compose` under these tensor names; a module with `compose(config)` builds its network itself. A row with an
architecture is generated from; the others are planned only.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from model.config import Config, Fields
from model.families import dense
from model.families.names import LLAMA
from model.families.tasks import AUTOENCODER, DENOISER, MASKED_TEXT, SPEECH, TEXT, TEXT_ENCODER, Task
from model.formats import read_cache_scheme, read_format, read_method
from model.network import Network


@dataclass(frozen=True)
class Family:
    """A row of the registry.

    module        module of the family
    reader        function of the module that reads a config from `Fields`
    architecture  architecture in config.json whose checkpoints are run; empty for a family that is planned only
    task          task of the model
    formats       number formats of weights that this family reads in addition to the general ones
    nested        whether the config of the text decoder is an object inside config.json
    """

    module: str
    reader: str
    architecture: str = ""
    task: Task[Any] = TEXT
    formats: tuple[str, ...] = ()
    nested: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("model.families.llama", "read_llama", "LlamaForCausalLM"),
    "mistral": Family("model.families.mistral", "read_mistral", "MistralForCausalLM"),
    "ministral": Family("model.families.mistral", "read_ministral", "MinistralForCausalLM"),
    "ministral3": Family("model.families.mistral", "read_ministral3", "Ministral3ForCausalLM"),
    "mistral3": Family("model.families.mistral", "read_mistral3", nested=True),
    "mixtral": Family("model.families.mixtral", "read_mixtral", "MixtralForCausalLM"),
    "qwen2": Family("model.families.qwen", "read_qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("model.families.qwen", "read_qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": Family("model.families.qwen", "read_qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_next": Family("model.families.qwen3_next", "read_qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5_text": Family("model.families.qwen3_next", "read_qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": Family("model.families.qwen3_next", "read_qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3_5": Family("model.families.qwen3_next", "read_qwen3_5", nested=True),
    "qwen3_5_moe": Family("model.families.qwen3_next", "read_qwen3_5", nested=True),
    "olmo2": Family("model.families.olmo", "read_olmo2", "Olmo2ForCausalLM"),
    "olmoe": Family("model.families.olmoe", "read_olmoe", "OlmoeForCausalLM"),
    "gemma2": Family("model.families.gemma", "read_gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": Family("model.families.gemma", "read_gemma3_text", "Gemma3ForCausalLM"),
    "gemma3": Family("model.families.gemma", "read_gemma3", nested=True),
    "gemma3n_text": Family("model.families.gemma3n", "read_gemma3n_text"),
    "gemma4_text": Family("model.families.gemma4", "read_gemma4_text", "Gemma4ForCausalLM"),
    "gemma4": Family("model.families.gemma4", "read_gemma4", nested=True),
    "phi3": Family("model.families.phi", "read_phi3", "Phi3ForCausalLM"),
    "gpt2": Family("model.families.gpt2", "read_gpt2", "GPT2LMHeadModel"),
    "smollm3": Family("model.families.smollm", "read_smollm3", "SmolLM3ForCausalLM"),
    "granite": Family("model.families.granite", "read_granite", "GraniteForCausalLM"),
    "gpt_oss": Family("model.families.gpt_oss", "read_gpt_oss", "GptOssForCausalLM", formats=("mxfp4",)),
    "deepseek_v2": Family("model.families.deepseek", "read_deepseek_v2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": Family("model.families.deepseek", "read_deepseek_v3", "DeepseekV3ForCausalLM"),
    "kimi_k2": Family("model.families.deepseek", "read_deepseek_v3", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": Family("model.families.deepseek", "read_glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "glm4_moe": Family("model.families.glm", "read_glm4_moe", "Glm4MoeForCausalLM"),
    "afmoe": Family("model.families.afmoe", "read_afmoe", "AfmoeForCausalLM"),
    "solar_open": Family("model.families.glm", "read_solar_open", "SolarOpenForCausalLM"),
    "minimax_m2": Family("model.families.minimax", "read_minimax_m2", "MiniMaxM2ForCausalLM"),
    "mamba": Family("model.families.mamba", "read_mamba", "MambaForCausalLM"),
    "mamba2": Family("model.families.mamba2", "read_mamba2", "Mamba2ForCausalLM"),
    "PixArtTransformer2DModel": Family(
        "model.families.pixart", "read_pixart", "PixArtTransformer2DModel", DENOISER
    ),
    "clip_text_model": Family("model.families.clip", "read_clip_text", "CLIPTextModel", TEXT_ENCODER),
    "clip_text_model_with_projection": Family(
        "model.families.clip", "read_clip_projection", "CLIPTextModelWithProjection", TEXT_ENCODER
    ),
    "t5": Family("model.families.t5", "read_t5", "T5EncoderModel", TEXT_ENCODER),
    "whisper": Family("model.families.whisper", "read_whisper", "WhisperForConditionalGeneration", SPEECH),
    "llada": Family("model.families.llada", "read_llada", "LLaDAModelLM", MASKED_TEXT),
    "AutoencoderKL": Family("model.families.autoencoder", "read_autoencoder", "AutoencoderKL", AUTOENCODER),
    "FluxTransformer2DModel": Family("model.families.flux", "read_flux", "FluxTransformer2DModel", DENOISER),
    "SD3Transformer2DModel": Family("model.families.sd3", "read_sd3", "SD3Transformer2DModel", DENOISER),
    "DiTTransformer2DModel": Family("model.families.dit", "read_dit", "DiTTransformer2DModel", DENOISER),
    "Transformer2DModel": Family("model.families.dit", "read_transformer", "Transformer2DModel", DENOISER),
}


def list_single_step_tasks() -> tuple[Task[Any], ...]:
    """Return, each once, the tasks of the registry's families that name a `runner`: their steps all have one size."""
    return tuple({row.task: None for row in FAMILIES.values() if row.task.runner})


def read(model_type: str, fields: Fields) -> Config:
    """Return the config that the reader of a model type makes of a config.json, with its quantisation.

    `refusals` of the config has a message for each field that describes what no layer computes. An unknown model type
    raises KeyError.

    Raises:
        ModelError: A field is missing, has the wrong type or contradicts another field.
    """
    row = FAMILIES[model_type]
    config: Config = getattr(importlib.import_module(row.module), row.reader)(fields)
    return replace(
        config,
        weight_format=read_format(fields, row.formats) or config.weight_format,
        quant_method=read_method(fields) or config.quant_method,
        cache_scheme=read_cache_scheme(fields),
        model_type=model_type,
        architecture=row.architecture,
        refusals=tuple(fields.refusals),
    )


def compose(config: Config) -> Network:
    """Return the network of a model by its family's module: its `compose`, or `dense.compose` with its `NAMES`."""
    module = importlib.import_module(FAMILIES[config.model_type].module)
    default: Any = partial(dense.compose, names=getattr(module, "NAMES", LLAMA))
    network: Network = getattr(module, "compose", default)(config)
    return network
