"""Images that pipelines of diffusers make with random weights, stored for tests.

`python -m tests.model.pipeline_oracles` writes `pipeline_oracles.npz` and `pipeline_sizes.npz` with diffusers 0.42.1.
Tests read these files where diffusers is not installed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from model.loading.text_tokenizers import open_text_tokenizer
from tests.model.denoiser_oracles import PIXART, draw_weight
from tests.model.text_encoder_oracles import STORED as STORED_PIECES
from tests.model.text_encoder_oracles import T5_TOKENIZERS, list_t5_shapes

STORED = Path(__file__).with_suffix(".npz")
TOKENIZER = Path(__file__).with_name("captions_tokenizer")
"""CLIP tokenizer of captions of coloured shapes, which `tools.train.shapes` writes."""
STORED_SIZES = STORED.with_stem("pipeline_sizes")
CLIP = {
    "architectures": ["CLIPTextModel"],
    "model_type": "clip_text_model",
    "bos_token_id": 125,
    "eos_token_id": 126,
    "pad_token_id": 126,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 127,
}
T5: dict[str, Any] = {
    "architectures": ["T5EncoderModel"],
    "model_type": "t5",
    "d_ff": 48,
    "d_kv": 16,
    "d_model": 32,
    "dense_act_fn": "gelu_new",
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-6,
    "num_heads": 2,
    "num_layers": 1,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
PIECES = T5_TOKENIZERS["t5 with few sentinels"]
AUTOENCODER: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 16,
    "scaling_factor": 0.5,
    "mid_block_add_attention": False,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
SOLVER = {"_class_name": "DPMSolverMultistepScheduler", "beta_schedule": "linear", "solver_order": 2}
PROMPTS = ("a red circle above a blue square", "a green cross")
NEGATIVE_PROMPT = "a black square"
CAPITALS = (" \tA RED Circle  above THE square\n", "A small TRIANGLE")
LATENT_SHAPE = (4, 8, 8)


@dataclass(frozen=True)
class Case:
    """Pipeline, its components' configs, and what it is asked for; texts are padded to `text_rows` tokens."""

    scheduler: dict[str, Any]
    steps: int = 3
    guidance: float = 3.0
    class_name: str = "PixArtAlphaPipeline"
    text_encoder: dict[str, Any] = field(default_factory=lambda: CLIP)
    transformer: dict[str, Any] = field(default_factory=lambda: PIXART)
    autoencoder: dict[str, Any] = field(default_factory=lambda: AUTOENCODER)
    prompts: tuple[str, str] = PROMPTS
    text_rows: int = 16

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """config.json of the components by name."""
        return {
            "text_encoder": self.text_encoder,
            "transformer": {"_class_name": "PixArtTransformer2DModel"} | self.transformer,
            "vae": self.autoencoder,
        }

    @property
    def has_t5(self) -> bool:
        """Whether the text encoder is a T5."""
        return self.text_encoder is T5


CASES = {
    "flow": Case(FLOW),
    "solver": Case(SOLVER),
    "unguided": Case(FLOW, guidance=1.0),
    "t5": Case(SOLVER, steps=2, text_encoder=T5, prompts=CAPITALS, text_rows=120),
    "sigma": Case(
        SOLVER,
        steps=2,
        class_name="PixArtSigmaPipeline",
        text_encoder=T5,
        autoencoder=AUTOENCODER | {"scaling_factor": 0.13025},
        prompts=CAPITALS,
        text_rows=300,
    ),
    "size of images": Case(
        SOLVER,
        steps=2,
        transformer=PIXART
        | {
            "attention_head_dim": 24,
            "cross_attention_dim": 48,
            "num_layers": 1,
            "sample_size": 128,
            "interpolation_scale": 2,
            "use_additional_conditions": True,
        },
    ),
}


def draw_noise(shape: tuple[int, int, int] = LATENT_SHAPE) -> np.ndarray:
    """Return the noise that images begin with, float32 [prompts, channels, rows, columns], for latents of a shape."""
    return np.random.default_rng(5).standard_normal((len(PROMPTS), *shape), np.float32)


def write_pipeline(folder: Path, case: Case, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Path:
    """Write a folder of a PixArt pipeline with random weights, and return it.

    Args:
        folder: The folder.
        case: Configs of its components.
        shapes: Shapes of the tensors of `text_encoder`, `transformer` and `vae` by name.
    """
    encoder = "T5" if case.has_t5 else "CLIP"
    index = {
        "_class_name": case.class_name,
        "_diffusers_version": "0.42.1",
        "scheduler": ["diffusers", case.scheduler["_class_name"]],
        "text_encoder": ["transformers", case.text_encoder["architectures"][0]],
        "tokenizer": ["transformers", f"{encoder}Tokenizer"],
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name, config in case.configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        stem = "model" if name == "text_encoder" else "diffusion_pytorch_model"
        weights = {tensor: draw_weight(tensor, shape) for tensor, shape in shapes[name].items()}
        safetensors.numpy.save_file(weights, folder / name / f"{stem}.safetensors", {"format": "pt"})
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(case.scheduler))
    (folder / "model_index.json").write_text(json.dumps(index))
    if case.has_t5:
        PIECES.write(folder / "tokenizer", bytes(np.load(STORED_PIECES)[PIECES.key]))
    else:
        shutil.copytree(TOKENIZER, folder / "tokenizer", dirs_exist_ok=True)
    return folder


def list_shapes(case: Case) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of all tensors of the components as diffusers and transformers have them."""
    from diffusers import AutoencoderKL, PixArtTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel

    modules = {
        "transformer": PixArtTransformer2DModel.from_config(case.transformer),
        "vae": AutoencoderKL.from_config(case.autoencoder),
    }
    if not case.has_t5:
        modules["text_encoder"] = CLIPTextModel(CLIPTextConfig(**case.text_encoder))
    shapes = {
        name: {tensor: tuple(parameter.shape) for tensor, parameter in module.named_parameters()}
        for name, module in modules.items()
    }
    if case.has_t5:
        return shapes | {"text_encoder": list_t5_shapes(case.text_encoder)}
    # transformers 5 leaves the prefix out in memory and writes it to files.
    prefix = "text_model."
    shapes["text_encoder"] = {
        prefix + name.removeprefix(prefix): shape for name, shape in shapes["text_encoder"].items()
    }
    return shapes


class PiecesTokenizer:
    """Our T5 tokenizer with the interface that diffusers calls; transformers' one needs the package sentencepiece.

    `tests/model/test_t5_tokenizer.py` compares its ids with those of transformers.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        self._tokenizer, self._rows = open_text_tokenizer(folder, "T5Tokenizer", T5["vocab_size"], rows), rows

    def tokenize(self, text: str) -> list[str]:
        """Return no tokens: diffusers asks which of them stand for learned embeddings of several tokens."""
        return []

    def __call__(self, texts: list[str], padding: str, max_length: int | None = None, **options: Any) -> Any:
        """Return ids and mask of texts; those that diffusers asks for to warn of truncation are padded alike."""
        import torch
        from transformers import BatchEncoding

        assert max_length in (None, self._rows)
        ids, lengths = (torch.from_numpy(array).long() for array in self._tokenizer.encode(texts))
        return BatchEncoding(
            {"input_ids": ids, "attention_mask": (torch.arange(self._rows) < lengths).long()}
        )


def record(case: Case, folder: Path) -> np.ndarray:
    """Return the images that diffusers makes of a folder, uint8 [prompts, rows, columns, 3]."""
    import diffusers
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler

    # PixArt's pipeline asks a scheduler for these two, which that of flows lacks.
    FlowMatchEulerDiscreteScheduler.init_noise_sigma = 1.0
    FlowMatchEulerDiscreteScheduler.scale_model_input = lambda self, sample, timestep: sample
    replaced = {"tokenizer": None} if case.has_t5 else {}
    pipeline = getattr(diffusers, case.class_name).from_pretrained(
        folder, torch_dtype=torch.float32, **replaced
    )
    if case.has_t5:
        pipeline.tokenizer = PiecesTokenizer(folder / "tokenizer", case.text_rows)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        list(case.prompts),
        negative_prompt=[NEGATIVE_PROMPT] * len(case.prompts),
        num_inference_steps=case.steps,
        guidance_scale=case.guidance,
        latents=torch.from_numpy(draw_noise()),
        height=2 * LATENT_SHAPE[1],
        width=2 * LATENT_SHAPE[2],
        max_sequence_length=case.text_rows,
        use_resolution_binning=False,
        clean_caption=False,
        output_type="np",
    )
    return (made.images * 255).round().astype(np.uint8)


def record_sizes(side: int) -> np.ndarray:
    """Return the sizes of images that diffusers has for a model of squares, int32 [sizes, rows and columns]."""
    from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha

    return np.array(list(getattr(pipeline_pixart_alpha, f"ASPECT_RATIO_{side}_BIN").values()), np.int32)


def read_recordings(path: Path = STORED) -> dict[str, np.ndarray]:
    """Return the stored images by name of the case, or the arrays of another file."""
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


if __name__ == "__main__":
    recordings = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            recordings[name] = record(case, write_pipeline(Path(folder), case, list_shapes(case)))
    np.savez_compressed(STORED, **recordings)
    np.savez_compressed(STORED_SIZES, **{str(side): record_sizes(side) for side in (256, 512, 1024)})
