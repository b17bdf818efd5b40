"""Parts of a model: its blocks with their mixers and MLPs, and the embeddings, encoder and head around them.

Parts also describe models that no layer of this package computes; `nkw plan` counts their parameters and bytes. Names
follow Hugging Face's config.json where its families agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config.mixers import GatedDelta, GroupedAttention, LatentAttention, StateSpace, StateSpaceHeads
from model.config.record import Config

SWIGLU_OAI = "swigluoai"
"""Activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), with gate and up bounded by a limit."""
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0

MOST_POSITIONS = 2**23
"""Most positions of a sequence: kernels count positions in float32, which is exact below 2^24."""


@dataclass(frozen=True)
class Mlp:
    """Feed-forward block: three projections where `gated`, else two. Activations have the names of the kernel `mlp`.

    In a `sparse` MLP a token keeps only its largest gates.
    """

    width: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    sparse: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed gated MLPs of equal width, and a shared MLP that all tokens pass.

    count         experts of a layer
    per_token     experts that a token passes
    shared_width  width of the shared MLP; 0 without
    shared_gate   the sigmoid of a projection of the token multiplies the output of the shared MLP
    inner_norms   routed and shared experts have further norms and factors inside the block
    renormalise   routing weights are divided by their sum over the chosen experts
    scoring       routing weights of the router's logits over all experts: softmax or sigmoid
    choice_bias   a bias is added to the sigmoids for the choice of experts only
    groups        equal groups of experts; a token chooses among the experts of the best `top_groups` groups
    scale         factor of the routing weights
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    inner_norms: bool = False
    activation: str = "silu"
    renormalise: bool = True
    scoring: str = "softmax"
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Norms:
    """Norms of a block: `before` each layer, `after` it, or both. LayerNorms have a `bias`, RMSNorms none.

    `offset` is added to the weights of all norms.
    """

    eps: float
    before: bool = True
    after: bool = False
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class PerLayerInput:
    """Per-layer inputs: a vector of `width` elements for each token and block, beside the hidden states.

    The vector is the sum of a row of a table of `vocabulary` rows and a normalised projection of the embedding. A block
    multiplies it by a gate, the `activation` of projected hidden states, and adds its normalised projection.
    """

    vocabulary: int
    width: int
    activation: str


@dataclass(frozen=True)
class Streams:
    """Alternating updates (AltUp): a token has `count` hidden states; a block computes one and predicts the others.

    A normalised product of two matrices of rank `rank` is added to the attention of the block.
    """

    count: int
    rank: int


@dataclass(frozen=True)
class Block:
    """Decoder layer; a number of the checkpoint multiplies its result where `scaled`."""

    mixer: GroupedAttention | LatentAttention | StateSpace | GatedDelta | StateSpaceHeads
    mlp: Mlp | Experts | None
    norms: Norms
    per_layer_input: PerLayerInput | None = None
    scaled: bool = False
    streams: Streams | None = None


@dataclass(frozen=True)
class Encoder:
    """Tower that generated tokens do not pass and no layer computes, such as a vision tower."""

    description: str
    parameters: int = 0


@dataclass(frozen=True)
class SpeechEncoder(Encoder):
    """Two convolutions of the log-mel spectrum of a speech window, and blocks over their output.

    A spectrum has `mel_bins` bands and two columns for each of the `positions` of the blocks. A prompt runs the encoder
    once.
    """

    positions: int = 0
    mel_bins: int = 0
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class ModelConfig(Config):
    """Config of a text or speech model: a block for each decoder layer, embeddings, head, and an encoder.

    max_position_embeddings  most positions of a sequence; None without a limit
    learned_positions        rows of a table of learned positions; 0 without
    embedding_scale          factor of embeddings
    logit_scale              factor of logits
    logit_softcap            bound of the scaled logits
    mtp_layers               layers for multi-token prediction, which a checkpoint may hold and nothing reads
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[Block, ...]
    max_position_embeddings: int | None
    tie_word_embeddings: bool
    learned_positions: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    mtp_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    encoder: Encoder | None = None

    @property
    def context(self) -> int:
        """Most tokens of a sequence: `max_position_embeddings`, or `MOST_POSITIONS` without such a limit."""
        return self.max_position_embeddings or MOST_POSITIONS

    def list_windows(self, length: int) -> tuple[int | None, ...]:
        """Return the distinct attention windows, in positions, of the layers for sequences of `length` tokens.

        None comes first if a layer sees all tokens, for which a window of at least `length` counts too. The windows
        below `length` follow in ascending order. Layers without attention count for nothing.
        """
        windows = {
            mixer.window if mixer.window is not None and mixer.window < length else None
            for mixer in self._grouped_attention
        }
        if any(isinstance(block.mixer, LatentAttention) for block in self.blocks):
            windows.add(None)
        return tuple(sorted(windows, key=lambda window: window or 0))

    @property
    def is_recurrent(self) -> bool:
        """Whether a block keeps a state whose size does not depend on the length of the sequence."""
        return not all(isinstance(block.mixer, GroupedAttention | LatentAttention) for block in self.blocks)

    @property
    def cross_positions(self) -> int:
        """Positions of a speech window that cross-attention reads; 0 in a model that takes no speech."""
        return max((mixer.cross_positions for mixer in self._grouped_attention), default=0)

    @property
    def spectrum(self) -> tuple[int, int] | None:
        """(bands, columns) of the log-mel spectrum of a speech window; None in a model that takes no speech."""
        encoder = self.encoder
        return (encoder.mel_bins, 2 * encoder.positions) if isinstance(encoder, SpeechEncoder) else None

    @property
    def longest_short(self) -> int | None:
        """Most tokens of a sequence that longrope rotates by its short factors; None if all have the same factors.

        When a sequence becomes longer, its cached keys are wrong, so all of its tokens are computed again.
        """
        ropes = (mixer.positions.rope for mixer in self._grouped_attention if mixer.positions is not None)
        return next((rope.longest_short for rope in ropes if rope.longest_short is not None), None)

    @property
    def _grouped_attention(self) -> list[GroupedAttention]:
        """Mixers of the blocks with grouped attention."""
        return [block.mixer for block in self.blocks if isinstance(block.mixer, GroupedAttention)]

    def fix_rope_length(self, length: int) -> ModelConfig:
        """Return a config whose longrope rotates sequences of all lengths by the factors for `length` tokens.

        Blocks without longrope stay as they are.
        """
        return replace(self, blocks=tuple(_fix_rope_length(block, length) for block in self.blocks))

    @property
    def most_busy_ranks(self) -> int:
        """Most tensor-parallel ranks that each hold a token of the vocabulary, and a head or channel of every mixer.

        With more ranks, some hold only padding of a mixer.
        """
        return min(self.vocab_size, *(block.mixer.divided[0] for block in self.blocks))

    def refusal(self, ranks: int) -> str | None:
        """Return why `ranks` tensor-parallel ranks cannot share this model, and how many can; None if they can.

        Each rank needs a token of the vocabulary. Other parts are padded with zeros.
        """
        most = self.vocab_size
        if ranks <= most:
            return None
        return f"{ranks} ranks for {most} tokens; each rank needs one, so this model takes 1 to {most} ranks"


def _fix_rope_length(block: Block, length: int) -> Block:
    """Return the block with longrope's factors for `length` tokens; the block itself without rotary attention."""
    mixer = block.mixer
    if not isinstance(mixer, GroupedAttention) or mixer.positions is None:
        return block
    positions = replace(mixer.positions, rope=mixer.positions.rope.fix_length(length))
    return replace(block, mixer=replace(mixer, positions=positions))
