"""The stages of a pipeline: the layers of each stage, and the values that it sends to the next stage.

A stage has neighbouring sections of a network; the first and the last section belong to the first and the last stage.
A value is sent if launches before a cut return it and launches after the cut read it: the residual stream, and values
that a model computes once for several layers. States are not sent, so layers that share a cache are in one stage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from math import inf, prod

from model.errors import ModelError
from model.layers.launch import (
    FLOAT32,
    PARTITIONS,
    Argument,
    Axis,
    Launch,
    Phase,
    StepShape,
    Value,
    WeightDtypes,
    count_copy_work,
)
from model.layers.layer import Layer, list_states
from model.mesh import Mesh
from model.network import Network, Section

SEND = "send_receive"
"""The kernel that sends a value from one stage to the next."""


def divide_stages(network: Network, count: int, step: StepShape) -> list[tuple[Section, ...]]:
    """Return the sections of each of `count` pipeline stages.

    Stages have nearly equal numbers of weights; the last stage's include the last section.

    Args:
        network: The network.
        count: The number of stages.
        step: A step, of which only the ranks matter.

    Raises:
        ModelError: The network has fewer blocks than stages, or too few cuts without a shared cache.
    """
    if count == 1:
        return [network.sections]
    first_section, *blocks, last_section = network.sections
    costs = [_count_weights(block, step) for block in blocks]
    costs[-1] += _count_weights(last_section, step)
    stages = divide_evenly(costs, count, find_stage_ends(network, step))
    inner = [tuple(blocks[stage.start : stage.stop]) for stage in stages]
    inner[0] = (first_section, *inner[0])
    inner[-1] = (*inner[-1], last_section)
    return inner


def find_stage_ends(network: Network, step: StepShape) -> list[int]:
    """Return the numbers of decoder layers after which a pipeline stage may end.

    A stage may not end where a state would be used by layers on both sides.
    """
    states = {state.name for block in network.blocks for layer in block for state in list_states(layer, step)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, block in enumerate(network.blocks):
        for launch in _iterate_launches((block,), step):
            for name in states.intersection((*launch.results, *(value.name for value in launch.values))):
                last[name] = number
                first.setdefault(name, number)
    shared = [(first[name], last[name]) for name in first if first[name] < last[name]]
    return [
        count
        for count in range(1, len(network.blocks))
        if not any(writer < count <= reader for writer, reader in shared)
    ]


def find_sent_values(before: Iterable[Section], after: Iterable[Section], step: StepShape) -> list[Value]:
    """Return the values that one pipeline stage sends to the next: returned before a cut, and read after the cut.

    Args:
        before: All sections before the cut.
        after: All sections after the cut.
        step: The sizes of the step.

    Returns:
        Each value once, in the form of its first reader.
    """
    returned = {name for launch in _iterate_launches(before, step) for name in launch.results}
    values: dict[str, Value] = {}
    for launch in _iterate_launches(after, step):
        for value in launch.values:
            if value.name in returned:
                values.setdefault(value.name, value)
        returned.difference_update(launch.results)
    return list(values.values())


def launch_send(value: Value) -> Launch:
    """Return the launch of the kernel `send_receive` that sends a value to the next pipeline stage."""
    arguments: dict[str, Argument] = {"x": value, "source_target_pairs": Axis.pipeline}
    return Launch(SEND, arguments, (value.name,), count_copy_work(value), value.shape[0])


def divide_evenly(costs: Sequence[int], count: int, cuts: Collection[int]) -> list[range]:
    """Return `count` ranges of neighbouring indices of `costs` with nearly equal sums.

    The largest sum is minimal, and for that maximum the sum of squares is minimal.

    Args:
        costs: The cost of each block.
        count: The number of ranges.
        cuts: The indices at which a range may end.

    Raises:
        ModelError: There are fewer cuts than needed.
    """
    ends = [0, *sorted(cuts), len(costs)]
    if count > len(ends) - 1:
        alike = "" if len(cuts) == len(costs) - 1 else ", some of which share a cache"
        raise ModelError(
            f"{count} pipeline stages for {len(costs)} layers{alike}; this model takes --pp 1 to {len(ends) - 1}"
        )
    sums = [0, *accumulate(costs)]

    def is_sufficient(limit: int) -> bool:
        """Return whether `count` ranges that end at allowed indices, each with a sum up to `limit`, cover all costs."""
        end = 0
        for _ in range(count):
            end = bisect_right(end_sums, end_sums[end] + limit) - 1
        return end == len(ends) - 1

    end_sums = [sums[end] for end in ends]
    largest = bisect_left(range(sums[-1]), True, key=is_sufficient)
    best: list[tuple[float, list[int]]] = [(inf, [0])] * len(ends)
    best[0] = (0.0, [0])
    for _ in range(count):
        best = [
            min(
                (
                    (cost + (end_sums[index] - sums[chosen[-1]]) ** 2, [*chosen, end])
                    for cost, chosen in best[
                        bisect_left(end_sums, end_sums[index] - largest, hi=index) : index
                    ]
                    if cost < inf
                ),
                default=(inf, [0]),
            )
            for index, end in enumerate(ends)
        ]
    return [range(first, last) for first, last in pairwise(best[-1][1])]


def _iterate_launches(sections: Iterable[Section], step: StepShape) -> Iterable[Launch]:
    return (launch for layer in chain.from_iterable(sections) for launch in layer.launches(step))


def _count_weights(section: Sequence[Layer], step: StepShape) -> int:
    """Return the number of weight elements that one rank holds of a section."""
    return sum(prod(weight.shape(step.shard)) for layer in section for weight in layer.weights)


def list_stage_layers(network: Network, mesh: Mesh, rank: int) -> list[Layer]:
    """Return the layers whose weights a rank holds: those of its pipeline stage.

    With one stage, these are all layers, those of preceding networks included.
    """
    if mesh.pipeline == 1:
        return list(network.all_layers)
    step = StepShape(
        Phase.prefill,
        1,
        1,
        PARTITIONS,
        PARTITIONS,
        mesh.tensor,
        FLOAT32,
        WeightDtypes(FLOAT32),
        expert_ranks=mesh.expert,
    )
    sections = divide_stages(network, mesh.pipeline, step)[mesh.find_stage(rank)]
    return [layer for section in sections for layer in section]
