"""The folder of the masked-diffusion model: LLaDA's config and tensor names, the tokenizer of `stories` and a mask."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from tools.train.decoder import Decoder, Sizes

STORIES = Path(__file__).resolve().parents[3] / "model" / "pretrained"
"""Folder of the model that decodes token by token, whose sizes and tokenizer this model has."""
MASK = "<|mask|>"
_NAMES = {
    "embed_tokens.": "model.transformer.wte.",
    "norm.weight": "model.transformer.ln_f.weight",
    "layers.": "model.transformer.blocks.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
"""Names of tensors in a LLaDA, by beginnings and parts of those of `Decoder`."""


def create_folder(folder: Path) -> None:
    """Write config.json and the tokenizer with the mask as its last token; files that exist stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(STORIES / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(MASK, special=True, normalized=False)])
        tokenizer.save(str(folder / "tokenizer.json"))
        shutil.copyfile(STORIES / "tokenizer_config.json", folder / "tokenizer_config.json")
    if (folder / "config.json").exists():
        return
    sizes = Sizes.read(STORIES)
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "bos_token_id": 0,
        "d_model": sizes.width,
        "embedding_size": sizes.vocabulary + 1,
        "eos_token_id": 0,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": sizes.vocabulary,
        "max_sequence_length": 256,
        "mlp_hidden_size": sizes.hidden,
        "n_heads": sizes.heads,
        "n_kv_heads": sizes.kv_heads,
        "n_layers": sizes.layers,
        "pad_token_id": 0,
        "rms_norm_eps": sizes.eps,
        "rope": True,
        "rope_theta": sizes.theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "vocab_size": sizes.vocabulary + 1,
        "weight_tying": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_mask(folder: Path) -> int:
    """Return the id of the mask."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["mask_token_id"])


def read_sizes(folder: Path) -> Sizes:
    """Return the sizes in a folder's config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Sizes(
        config["d_model"],
        config["mlp_hidden_size"],
        config["d_model"] // config["n_heads"],
        *(config[name] for name in ("n_heads", "n_kv_heads", "n_layers", "vocab_size")),
        config["rms_norm_eps"],
        config["rope_theta"],
        causal=False,
    )


def _name_in_llada(name: str) -> str:
    """Return the name in a LLaDA of a parameter of `Decoder`."""
    for before, after in _NAMES.items():
        if name.startswith(before) or not before.startswith(("embed", "norm", "layers")):
            name = name.replace(before, after)
    return name


def save_weights(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write model.safetensors in bfloat16; the file is replaced at once."""
    weights = {_name_in_llada(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    temporary = folder / "model.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, folder / "model.safetensors")


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load a folder's weights into a model, in float32."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weights[_name_in_llada(name)].float() for name in model.state_dict()})


def start_from_stories(model: Decoder) -> None:
    """Load the weights of `stories` into a model; the mask's row of the embedding is the mean of the others."""
    weights = {
        name.removeprefix("model."): tensor.float()
        for name, tensor in load_file(STORIES / "model.safetensors").items()
    }
    table = weights["embed_tokens.weight"]
    weights["embed_tokens.weight"] = torch.cat([table, table.mean(dim=0, keepdim=True)])
    model.load_state_dict(weights)
