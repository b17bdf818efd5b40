"""The graphs of an engine: the launches of every step that its buckets allow, and of copies of pages and slots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from model.config import ModelConfig
from model.engine.buckets import Buckets
from model.execution.launch_list import copies_of, copy_sizes, launches_of
from model.families import compose
from model.layers.launch import Launch, Phase, StepShape
from model.layers.paged import STATES, CacheGroup, spare
from model.layers.sample import DRAWS


@dataclass(frozen=True)
class StepGraph:
    """A step of one shape, with or without drawing the next tokens."""

    step: StepShape
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        draws = self.step.draws
        if draws is None:
            return f"{self.of}: {self.step}"
        whole = " of the whole vocabulary" if draws.full_vocabulary else ""
        return f"{self.of}: {self.step}, draws from {draws.candidates}{whole}"

    @property
    def of(self) -> str:
        """The kind of step."""
        if self.step.phase is Phase.decode:
            return "decode"
        return "prompts" if self.step.decoding is None else "prompts with decode"

    @property
    def size(self) -> tuple[int, ...]:
        """Tokens, padding included, and positions that are read: what larger steps of a kind have more of."""
        return self.step.tokens, self.step.cache_length, self.step.prefix


@dataclass(frozen=True)
class CopyGraph:
    """Copies of so many pages of a kind, or slots, in every layer that has them."""

    count: int
    kind: CacheGroup
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        what = "slot" if self.kind == STATES else "page"
        window = f" of a window of {self.kind}" if isinstance(self.kind, int) else ""
        return f"{self.count} {what}{'s' if self.count > 1 else ''}{window} copied"

    @property
    def of(self) -> str:
        """The kind of step."""
        return "copies"

    @property
    def size(self) -> tuple[int, ...]:
        """How many pages or slots."""
        return (self.count,)


@dataclass(frozen=True)
class EncoderGraph:
    """The encoder on a window of speech, which the steps of prompts launch before their own graphs."""

    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        return "1 window of speech encoded"

    @property
    def of(self) -> str:
        """The kind of step."""
        return "encoder"

    @property
    def size(self) -> tuple[int, ...]:
        """The number of windows."""
        return (1,)


Graph = StepGraph | CopyGraph | EncoderGraph


@dataclass(frozen=True)
class Environment:
    """What besides its launches decides what a graph is compiled to.

    `logical_core` is the number of physical cores of each rank; `versions` are those of the vendor's packages.
    """

    target: str
    ranks: int
    logical_core: int
    versions: Mapping[str, str]


def graphs_of(config: ModelConfig, buckets: Buckets, kinds: Sequence[CacheGroup]) -> list[Graph]:
    """Return every graph that an engine may launch, except those of prompts whose every token is scored."""
    network, largest = compose(config), buckets.model_step
    graphs: list[Graph] = []
    for shape in buckets.shapes():
        for draws in (None, *DRAWS):
            step = replace(shape, draws=draws)
            launches = (launch for section in network.sections for launch in launches_of(section, step))
            graphs.append(StepGraph(step, tuple(launches)))
    for earlier in network.before.values():
        step = earlier.step(largest)
        launched = (launch for section in earlier.sections for launch in launches_of(section, step))
        graphs.append(EncoderGraph(tuple(launched)))
    for kind in kinds:
        count = 1
        while count <= spare(largest, kind) and copy_sizes(count) == [count]:
            copies = tuple(copies_of(network.layers, largest, count, kind))
            if copies:  # nobody copies the slot of a window
                graphs.append(CopyGraph(count, kind, copies))
            count *= 2
    return graphs


def summary(graphs: Sequence[Graph]) -> list[str]:
    """A line for each kind of step: how many graphs, the smallest and the largest."""
    kinds: dict[str, list[Graph]] = {}
    for graph in graphs:
        kinds.setdefault(graph.of, []).append(graph)
    return [
        f"{kind}: {len(own)} graphs, from {_shape(min(own, key=_size))} to {_shape(max(own, key=_size))}"
        if len(own) > 1
        else f"{kind}: 1 graph, {_shape(own[0])}"
        for kind, own in kinds.items()
    ]


def _size(graph: Graph) -> tuple[int, ...]:
    return graph.size


def _shape(graph: Graph) -> str:
    return str(graph.step) if isinstance(graph, StepGraph) else str(graph).removesuffix(" copied")


def graph_key(graph: Graph, environment: Environment, source_digest: Callable[[str], str]) -> str:
    """A name for what a graph is compiled to: equal for equal launches, kernels' sources and compilers.

    `source_digest` tells the sources of a kernel. The result depends on the arguments alone.
    """
    launches = [
        [
            launch.kernel,
            {parameter: repr(argument) for parameter, argument in launch.arguments.items()},
            list(launch.results),
        ]
        for launch in graph.launches
    ]
    kernels = sorted({each.kernel for each in graph.launches})
    told = {
        "launches": launches,
        "sources": {kernel: source_digest(kernel) for kernel in kernels},
        "target": environment.target,
        "ranks": environment.ranks,
        "logical_core": environment.logical_core,
        "versions": dict(environment.versions),
    }
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()
