"""Graphs of an engine for `nkw compile`: launches that are compiled together.

There is a graph for each step that the engine's buckets allow, and for each number of copied pages or slots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from model.config import ModelConfig
from model.engine.buckets import Buckets
from model.execution.launch_list import list_copies, list_copy_sizes, list_launches, list_packs
from model.families import compose
from model.layers.launch import Launch, Phase, StepShape
from model.layers.paged import NEWEST, STATES, CacheGroup, find_padding_page
from model.layers.sample import DRAWS


@dataclass(frozen=True)
class Graph:
    """Launches that are compiled together.

    Attributes:
        step: Kind of the step, such as decode.
        label: Shape of the step in words.
        size: Numbers that order the graphs of one kind of step.
        launches: The launches in their order.
    """

    step: str
    label: str
    size: tuple[int, ...]
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        """Return the line of the graph in printed lists."""
        return self.label


@dataclass(frozen=True)
class StepGraph(Graph):
    """Graph of a step of one shape. The step draws the next tokens on the chip if `shape.draws` is not None."""

    shape: StepShape

    def __str__(self) -> str:
        """Return the line of the graph in printed lists: kind, shape and, if the step draws tokens, its candidates."""
        draws = self.shape.draws
        if draws is None:
            return f"{self.step}: {self.label}"
        vocabulary = " of the whole vocabulary" if draws.full_vocabulary else ""
        return f"{self.step}: {self.label}, draws from {draws.candidates}{vocabulary}"


@dataclass(frozen=True)
class CopyGraph(Graph):
    """Graph of the copies of `count` pages or slots of a cache group, in every layer that has them."""

    count: int
    cache_group: CacheGroup

    def __str__(self) -> str:
        """Return the line of the graph in printed lists."""
        return f"{self.label} copied"


@dataclass(frozen=True)
class PackGraph(Graph):
    """Graph that packs `count` full pages to four bits, in every layer."""

    count: int


@dataclass(frozen=True)
class Environment:
    """Environment of a compilation, on which a compiled graph depends in addition to its launches.

    Attributes:
        target: Chip.
        ranks: Number of ranks.
        logical_core: Number of physical cores of a rank.
        versions: Versions of the vendor's packages by name.
    """

    target: str
    ranks: int
    logical_core: int
    versions: Mapping[str, str]


def list_graphs(config: ModelConfig, buckets: Buckets, cache_groups: Sequence[CacheGroup]) -> list[Graph]:
    """Return all graphs that an engine may launch, except prompts that score all tokens.

    Args:
        config: The model.
        buckets: The bucket sizes of the model.
        cache_groups: Windows of page pools, None for pages of all positions, and `STATES` for slots.
    """
    network, largest = compose(config), buckets.model_step
    graphs: list[Graph] = []
    for bucket in buckets.shapes():
        for draws in (None, *DRAWS):
            shape = replace(bucket, draws=draws)
            launches = (launch for section in network.sections for launch in list_launches(section, shape))
            size = shape.tokens, shape.cache_length, shape.prefix
            graphs.append(StepGraph(_name_step(shape), str(shape), size, tuple(launches), shape))
    for earlier in network.before.values():
        step = earlier.step(largest)
        encoder = (launch for section in earlier.sections for launch in list_launches(section, step))
        graphs.append(Graph("encoder", "1 window of speech encoded", (1,), tuple(encoder)))
    for group in cache_groups:
        count = 1
        while count <= find_padding_page(largest, group) and list_copy_sizes(count) == [count]:
            copies = tuple(list_copies(network.layers, largest, count, group))
            if copies:  # slots of speech windows are never copied
                label = _describe_copies(count, group)
                graphs.append(CopyGraph("copies", label, (count,), copies, count, group))
            packs = tuple(list_packs(network.layers, largest, count)) if group == NEWEST else ()
            if packs:
                label = f"{count} full page{'s' if count > 1 else ''} packed"
                graphs.append(PackGraph("packs", label, (count,), packs, count))
            count *= 2
    return graphs


def _name_step(shape: StepShape) -> str:
    """Return the kind of a step: "decode", "prompts", or "prompts with decode" if both are in the same launches."""
    if shape.phase is Phase.decode:
        return "decode"
    return "prompts" if shape.decoding is None else "prompts with decode"


def _describe_copies(count: int, group: CacheGroup) -> str:
    """Return the number of copied pages or slots in words, such as "2 pages of a window of 128"."""
    noun = "slot" if group == STATES else "page"
    window = f" of a window of {group}" if isinstance(group, int) else ""
    return f"{count} {noun}{'s' if count > 1 else ''}{window}"


def summarise_graphs(graphs: Sequence[Graph]) -> Iterator[str]:
    """Yield a line for each kind of step: its number of graphs, and the smallest and the largest graph."""
    for step in dict.fromkeys(graph.step for graph in graphs):
        smallest, *larger = sorted(
            (graph for graph in graphs if graph.step == step), key=lambda graph: graph.size
        )
        if larger:
            yield f"{step}: {1 + len(larger)} graphs, from {smallest.label} to {larger[-1].label}"
        else:
            yield f"{step}: 1 graph, {smallest.label}"


def hash_graph(graph: Graph, environment: Environment, hash_sources: Callable[[str], str]) -> str:
    """Return the key of a compiled graph: equal for equal launches, kernel sources and environments.

    Args:
        graph: The graph.
        environment: Chip, ranks and versions.
        hash_sources: Returns the digest of the sources of a kernel, by the kernel's name.

    Returns:
        32 hexadecimal digits.
    """
    launches = [
        [
            launch.kernel,
            {parameter: repr(argument) for parameter, argument in launch.arguments.items()},
            list(launch.results),
        ]
        for launch in graph.launches
    ]
    kernels = sorted({launch.kernel for launch in graph.launches})
    inputs = {
        "launches": launches,
        "sources": {kernel: hash_sources(kernel) for kernel in kernels},
        "target": environment.target,
        "ranks": environment.ranks,
        "logical_core": environment.logical_core,
        "versions": dict(environment.versions),
    }
    return blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=16).hexdigest()
