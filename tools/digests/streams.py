"""Digests of the instruction streams of kernels, from dry launches, which compute no values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import nki_kernels
import simulate
from benchmarks.kernels.__main__ import TABLES, list_works
from benchmarks.kernels.measure import create_stand_ins
from simulate.run.stream import Stream
from tools.mutants.cases import cases
from tools.timelines import TARGETS
from tools.timelines import cases as examples


def stream_digests() -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of each launch.

    The launches are the works of the stored tables, the cases of the mutants, and the examples of instructions.
    """
    for target, cores in TABLES:
        for work in list_works(cores):
            for index, launch in enumerate(work.launches):
                kernel, arguments = launch.kernel, create_stand_ins(launch)
                name = f"work {target}/{cores} {work.title} #{index} {kernel}"
                yield name, _launch(kernel, target, cores, [arguments])
    for index, case in enumerate(cases()):
        name = f"case {index} {case.kernel} {case.target}/{case.cores} x {case.ranks}"
        yield name, _launch(case.kernel, case.target, case.cores, case.arguments)
    for example in examples():
        for target in TARGETS:
            arguments = [example.arguments] * example.ranks
            yield f"example {target} {example.name}", _launch(example.kernel, target, 1, arguments)


def _launch(kernel: Any, target: str, cores: int, arguments: Sequence[tuple[Any, ...]]) -> str:
    """Return the digest of a dry launch, or the first line of its refusal.

    arguments: positional arguments of each rank. cores: physical cores per rank.
    """
    function = getattr(nki_kernels, kernel) if isinstance(kernel, str) else kernel
    world = simulate.World(target, len(arguments), cores)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(positional, {}) for positional in arguments]
    try:
        return digest(world.launch(function, calls, mode=simulate.Mode.dry, trips=0).streams)
    except (AssertionError, simulate.NkwError) as error:
        return f"refused: {str(error).splitlines()[0]}"


def digest(streams: Sequence[Stream]) -> str:
    """Return the number of instructions and a hash of their order, engines, costs and operands.

    Source lines and names of variables are left out. Tensors are numbered by their first use.
    """
    hashed, count = hashlib.sha256(), 0
    for stream in streams:
        text = re.sub(r"  @\d+$", "", stream.text(), flags=re.MULTILINE)
        text = re.sub(r"(?<=[ =])[A-Za-z_][^\s#=]*(#\d+\[)", r"\1", text)
        hashed.update(_renumber(text).encode())
        count += len(stream)
    return f"{count} {hashed.hexdigest()[:24]}"


def _renumber(text: str) -> str:
    """Return a stream's text with tensors numbered by their first use, so that their names do not matter."""
    numbers: dict[str, int] = {}
    return re.sub(r"#(\d+)", lambda match: f"#{numbers.setdefault(match[1], len(numbers))}", text)
