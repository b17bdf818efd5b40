"""The order in which steps of several chains are issued: each engine takes its instructions in that order.

`gated_delta` plans chains of steps, and `issue_all` interleaves them while the kernel is traced. The steps of
a chain follow one another; a chain waits for the end of other chains. A step says how long it keeps the
Tensor, Vector, Scalar and GpSimd engines, and when the next step of its chain can start. Of the next steps of
all chains the step that can start first is issued; ties go to the older chain. The times decide nothing but
the order.
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

    engine_times: how long it keeps the Tensor, Vector, Scalar and GpSimd engines. delay: from its start to
    that of the next step of its chain. Both are in ns.
    """

    run: object
    target: nl.NKIObject
    engine_times: tuple
    delay: float


@dataclass
class Chain(nl.NKIObject):
    """Steps that follow one another, and the chains whose end they wait for.

    issued: how many of its steps are issued. ready: the planned time from which the next step may start, in
    ns.
    """

    steps: list
    predecessors: list
    issued: int = 0
    ready: float = 0.0

    def is_finished(self):
        """Return whether all of the chain's steps are issued."""
        return self.issued == len(self.steps)

    def find_start(self, free):
        """Return the planned time in ns at which the chain's next step can start.

        Returns None if a predecessor is not finished.

        Args:
            free: for each of the four engines, the planned time from which it is free, in ns.
        """
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
        """Run the chain's next step, which emits its instructions, and count it as issued.

        Sets `ready`, and the entries of `free` for the engines that the step keeps: planned times in ns.

        Args:
            start: the planned start of the step in ns, from `find_start`.
            free: for each of the four engines, the planned time from which it is free.
        """
        step = self.steps[self.issued]
        for engine in range(ENGINES):
            if step.engine_times[engine] > 0:
                free[engine] = start + step.engine_times[engine]
        self.ready = start + DELAY_FACTOR * step.delay
        self.issued += 1
        step.run(step.target, prompt)


def issue_all(prompt, chains):
    """Issue all steps of all chains, the step that can start first before the others.

    Args:
        prompt: the `Prompt` that is passed to every step's method.
        chains: in order of age; a chain comes after its predecessors.
    """
    free = [0.0] * ENGINES
    waiting = select_unfinished(chains)
    while len(waiting) > 0:
        chosen, earliest = None, 0.0
        for chain in waiting[0:LOOK_AHEAD]:
            start = chain.find_start(free)
            if start is not None and (chosen is None or start < earliest):
                chosen, earliest = chain, start
        chosen.issue(prompt, earliest, free)
        if chosen.is_finished():
            waiting = select_unfinished(waiting)


def select_unfinished(chains):
    """Return a new list, in order, of the chains of which not all steps are issued."""
    remaining = []
    for chain in chains:
        if not chain.is_finished():
            remaining.append(chain)
    return remaining


LOOK_AHEAD = 40
"""How many unfinished chains, the oldest first, are searched for the next step."""
