"""Ulysses sequence parallelism of denoisers: ranks that divide the rows of images, and heads around attention.

Layers of an image's rows compute the rows of their rank with all weights of its tensor-parallel rank. Before attention
every rank gets all rows of some heads, and after it all heads of its rows, by launches of `exchange_heads`.

Rows of texts and of conditions are few, so that each rank would read all weights for a fraction of them. Ulysses ranks
all have these rows, and divide the weights of their layers as further tensor-parallel ranks: weights, steps and
launches of these layers are flattened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.formats import Format
from model.formats import Weight as StoredWeight
from model.layers.launch import Argument, Axis, Launch, LeastWork, StepShape, Value, WeightDtypes
from model.layers.precision import FLOAT32
from model.layers.shard import Shape, Shard
from model.layers.weight import Weight

Projected = tuple[Value, Value, Value]
"""Queries, keys and values."""


def gather_rows(projected: Projected, step: StepShape) -> tuple[Sequence[Launch], Projected]:
    """Return the launches that give a rank all rows of some heads, and the queries, keys and values after them.

    Without Ulysses ranks there is no launch.

    Args:
        projected: Queries, keys and values of a rank's rows.
        step: The step, with the tokens of a rank.
    """
    ranks = step.ulysses_ranks
    if ranks == 1:
        return (), projected
    query, keys, values = (
        replace(array, shape=(array.shape[0] * ranks, array.shape[1] // ranks)) for array in projected
    )
    return [_launch_exchange(dict(zip(("q", "k", "v"), projected)), step, False)], (query, keys, values)


def scatter_rows(queries: Value, step: StepShape) -> Sequence[Launch]:
    """Return the launches that give a rank its rows of the outputs of attention, the array "o", for all heads.

    Without Ulysses ranks there is no launch.

    Args:
        queries: Queries after `gather_rows`, which have the shape of the outputs.
        step: The step, with the tokens of a rank.
    """
    if step.ulysses_ranks == 1:
        return ()
    return [_launch_exchange({"q": replace(queries, name="o")}, step, True)]


def _launch_exchange(arrays: Mapping[str, Value], step: StepShape, to_rows: bool) -> Launch:
    """Return the launch of `exchange_heads` that replaces arrays, which are given by the kernel's parameter."""
    arguments: dict[str, Argument] = {
        **arrays,
        "replica_group": Axis.ulysses,
        "ranks": step.ulysses_ranks,
        "sequences": step.sequences,
        "to_rows": to_rows,
    }
    names = tuple(array.name for array in arrays.values())
    moved = sum(2 * array.nbytes for array in arrays.values())
    label = "back to rows" if to_rows else "to heads"
    return Launch("exchange_heads", arguments, names, LeastWork(0.0, float(moved)), step.tokens, label)


def flatten_launches(launches: Iterable[Launch]) -> list[Launch]:
    """Return launches whose collectives run over tensor-parallel and Ulysses ranks together."""
    return [
        replace(
            launch,
            arguments={
                parameter: Axis.flattened if argument is Axis.tensor else argument
                for parameter, argument in launch.arguments.items()
            },
        )
        for launch in launches
    ]


def flatten_weights(weights: Iterable[Weight]) -> list[Weight]:
    """Return weights of a layer that tensor-parallel and Ulysses ranks divide alike."""
    return [
        FlattenedWeight(
            weight.name,
            weight.tensors,
            weight.reader,
            weight.component,
            weight.partners,
            weight.row_partners,
        )
        for weight in weights
    ]


@dataclass(frozen=True)
class FlattenedWeight(Weight):
    """Weight that tensor-parallel and Ulysses ranks divide alike; each method takes the rank's shard of the mesh."""

    def compute_content_key(self, shard: Shard) -> object:
        """Return a hashable key that is equal for ranks whose arrays have the same elements."""
        return super().compute_content_key(shard.flattened)

    def shape(self, shard: Shard) -> Shape:
        """Return the shape of the array on a rank."""
        return super().shape(shard.flattened)

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a new array of a rank, see `Weight.take`."""
        return super().take(weights, shard.flattened, activations)

    def find_format(self, shard: Shard, dtypes: WeightDtypes) -> Format | None:
        """Return the format of the arrays that a rank holds; None for one plain or widened array."""
        return super().find_format(shard.flattened, dtypes)

    def take_stored(
        self, weights: Mapping[str, StoredWeight], shard: Shard, format: Format
    ) -> dict[str, np.ndarray]:
        """Return a rank's copies of the stored tensors that the kernel reads, see `Weight.take_stored`."""
        return super().take_stored(weights, shard.flattened, format)

    def describe(self, shard: Shard, dtypes: WeightDtypes) -> dict[str, tuple[Shape, np.dtype]]:
        """Return shape and dtype of each array of a rank by name."""
        return super().describe(shard.flattened, dtypes)
