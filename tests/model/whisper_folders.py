"""Tiny Whispers with random weights: of transformers, hearing one spectrum, and as folders with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from model.families import SPEECH, compose, load_config
from tests.model.folders import byte_tokenizer

FIELDS: dict[str, Any] = dict(
    vocab_size=300,
    d_model=36,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=50,
    decoder_ffn_dim=44,
    num_mel_bins=10,
    max_source_positions=20,
    max_target_positions=40,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
)
GENERATION: dict[str, Any] = dict(
    eos_token_id=2,
    decoder_start_token_id=3,
    forced_decoder_ids=[[1, None], [2, 7]],
    lang_to_id={"<|en|>": 5, "<|de|>": 6},
    task_to_id={"transcribe": 7, "translate": 8},
    no_timestamps_token_id=9,
    suppress_tokens=list(range(3, 30)),
    begin_suppress_tokens=[2, 40],
)


def spectrum(seed: int, bands: int = FIELDS["num_mel_bins"]) -> np.ndarray:
    """Return a random log-mel spectrum of a window."""
    columns = 2 * FIELDS["max_source_positions"]
    return np.random.default_rng(seed).standard_normal((bands, columns)).astype(np.float32)


def listening(features: np.ndarray, seed: int = 5, **changes: Any) -> Any:
    """Return a model of transformers whose decoder is called with ids alone, and hears `features`."""
    import torch
    import transformers

    class WhisperForConditionalGeneration(transformers.WhisperForConditionalGeneration):  # type: ignore[misc]
        def forward(self, ids: Any) -> Any:
            heard = torch.from_numpy(features)[None].to(self.proj_out.weight.dtype)
            return super().forward(input_features=heard, decoder_input_ids=ids, use_cache=False)

    config = transformers.WhisperConfig(**FIELDS | changes, attn_implementation="eager")
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            center = float(parameter.mean()) if parameter.ndim == 1 else 0.0
            spread = 1.5 / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.5
            parameter.copy_(center + spread * torch.randn(parameter.shape))
    return model


def write_whisper(
    folder: Path, seed: int = 0, generation: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Write a folder that `nkw transcribe` takes."""
    folder.mkdir()
    named = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(FIELDS | named | changes))
    (folder / "generation_config.json").write_text(
        json.dumps(GENERATION if generation is None else generation)
    )
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    generator = np.random.default_rng(seed)
    weights = {
        name: (generator.standard_normal(shape) * 1.5 / max(shape[-1], 1) ** 0.5).astype(np.float32)
        for name, shape in compose(load_config(folder, SPEECH)).list_tensor_shapes().items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder
