"""The order in which steps of several chains are issued: each engine takes its instructions in that order.

The steps of a chain follow one another; chains wait for the end of others. A step says how long it keeps the Tensor,
Vector, Scalar and GpSimd engines, and when the next one of its chain can start. Of the next steps of all chains the one
that can start first is issued, of equals that of the older chain. The times decide nothing but the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

ENGINES = 4

DELAY_FACTOR = 3.0
"""Factor on a step's delay: the next step of its chain is planned later, because other chains share the engines."""


@dataclass
class Step(nl.NKIObject):
    """An entry of a chain: `run(target, prompt)` issues its instructions; `run` is a method of the target's class.

    engine_times: how long it keeps the Tensor, Vector, Scalar and GpSimd engines. delay: from its start to that of the
    next step of its chain. Both are in ns.
    """

    run: object
    target: nl.NKIObject
    engine_times: tuple
    delay: float


@dataclass
class Chain(nl.NKIObject):
    """Steps that follow one another, and the chains whose end they wait for.

    issued: how many of its steps are issued. ready: when the next one may start, in ns.
    """

    steps: list
    predecessors: list
    issued: int = 0
    ready: float = 0.0

    def is_finished(self):
        """Return whether all of its steps are issued."""
        return self.issued == len(self.steps)

    def start(self, free):
        """Return when its next step can start, or None while it waits for a chain."""
        first = self.ready
        for chain in self.predecessors:
            if not chain.is_finished():
                return None
            first = max(first, chain.ready)
        times = self.steps[self.issued].engine_times
        for engine in range(ENGINES):
            if times[engine] > 0:
                first = max(first, free[engine])
        return first

    def issue(self, prompt, start, free):
        """Issue its next step, which keeps its engines from the start on."""
        step = self.steps[self.issued]
        for engine in range(ENGINES):
            if step.engine_times[engine] > 0:
                free[engine] = start + step.engine_times[engine]
        self.ready = start + DELAY_FACTOR * step.delay
        self.issued += 1
        step.run(step.target, prompt)


def issue_all(prompt, chains):
    """Issue all steps of all chains."""
    free = [0.0] * ENGINES
    waiting = unfinished(chains)
    while len(waiting) > 0:
        chosen, earliest = None, 0.0
        for chain in waiting[0:LOOK_AHEAD]:
            start = chain.start(free)
            if start is not None and (chosen is None or start < earliest):
                chosen, earliest = chain, start
        chosen.issue(prompt, earliest, free)
        if chosen.is_finished():
            waiting = unfinished(waiting)


def unfinished(chains):
    """Return the chains that have steps left."""
    remaining = []
    for chain in chains:
        if not chain.is_finished():
            remaining.append(chain)
    return remaining


LOOK_AHEAD = 40
"""How many unfinished chains, the oldest first, are searched for the next step."""
