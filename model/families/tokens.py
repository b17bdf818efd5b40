"""Network of a decoder: an embedding of tokens, blocks and a head, with the inputs of token steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from model.layers.cross_attention import LAST_OF_WINDOW
from model.layers.head import HEAD_RESULTS, Head
from model.layers.launch import FLOAT32
from model.layers.layer import Layer
from model.layers.paged import GROUP_ARRAYS, NEWEST
from model.layers.recurrent import SEQUENCE_ARRAYS
from model.layers.sample import COLUMNS, NUMBERS, RESULTS
from model.network import Input, Network, Section, Sharding


def build_token_network(
    embedding: Layer,
    blocks: Sequence[Section],
    head: Head,
    windows: Collection[int] = (),
    **checkpoint: Any,
) -> Network:
    """Return the network of a decoder, with all arrays that a token step may have as inputs and outputs.

    Args:
        embedding: The first layer, which turns token ids into hidden states.
        blocks: The layers of every block.
        head: The last layer, which computes logits.
        windows: Window sizes of the layers; the page arrays of a step exist once more for every window.
        **checkpoint: Fields of `Network` about tensor names and other networks.
    """
    window_arrays = (f"{name}.{window}" for name in GROUP_ARRAYS for window in (*windows, NEWEST))
    inputs = [
        Input("ids", Sharding.rows),
        Input("own_positions", Sharding.rows),
        Input("logits_indices", Sharding.row_indices),
        *map(Input, ("rope_rows", *SEQUENCE_ARRAYS.values(), *GROUP_ARRAYS, *window_arrays, LAST_OF_WINDOW)),
        *(Input(name, dtype=FLOAT32) for name in NUMBERS),
        *(Input(name, Sharding.vocabulary, FLOAT32) for name in COLUMNS),
    ]
    return Network(
        ((embedding,), *blocks, (head,)),
        {array.name: array for array in inputs},
        (*HEAD_RESULTS, *RESULTS),
        **checkpoint,
    )
