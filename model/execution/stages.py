"""The stages of a pipeline: which layers each holds, and which values pass from one to the next.

A stage holds neighbouring sections of a network; its first and its last section stay with their neighbours. A value
passes where launches before it return it and launches behind it read it: the residual stream, and what a model
computes once for several layers. States do not pass, so layers that read the cache of another one lie on its stage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from math import inf, prod

import numpy as np

from model.errors import ModelError
from model.layers.launch import (
    PARTITIONS,
    Argument,
    Axis,
    Launch,
    Phase,
    StepShape,
    Value,
    WeightDtypes,
    copied,
)
from model.layers.layer import Layer, states_of
from model.mesh import Mesh
from model.network import Network, Section

SEND = "send_receive"
"""The kernel that passes a value from a stage to the next."""


def stages_of(network: Network, count: int, step: StepShape) -> list[tuple[Section, ...]]:
    """The sections of a network, stage by stage; ModelError where it has fewer blocks than stages, or none to cut at.

    Stages are even in the weights that a step reads: those of the blocks and of the last section. So only the ranks of
    a step decide, and neither its size nor its dtypes.
    """
    if count == 1:
        return [network.sections]
    first_section, *blocks, last_section = network.sections
    costs = [_weights(block, step) for block in blocks]
    costs[-1] += _weights(last_section, step)
    stages = divided(costs, count, whole_cuts(network, step))
    inner = [tuple(blocks[stage.start : stage.stop]) for stage in stages]
    inner[0] = (first_section, *inner[0])
    inner[-1] = (*inner[-1], last_section)
    return inner


def whole_cuts(network: Network, step: StepShape) -> list[int]:
    """The numbers of blocks after which a stage may end: no state is read on both sides."""
    states = {state.name for block in network.blocks for layer in block for state in states_of(layer, step)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, block in enumerate(network.blocks):
        for launch in _launches((block,), step):
            for name in states.intersection((*launch.results, *(value.name for value in launch.values))):
                last[name] = number
                first.setdefault(name, number)
    shared = [(first[name], last[name]) for name in first if first[name] < last[name]]
    return [
        count
        for count in range(1, len(network.blocks))
        if not any(writer < count <= reader for writer, reader in shared)
    ]


def sent(before: Iterable[Section], after: Iterable[Section], step: StepShape) -> list[Value]:
    """The values that layers `before` a cut return and layers `after` it read, as the latter see them."""
    return _passed(_launches(before, step), _launches(after, step))


def _passed(before: Iterable[Launch], after: Iterable[Launch]) -> list[Value]:
    returned = {name for launch in before for name in launch.results}
    found: dict[str, Value] = {}
    for launch in after:
        read = (value for value in launch.values if value.name in returned)
        found.update({value.name: found.get(value.name, value) for value in read})
        returned.difference_update(launch.results)
    return list(found.values())


def send(value: Value) -> Launch:
    """The launch that passes a value on."""
    arguments: dict[str, Argument] = {"x": value, "source_target_pairs": Axis.pipeline}
    return Launch(SEND, arguments, (value.name,), copied(value), value.shape[0])


def divided(costs: Sequence[int], parts: int, cuts: Collection[int]) -> list[range]:
    """Neighbouring numbers of `costs` in so many parts, the largest as small as it can be, all as even as that allows.

    `cuts` are the numbers after which a part may end; ModelError where there are too few.
    """
    ends = [0, *sorted(cuts), len(costs)]
    if parts > len(ends) - 1:
        alike = "" if len(cuts) == len(costs) - 1 else ", some of which share a cache"
        raise ModelError(
            f"{parts} pipeline stages for {len(costs)} layers{alike}; this model takes --pp 1 to {len(ends) - 1}"
        )
    sums = [0, *accumulate(costs)]

    def count_parts(largest: int) -> int:
        """Count the parts of at most `largest`, each as long as it can be; more than there are ends where none fits."""
        count, first = 0, 0
        while first < len(ends) - 1 and count < parts + 1:
            last = bisect_right(end_sums, sums[ends[first]] + largest) - 1
            count, first = (count + 1, last) if last > first else (parts + 1, first)
        return count

    end_sums = [sums[end] for end in ends]
    largest = bisect_left(range(sums[-1]), True, key=lambda limit: count_parts(limit) <= parts)
    best: list[tuple[float, list[int]]] = [(inf, [0])] * len(ends)
    best[0] = (0.0, [0])
    for _ in range(parts):
        best = [
            min(
                (
                    (value + (end_sums[at] - sums[chosen[-1]]) ** 2, [*chosen, end])
                    for value, chosen in best[bisect_left(end_sums, end_sums[at] - largest, hi=at) : at]
                    if value < inf
                ),
                default=(inf, [0]),
            )
            for at, end in enumerate(ends)
        ]
    return [range(first, last) for first, last in pairwise(best[-1][1])]


def _launches(sections: Iterable[Section], step: StepShape) -> Iterable[Launch]:
    return (launch for layer in chain.from_iterable(sections) for launch in layer.launches(step))


def _weights(section: Sequence[Layer], step: StepShape) -> int:
    weights = (weight for layer in section for weight in layer.weights)
    return sum(prod(each.shape(step.shard)) for each in weights)


def layers_of_stage(network: Network, mesh: Mesh, rank: int) -> list[Layer]:
    """The layers whose weights a rank holds; all where there is one stage, those of networks before too."""
    if mesh.pipeline == 1:
        return list(network.all_layers)
    held = np.dtype(np.float32)
    step = StepShape(
        Phase.prefill,
        1,
        1,
        PARTITIONS,
        PARTITIONS,
        mesh.tensor,
        held,
        WeightDtypes(held),
        expert_ranks=mesh.expert,
    )
    stages = stages_of(network, mesh.pipeline, step)
    return [layer for section in stages[mesh.stage_of(rank)] for layer in section]
