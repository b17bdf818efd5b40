"""A model by its parts: what each block holds, how positions enter, what stands around the blocks.

Parts describe models that no layer of this package computes yet as well; `nkw plan` counts them. Names follow Hugging
Face's config.json where its families agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config.mixers import GatedDelta, GroupedAttention, LatentAttention, StateSpace, StateSpaceHeads
from model.config.record import Config

SWIGLU_OAI = "swigluoai"
"""The activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), of a gate and an up that a limit bounds."""
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0

MOST_POSITIONS = 2**23
"""Kernels count positions in float32, which holds those below 2^24 exactly."""


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block; `gated` ones have three projections, others two. Activations are named as in `mlp`.

    Of a `sparse` one a token passes the largest gates only.
    """

    width: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    sparse: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed gated MLPs of one width, of which a token passes `per_token`, beside `shared_width` that all pass.

    With a `shared_gate` what the latter add is multiplied by the sigmoid of one more product of the token.
    Their weights are the `scoring` of the router's logits over all experts, a softmax or sigmoids, divided by those of
    the chosen ones where `renormalise`, times `scale`. Tokens choose among the experts of the `top_groups` best of
    `groups` equal groups. A `choice_bias` is added to sigmoids for the choice alone. With `inner_norms` they
    have norms and factors of their own inside the block.
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
    """The norms of a block: `before` each layer, `after` it, or both. LayerNorms have a bias, RMSNorms none.

    `offset` is added to the weights of all norms.
    """

    eps: float
    before: bool = True
    after: bool = False
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class PerLayerInput:
    """What every block is given of each token beside the hidden states: `width` elements for each block.

    They are the sum of a row of a table of `vocabulary` rows and of a projection of the embedding, normalised. A block
    multiplies them by a gate, the `activation` of projected hidden states, and adds their projection, normalised.
    """

    vocabulary: int
    width: int
    activation: str


@dataclass(frozen=True)
class Streams:
    """Alternating updates: `count` hidden states of a token, of which a block computes one and predicts the others.

    Beside its attention stands a product of two matrices of rank `rank`, normalised.
    """

    count: int
    rank: int


@dataclass(frozen=True)
class Block:
    """One decoder layer; `scaled` ones multiply their result by a number of the checkpoint."""

    mixer: GroupedAttention | LatentAttention | StateSpace | GatedDelta | StateSpaceHeads
    mlp: Mlp | Experts | None
    norms: Norms
    per_layer_input: PerLayerInput | None = None
    scaled: bool = False
    streams: Streams | None = None


@dataclass(frozen=True)
class Encoder:
    """What a generated token does not pass, `what` in words: a tower of so many parameters, which no layer computes."""

    what: str
    parameters: int = 0


@dataclass(frozen=True)
class SpeechEncoder(Encoder):
    """Blocks over what two convolutions make of the log-mel spectrum of a window of speech, of `mel_bins` bands.

    A prompt sends `positions` through them, once; every second column of the spectrum is one.
    """

    positions: int = 0
    mel_bins: int = 0
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class ModelConfig(Config):
    """A model as its config.json describes it: one block for each decoder layer, and what stands around them.

    `max_position_embeddings` is None where a sequence has no longest. `learned_positions` are the rows of a table of
    positions beside that of the tokens. Embeddings are multiplied by `embedding_scale`; logits by `logit_scale`, then
    bounded by `logit_softcap`.
    `mtp_layers` is the number of layers for multi-token prediction that a checkpoint may hold after the blocks, and
    that nothing reads.
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
        """The longest sequence, in tokens; of a model that has none, of as many as kernels count."""
        return self.max_position_embeddings or MOST_POSITIONS

    def windows(self, length: int) -> tuple[int | None, ...]:
        """The windows of its layers in sequences of `length` tokens, each once; None, the first, sees all of them."""
        mixers = [block.mixer for block in self.blocks if isinstance(block.mixer, GroupedAttention)]
        narrow = {each.window for each in mixers if each.window is not None and each.window < length}
        wide = any(each.window is None or each.window >= length for each in mixers)
        wide = wide or any(isinstance(block.mixer, LatentAttention) for block in self.blocks)
        return (*((None,) if wide else ()), *sorted(narrow))

    @property
    def is_recurrent(self) -> bool:
        """Whether a block keeps a state of one size, however long the sequence is."""
        return not all(isinstance(each.mixer, GroupedAttention | LatentAttention) for each in self.blocks)

    @property
    def cross_positions(self) -> int:
        """Positions of a window of speech to which blocks attend besides; 0 in a model that takes no speech."""
        mixers = (block.mixer for block in self.blocks)
        return max((each.cross_positions for each in mixers if isinstance(each, GroupedAttention)), default=0)

    @property
    def spectrum(self) -> tuple[int, int] | None:
        """Bands and columns of the log-mel spectrum of a window of speech; None in a model that takes no speech."""
        own = self.encoder
        return (own.mel_bins, 2 * own.positions) if isinstance(own, SpeechEncoder) else None

    @property
    def longest_short(self) -> int | None:
        """The longest sequence that longrope turns by its short factors; a longer one is computed anew."""
        mixers = (block.mixer for block in self.blocks)
        turned = (each.positions for each in mixers if isinstance(each, GroupedAttention))
        limits = (each.rope.longest_short for each in turned if each is not None)
        return next((each for each in limits if each is not None), None)

    def of_length(self, length: int) -> ModelConfig:
        """The model whose sequences, however long, are rotated like one of `length` tokens."""
        return replace(self, blocks=tuple(_of_length(block, length) for block in self.blocks))

    @property
    def most_ranks(self) -> int:
        """The most tensor-parallel ranks: every rank holds a head or a channel of every mixer, and a token."""
        return min(self.vocab_size, *(block.mixer.divided[0] for block in self.blocks))

    def refusal(self, ranks: int) -> str | None:
        """The reason why `ranks` ranks cannot share this model, with what would work; None where they can."""
        if ranks <= self.most_ranks:
            return None
        most = self.most_ranks
        mixer = min((block.mixer for block in self.blocks), key=lambda each: each.divided[0])
        named = {StateSpace: "channel", StateSpaceHeads: "head", GatedDelta: "key head"}
        what = named.get(type(mixer), "query head")
        if most < mixer.divided[0]:
            what = "token"
        plural, takes = ("", "1 rank") if most == 1 else ("s", f"1 to {most} ranks")
        return f"{ranks} ranks for {most} {what}{plural}; each rank needs one, so this model takes {takes}"


def _of_length(block: Block, length: int) -> Block:
    mixer = block.mixer
    if not isinstance(mixer, GroupedAttention) or mixer.positions is None:
        return block
    turned = replace(mixer.positions, rope=mixer.positions.rope.of_length(length))
    return replace(block, mixer=replace(mixer, positions=turned))
