"""Whisper: an encoder of speech that runs once for a window, and a decoder that attends to what it left behind."""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.parts import Block, Mlp, ModelConfig, Norms, SpeechEncoder
from model.config.reading import MOST_HEADS, activation, dtype, layer_count
from model.families import dense
from model.layers.attention import Attention
from model.layers.attention_heads import AttentionProjections
from model.layers.cross_attention import CrossAttention, CrossProjections, EncodedHeads
from model.layers.mlp import FeedForward
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.speech import SpeechInput
from model.network import Input, Network, Section

_EPS = 1e-5
"""Of every LayerNorm: torch's default, which no field changes."""

_DECODER = dense.Names(
    table="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    last_norm="model.decoder.layer_norm",
    head="proj_out",
    layer="model.decoder.layers",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
)
_ENCODER = "model.encoder"


def whisper(fields: Fields) -> ModelConfig:
    """Equal blocks of the encoder, and of the decoder, which attend to the encoder's positions besides."""
    width, heads = fields.count("d_model"), fields.count("decoder_attention_heads", most=MOST_HEADS)
    if width % heads:
        raise fields.error("d_model", f"{width} is not a multiple of decoder_attention_heads, {heads}")
    if width // heads % 2:
        fields.unsupported("d_model", f"heads of {width // heads}; the kernels of attention take even sizes")
    of_encoder = fields.count("encoder_attention_heads", most=MOST_HEADS, default=heads)
    if of_encoder != heads:
        fields.unsupported(
            "encoder_attention_heads",
            f"{of_encoder}; ranks divide as many as decoder_attention_heads, {heads}",
        )
    if fields.flag("scale_embedding", default=False):
        fields.unsupported("scale_embedding", "true; no layer computes that")
    sources, targets = fields.count("max_source_positions"), fields.count("max_target_positions")
    mixer = GroupedAttention(
        heads,
        heads,
        width // heads,
        query_bias=True,
        value_bias=True,
        output_bias=True,
        cross_positions=sources,
    )
    function = activation(fields, "activation_function", "gelu")
    mlp = Mlp(fields.count("decoder_ffn_dim"), function, bias=True, gated=False)
    norms = Norms(_EPS, bias=True)
    layers, inner = layer_count(fields, "encoder_layers"), fields.count("encoder_ffn_dim")
    listening = replace(mixer, cross_positions=0, causal=False)
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=width,
        blocks=(Block(mixer, mlp, norms),) * layer_count(fields, "decoder_layers"),
        max_position_embeddings=targets,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        learned_positions=targets,
        dtype=dtype(fields),
        encoder=SpeechEncoder(
            "encoder",
            positions=sources,
            mel_bins=fields.count("num_mel_bins"),
            blocks=(Block(listening, replace(mlp, width=inner), norms),) * layers,
        ),
    )


def compose(config: ModelConfig) -> Network:
    """The layers with the tensor names of Hugging Face's Whisper."""
    decoder = dense.compose(config, _DECODER)
    assert isinstance(config.encoder, SpeechEncoder)
    blocks, crosses = [], []
    for number, (attention, mlp) in enumerate(decoder.blocks):
        crosses.append(_cross(config, number))
        blocks.append((attention, crosses[-1], mlp))
    return replace(
        decoder,
        sections=(decoder.sections[0], *blocks, decoder.sections[-1]),
        before={"encoder": _encoder(config, config.encoder, tuple(crosses))},
        bare_prefix="model.",
    )


def _cross(config: ModelConfig, number: int) -> CrossAttention:
    """The attention of a decoder's layer to the encoder."""
    mixer, tensor = config.blocks[number].mixer, f"{_DECODER.layer}.{number}.encoder_attn"
    assert isinstance(mixer, GroupedAttention)
    own = _projections(config.hidden_size, tensor)
    norm = _norm(f"layers.{number}.cross.norm", f"{tensor}_layer_norm", config.hidden_size)
    return CrossAttention(f"layers.{number}.cross", config.hidden_size, mixer, norm, own)


def _encoder(config: ModelConfig, encoder: SpeechEncoder, crosses: tuple[CrossAttention, ...]) -> Network:
    hidden = config.hidden_size
    names = (f"{_ENCODER}.conv1", f"{_ENCODER}.conv2")
    table = f"{_ENCODER}.embed_positions.weight"
    start = SpeechInput("encoder.input", encoder.mel_bins, hidden, encoder.positions, names, table)
    last = _norm("encoder.norm", f"{_ENCODER}.layer_norm", hidden)
    blocks = (_encoder_block(hidden, block, number) for number, block in enumerate(encoder.blocks))
    sections = ((start,), *blocks, (EncodedHeads(last, crosses),))
    return Network(sections, {"features": Input("features", dtype=None)}, (), window=encoder.positions)


def _encoder_block(hidden: int, block: Block, number: int) -> Section:
    """Attention of all positions with all, and the MLP."""
    name, tensor = f"encoder.{number}", f"{_ENCODER}.layers.{number}"
    assert isinstance(block.mixer, GroupedAttention) and isinstance(block.mlp, Mlp)
    own = _projections(hidden, f"{tensor}.self_attn")
    attention = Attention(
        f"{name}.attention",
        hidden,
        block.mixer,
        _norm(f"{name}.attention.norm", f"{tensor}.self_attn_layer_norm", hidden),
        AttentionProjections((own.query, own.key, own.value), own.output),
    )
    mlp = FeedForward(
        f"{name}.mlp",
        hidden,
        _norm(f"{name}.mlp.norm", f"{tensor}.final_layer_norm", hidden),
        None,
        _linear(f"{tensor}.fc1", block.mlp.width, hidden),
        _linear(f"{tensor}.fc2", hidden, block.mlp.width),
        block.mlp.activation,
    )
    return attention, mlp


def _projections(hidden: int, tensor: str) -> CrossProjections:
    """Those of one attention; keys have no bias."""
    return CrossProjections(
        _linear(f"{tensor}.q_proj", hidden, hidden),
        Projection(f"{tensor}.k_proj.weight", hidden, hidden),
        _linear(f"{tensor}.v_proj", hidden, hidden),
        _linear(f"{tensor}.out_proj", hidden, hidden),
    )


def _linear(tensor: str, outputs: int, inputs: int) -> Projection:
    return Projection(f"{tensor}.weight", outputs, inputs, f"{tensor}.bias")


def _norm(name: str, tensor: str, hidden: int) -> Norm:
    return Norm(name, f"{tensor}.weight", hidden, _EPS, f"{tensor}.bias")
