"""Sentences on quantised weights that ranks cut inside blocks that share a scale, so that they are widened at load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from model.formats import Format
from model.layers.weight import Weight


def describe_cuts(
    weights: Mapping[str, Weight], formats: Mapping[str, Format], ranks: int, counts: Sequence[int]
) -> Iterator[str]:
    """Yield a sentence for each format and size of blocks inside which tensor-parallel ranks cut weights.

    A sentence names the weights, once for all layers, the format, and the numbers of ranks that cut between blocks.
    Weights whose outputs kernels read in an order that cuts blocks, without any ranks, have sentences of their own.

    Args:
        weights: Weights by name.
        formats: Formats in which kernels read weights, by names of weights.
        ranks: Tensor-parallel ranks.
        counts: Numbers of ranks that the model can have, ascending.
    """
    cut_weights: dict[tuple[Format, tuple[int, int], bool], list[Weight]] = {}
    for name, weight in weights.items():
        format = formats.get(name)
        block = None if format is None else weight.find_cut_block(format, ranks)
        if format is not None and block is not None:
            key = (format, block, weight.can_be_cut(format, 1))
            cut_weights.setdefault(key, []).append(weight)
    for (format, block, fits_one_rank), members in cut_weights.items():
        names = list(dict.fromkeys(re.sub(r"\d+", "*", weight.name) for weight in members))
        plural = len(names) > 1
        elements = f"the blocks of {' by '.join(map(str, block))} elements of {format.name}"
        start = f"{_join(names, 'and')} {'are' if plural else 'is'} widened at load, because"
        if not fits_one_rank:
            outputs = f"the order in which kernels read {'their' if plural else 'its'} outputs"
            yield f"{start} {outputs} cuts inside {elements}, with any number of ranks."
            continue
        fitting = [count for count in counts if all(weight.can_be_cut(format, count) for weight in members)]
        numbers = _join(list(map(str, fitting)), "or")
        yield (
            f"{start} {ranks} tensor-parallel ranks cut inside {elements}; kernels read "
            f"{'them' if plural else 'it'} as stored with {numbers or 'no number of'} ranks."
        )


def _join(names: Sequence[str], conjunction: str) -> str:
    """Return names as a list in words, the last one after a conjunction; empty for none."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {conjunction} {names[-1]}"
