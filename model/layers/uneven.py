"""Phrases about heads, MLPs and vocabularies that tensor-parallel ranks do not divide evenly, for reports and plans."""

from __future__ import annotations

from collections.abc import Iterator

from model.config import ModelConfig
from model.config.blocks import Mlp
from model.config.heads import HeadLayout
from model.config.mixers import GatedDelta, GroupedAttention, LatentAttention, StateSpaceHeads
from model.layers.shard import Shard, slice_evenly, slice_vocabulary


def describe_uneven(config: ModelConfig, ranks: int) -> tuple[str, ...]:
    """Return a phrase for each size of the model that `ranks` tensor-parallel ranks do not divide evenly.

    An example is "9 query heads in 3 groups: 3 a rank, 3 of 12 are padding". Equal phrases of several layers appear
    once. The result is empty if the ranks divide all sizes.
    """
    return tuple(dict.fromkeys(_describe_sizes(config, ranks)))


def _describe_sizes(config: ModelConfig, ranks: int) -> Iterator[str]:
    for block in config.blocks:
        match block.mixer:
            case GroupedAttention() as mixer:
                yield from _describe_heads(mixer.layout(ranks), "query head", has_copies=True)
            case LatentAttention() as mixer:
                yield from _describe_heads(mixer.layout(ranks), "query head")
            case GatedDelta() as mixer:
                yield from _describe_heads(mixer.layout(ranks), "key head")
            case StateSpaceHeads() as mixer:
                yield from _describe_heads(mixer.layout(ranks), "head")
    for block in config.blocks:
        if isinstance(block.mlp, Mlp) and block.mlp.width % ranks:
            width = slice_evenly(block.mlp.width, Shard(0, ranks)).stop
            padding = _describe_padding(ranks * width - block.mlp.width, ranks * width)
            yield f"an MLP of width {block.mlp.width}: {width} a rank, {padding}"
    if config.vocab_size % ranks:
        first, last = (slice_vocabulary(config.vocab_size, Shard(rank, ranks)) for rank in (0, ranks - 1))
        sizes = f"{first.stop} or {last.stop - last.start}"
        yield f"a vocabulary of {config.vocab_size}: {sizes} tokens a rank"


def _describe_heads(layout: HeadLayout, noun: str, has_copies: bool = False) -> Iterator[str]:
    """Yield one phrase if heads are padded, or nothing.

    With `has_copies` a phrase also says in how many groups the heads are, and how many ranks hold the same key/value
    head. `noun` names a head, such as "query head".
    """
    idle = sum(not layout.queries(rank) for rank in range(layout.ranks))
    remarks = []
    if layout.padding:
        remarks.append(_describe_padding(layout.padding, layout.ranks * layout.heads_of_rank))
    if idle:
        remarks.append(f"{idle} {'rank holds' if idle == 1 else 'ranks hold'} padding only")
    if has_copies and layout.copies > 1:
        remarks.append(f"{layout.copies} ranks hold each key/value head")
    if remarks:
        heads = f"{layout.heads} {noun}{'s' if layout.heads > 1 else ''}"
        groups = f" in {layout.kv_heads} group{'s' if layout.kv_heads > 1 else ''}" if has_copies else ""
        yield f"{heads}{groups}: {layout.heads_of_rank} a rank, {', '.join(remarks)}"


def _describe_padding(padding: int, total: int) -> str:
    return f"{padding} of {total} {'is' if padding == 1 else 'are'} padding"
