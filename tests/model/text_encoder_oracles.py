"""Tiny text encoders and tokenizers, and what transformers makes of their texts, stored for tests.

`python -m tests.model.text_encoder_oracles` writes `text_encoder_oracles.npz` with transformers 5.20.2, sentencepiece
0.2.3 and protobuf. Tests read this file where they are not installed.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

STORED = Path(__file__).with_suffix(".npz")
BATCHES = 8
"""Batches of texts whose errors in transformers give the bounds; the outputs of the first one are stored."""
TEXTS = 2

CLIP: dict[str, Any] = dict(
    architectures=["CLIPTextModel"],
    attention_dropout=0.0,
    bos_token_id=48,
    eos_token_id=49,
    hidden_act="quick_gelu",
    hidden_size=36,
    initializer_factor=1.0,
    initializer_range=0.02,
    intermediate_size=50,
    layer_norm_eps=1e-5,
    max_position_embeddings=13,
    model_type="clip_text_model",
    num_attention_heads=3,
    num_hidden_layers=3,
    pad_token_id=49,
    projection_dim=20,
    transformers_version="5.20.2",
    vocab_size=50,
)


T5: dict[str, Any] = dict(
    architectures=["T5EncoderModel"],
    classifier_dropout=0.0,
    d_ff=50,
    d_kv=8,
    d_model=36,
    decoder_start_token_id=0,
    dense_act_fn="gelu_new",
    dropout_rate=0.1,
    eos_token_id=1,
    feed_forward_proj="gated-gelu",
    initializer_factor=1.0,
    is_encoder_decoder=True,
    is_gated_act=True,
    layer_norm_epsilon=1e-6,
    model_type="t5",
    num_decoder_layers=2,
    num_heads=3,
    num_layers=2,
    output_past=True,
    pad_token_id=0,
    relative_attention_max_distance=128,
    relative_attention_num_buckets=32,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.43.3",
    use_cache=True,
    vocab_size=50,
)


@dataclass(frozen=True)
class Encoder:
    """A text encoder: its config.json, rows of a padded text, and whether padding is masked."""

    fields: dict[str, Any]
    rows: int
    masked: bool = False


ENCODERS = {
    "clip": Encoder(CLIP, 13),
    "clip gelu, one block, legacy end": Encoder(
        CLIP | dict(hidden_act="gelu", num_hidden_layers=1, eos_token_id=2), 13
    ),
    "clip projected": Encoder(CLIP | dict(architectures=["CLIPTextModelWithProjection"]), 13),
    "t5": Encoder(T5, 19),
    "t5 masked": Encoder(T5, 19, masked=True),
    "t5 relu, few buckets": Encoder(
        T5
        | dict(
            dense_act_fn="relu",
            feed_forward_proj="relu",
            is_gated_act=False,
            relative_attention_max_distance=9,
            relative_attention_num_buckets=12,
        ),
        17,
        masked=True,
    ),
    "t5 beyond the last distance": Encoder(T5 | dict(d_model=10, num_layers=1), 143, masked=True),
}


def draw_ids(encoder: Encoder, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return padded ids of texts of several lengths and their mask, int32 [TEXTS, rows] each."""
    fields, rng = encoder.fields, np.random.default_rng([seed, 37])
    end = (
        max(fields["eos_token_id"], fields["vocab_size"] - 1)
        if "hidden_act" in fields
        else fields["eos_token_id"]
    )
    ids = rng.integers(3, fields["vocab_size"] - 2, (TEXTS, encoder.rows)).astype(np.int32)
    lengths = rng.integers(3, encoder.rows + 1, TEXTS)
    lengths[0] = encoder.rows if seed == 0 else lengths[0]
    mask = (np.arange(encoder.rows) < lengths[:, None]).astype(np.int32)
    ids = np.where(mask == 1, ids, fields["pad_token_id"]).astype(np.int32)
    ids[np.arange(TEXTS), lengths - 1] = end
    return ids, mask


def list_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint by name, as older versions of transformers write them."""
    return list_t5_shapes(fields) if fields["model_type"] == "t5" else list_clip_shapes(fields)


def list_t5_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of T5's tensors by name."""
    hidden, inner, heads = fields["d_model"], fields["d_ff"], fields["num_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "shared.weight": (fields["vocab_size"], hidden),
        "encoder.final_layer_norm.weight": (hidden,),
    }
    table = (fields["relative_attention_num_buckets"], heads)
    shapes["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = table
    for number in range(fields["num_layers"]):
        layer = f"encoder.block.{number}.layer."
        for letter in "qkv":
            shapes[f"{layer}0.SelfAttention.{letter}.weight"] = (heads * fields["d_kv"], hidden)
        shapes[f"{layer}0.SelfAttention.o.weight"] = (hidden, heads * fields["d_kv"])
        for name in ("wi_0", "wi_1") if fields["is_gated_act"] else ("wi",):
            shapes[f"{layer}1.DenseReluDense.{name}.weight"] = (inner, hidden)
        shapes[f"{layer}1.DenseReluDense.wo.weight"] = (hidden, inner)
        for norm in (0, 1):
            shapes[f"{layer}{norm}.layer_norm.weight"] = (hidden,)
    return shapes


def list_clip_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of CLIP's tensors by name."""
    hidden, inner, prefix = fields["hidden_size"], fields["intermediate_size"], "text_model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.token_embedding.weight": (fields["vocab_size"], hidden),
        f"{prefix}embeddings.position_embedding.weight": (fields["max_position_embeddings"], hidden),
    }
    norms = [f"{prefix}final_layer_norm"]
    for number in range(fields["num_hidden_layers"]):
        layer = f"{prefix}encoder.layers.{number}."
        norms += [f"{layer}layer_norm1", f"{layer}layer_norm2"]
        linears = {f"self_attn.{letter}_proj": (hidden, hidden) for letter in ("q", "k", "v", "out")}
        linears |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
        for name, shape in linears.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    if fields["architectures"] == ["CLIPTextModelWithProjection"]:
        shapes["text_projection.weight"] = (fields["projection_dim"], hidden)
    return shapes


def draw_weights(fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random weights far from initial zeros and ones, which bfloat16 represents exactly."""
    rng = np.random.default_rng(5)
    weights = {}
    for name, shape in list_shapes(fields).items():
        numbers = rng.standard_normal(shape)
        if len(shape) > 1:
            is_table = "embed" in name or name.startswith("shared")
            numbers *= 0.7 if is_table else 1.5 if "bias" in name else 1.5 / shape[-1] ** 0.5
        else:
            numbers = 0.5 * numbers + name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))
        weights[name] = (numbers.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return weights


def write_encoder(folder: Path, fields: dict[str, Any]) -> Path:
    """Write config.json and model.safetensors of a text encoder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    safetensors.numpy.save_file(draw_weights(fields), folder / "model.safetensors", {"format": "pt"})
    return folder


def run_transformers(model: Any, encoder: Encoder, seed: int) -> dict[str, np.ndarray]:
    """Return the outputs of a model of transformers for a batch of texts, float64, by our names of them."""
    import torch

    ids, mask = (torch.from_numpy(array).long() for array in draw_ids(encoder, seed))
    with torch.no_grad():
        encoded = model(ids, attention_mask=mask if encoder.masked else None, output_hidden_states=True)
    outputs = {"x": encoded.last_hidden_state}
    if "hidden_act" in encoder.fields:
        outputs["penultimate"] = encoded.hidden_states[-2]
    pooled = getattr(encoded, "text_embeds", getattr(encoded, "pooler_output", None))
    outputs |= {} if pooled is None else {"pooled": pooled}
    return {name: tensor.double().numpy() for name, tensor in outputs.items()}


def record_encoder(encoder: Encoder) -> dict[str, np.ndarray]:
    """Return the outputs of an encoder for the first batch, and by dtype the largest errors of transformers.

    Outputs are computed in float64 and stored in float32. The errors are over all batches, [errors] for each output.
    """
    import torch
    import transformers

    create = getattr(transformers, encoder.fields["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        write_encoder(Path(folder), encoder.fields)
        exact, single, half = (
            create.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )
    recorded: dict[str, np.ndarray] = {}
    for seed in range(BATCHES):
        outputs = run_transformers(exact, encoder, seed)
        if seed == 0:
            recorded |= {name: array.astype(np.float32) for name, array in outputs.items()}
        for dtype, model in (("float32", single), ("bfloat16", half)):
            for name, array in run_transformers(model, encoder, seed).items():
                key, error = f"{dtype} error of {name}", np.abs(array - outputs[name]).max()
                recorded[key] = np.maximum(recorded.get(key, 0.0), error)
    return recorded


END = "<|endoftext|>"
START = "<|startoftext|>"
WORDS = "a red small large circle square triangle above left of the it isn't".split()
MERGES = ["r e", "re d</w>", "t h", "th e</w>", "' s</w>", "i n", "Ã ©</w>", "0 0</w>", "1 0</w>", "! !</w>"]


def spell(word: str) -> list[str]:
    """Return the symbols of a word before merges."""
    return [*word[:-1], f"{word[-1]}</w>"]


def list_byte_symbols() -> list[str]:
    """Return the characters that stand for the 256 bytes in a vocabulary of bytes."""
    import tokenizers

    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True)
class Words:
    """A CLIP tokenizer: files by name, ids of a padded text, and whether all bytes are in the vocabulary.

    Without them, symbols that the vocabulary lacks become the unknown token.
    """

    files: dict[str, Any]
    rows: int = 16
    has_bytes: bool = True

    def write(self, folder: Path) -> Path:
        """Write the files of the tokenizer and return the folder."""
        symbols = list_byte_symbols() if self.has_bytes else [*"abcdefghijklmnopqrstuvwxyz'"]
        vocabulary = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
        merges = list(MERGES) if self.has_bytes else []
        for word in WORDS:
            start, *symbols_after = spell(word)
            for symbol in symbols_after:
                merges += [f"{start} {symbol}"] if f"{start} {symbol}" not in merges else []
                start += symbol
        vocabulary += dict.fromkeys(merge.replace(" ", "") for merge in merges)
        vocabulary = list(dict.fromkeys([*vocabulary, START, END]))
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {token: number for number, token in enumerate(vocabulary)}
        (folder / "vocab.json").write_text(json.dumps(numbers))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


NAMES: dict[str, Any] = dict(bos_token=START, eos_token=END, unk_token=END, pad_token=END)


def describe_token(content: str, normalized: bool) -> dict[str, Any]:
    """Return a token as special_tokens_map.json has it."""
    return dict(content=content, lstrip=False, normalized=normalized, rstrip=False, single_word=False)


TYPED = {name: {"__type": "AddedToken"} | describe_token(content, True) for name, content in NAMES.items()}
TOKENIZERS = {
    "words": Words(
        {"tokenizer_config.json": {"tokenizer_class": "CLIPTokenizer", "model_max_length": 16} | NAMES},
        has_bytes=False,
    ),
    "bytes": Words({"tokenizer_config.json": TYPED | {"do_lower_case": True, "errors": "replace"}}),
    "without configs": Words({}, rows=9),
    "padded with an exclamation mark": Words(
        {
            "tokenizer_config.json": TYPED | {"pad_token": "!"},
            "special_tokens_map.json": {
                **{
                    name: describe_token(NAMES[name], True)
                    for name in ("bos_token", "eos_token", "unk_token")
                },
                "pad_token": "!",
            },
        },
        rows=40,
    ),
    "listed tokens": Words(
        {
            "tokenizer_config.json": NAMES
            | {
                "added_tokens_decoder": {
                    "525": describe_token("<red>", False) | {"special": False, "lstrip": True},
                },
                "additional_special_tokens": ["<new>"],
            },
            "special_tokens_map.json": {"pad_token": "!"},
        },
        rows=20,
    ),
}
PROMPTS = [
    "a small red circle",
    "a small red circle above the large square",
    "",
    " ",
    "\t a\n\n red \u00a0\u2003 circle  ",
    "It's the ISN'T it isn't I'LL we've 10000 1 x² ½ Ⅷ",
    "café cafe\u0301 CAFÉ İstanbul ß ﬁ Ω",
    "🟥🔵 red🟥circle 👩‍👩‍👧",
    "红色的圆 円 원 дом",
    "a" * 300,
    "red " * 100,
    "!!! red! !",
    "<|endoftext|> a <|startoftext|>red<|ENDOFTEXT|> <|endoftext",
    "<red> x<red>y <new>a <NEW>",
    "\x00\x01\x7f red\x1b[0m \u200b\ufeff\u202e \ufffd",
    "a-b_c.d,e;f:g/h\\i|j(k)[l]{m}\"n'o`p~q@r#s$t%u^v&w*x+y=z<>?",
    "tHe ThE 'S 's 'll ''s",
]


RULES = {
    "ﬁ": "fi",
    "\u00a0": " ",
    "\t": " ",
    "\n": " ",
    "\u200b": "",
    "É": "é",
    "e\u0301": "é",
    "½": "1/2",
    "…": "...",
}
"""Normalisation of the first model of pieces, in the form of sentencepiece's rules."""
SENTENCES = [
    *PROMPTS[:2],
    "a large triangle left of the square, it's above 10000 red circles!",
    "café ... 1/2 (x)",
]


def train_pieces(normalises: bool) -> bytes:
    """Return the spiece.model of a unigram model of a few pieces, with or without rules of normalisation.

    The model without rules has a symbol of a user; transformers splits texts at such symbols only if
    tokenizer_config.json lists no tokens, and sentencepiece always does.
    """
    import sentencepiece

    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        for source, replacement in RULES.items():
            rules.write(
                "\t".join(" ".join(f"{ord(sign):X}" for sign in text) for text in (source, replacement))
            )
            rules.write("\n")
        rules.flush()
        stream = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 3),
            model_writer=stream,
            vocab_size=60,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            user_defined_symbols=[] if normalises else ["<new>"],
            num_threads=1,
            minloglevel=2,
            **(
                {"normalization_rule_tsv": rules.name}
                if normalises
                else {"normalization_rule_name": "identity"}
            ),
        )
    return stream.getvalue()


@dataclass(frozen=True)
class Pieces:
    """A T5 tokenizer: files by name, ids of a padded text, and whether its model normalises texts."""

    files: dict[str, Any]
    rows: int
    normalises: bool

    @property
    def key(self) -> str:
        """Name of the model of pieces among the recordings."""
        return f"spiece.model{' with rules' if self.normalises else ''}"

    def write(self, folder: Path, model: bytes) -> Path:
        """Write the files of the tokenizer and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spiece.model").write_bytes(model)
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


SENTINELS = [f"<extra_id_{number}>" for number in range(100)]
T5_NAMES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
T5_TOKENIZERS = {
    "t5 with rules": Pieces(
        {
            "tokenizer_config.json": T5_NAMES
            | dict(
                additional_special_tokens=SENTINELS, extra_ids=100, legacy=True, tokenizer_class="T5Tokenizer"
            ),
            "special_tokens_map.json": {
                **{name: describe_token(content, False) for name, content in T5_NAMES.items()},
                "additional_special_tokens": SENTINELS,
            },
        },
        40,
        normalises=True,
    ),
    "t5 without rules and configs": Pieces({}, 12, normalises=False),
    "t5 with few sentinels": Pieces({"tokenizer_config.json": dict(extra_ids=3)}, 30, normalises=False),
}
T5_PROMPTS = [
    *PROMPTS,
    "a </s> red<pad>  <extra_id_0>x <extra_id_5> <new><unk>",
    "▁a▁red ▁",
    "ﬁ½… red\u00a0circle",
]


def record_ids(tokenizer: Any, prompts: list[str], rows: int) -> np.ndarray:
    """Return the ids and the masks that a tokenizer of transformers makes of prompts, int32 [2, prompts, rows]."""
    encoded = tokenizer(prompts, padding="max_length", max_length=rows, truncation=True)
    return np.array([encoded["input_ids"], encoded["attention_mask"]], np.int32)


def record_words(words: Words) -> np.ndarray:
    """Return the ids and the masks that transformers makes of the prompts with a CLIP tokenizer."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.CLIPTokenizer.from_pretrained(words.write(Path(folder)))
    return record_ids(tokenizer, PROMPTS, words.rows)


def record_pieces(pieces: Pieces, model: bytes) -> np.ndarray:
    """Return the ids and the masks that transformers makes of the prompts with a T5 tokenizer."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = transformers.T5Tokenizer.from_pretrained(pieces.write(Path(folder), model))
    return record_ids(tokenizer, T5_PROMPTS, pieces.rows)


def record_all() -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of each recording."""
    for name, encoder in ENCODERS.items():
        for key, array in record_encoder(encoder).items():
            yield f"{name}: {key}", np.asarray(array, np.float32)
    for name, words in TOKENIZERS.items():
        yield f"{name}: ids", record_words(words)
    models = {normalises: train_pieces(normalises) for normalises in (True, False)}
    for name, pieces in T5_TOKENIZERS.items():
        yield pieces.key, np.frombuffer(models[pieces.normalises], np.uint8)
        yield f"{name}: ids", record_pieces(pieces, models[pieces.normalises])


if __name__ == "__main__":
    arrays = dict(record_all())
    np.savez_compressed(STORED, **arrays)
    sys.stdout.write(f"{STORED}: {len(arrays)} arrays, {STORED.stat().st_size} bytes\n")
