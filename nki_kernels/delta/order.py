"""The order in which steps of several chains are issued: each engine takes its instructions in that order.

The steps of a chain follow one another; chains wait for the end of others. A step says how long it keeps the Tensor,
Vector, Scalar and GpSimd engines, and when the next one of its chain can start. Of the next steps of all chains the one
that can start first is issued, of equals that of the older chain. The times decide nothing but the order.
"""

from __future__ import annotations

import nki.language as nl

ENGINES = 4

SLACK = 3.0
"""How many times as long the next step of a chain is put off: what other chains do meanwhile keeps engines busy."""


class Chain(nl.NKIObject):
    """Steps (function, part, times of the engines in ns, time until the next step in ns), and chains to wait for."""

    def __init__(self, steps, behind):
        self.steps = steps
        self.behind = behind
        self.issued = 0
        self.ready = 0.0

    def finished(self):
        """Whether all of its steps are issued."""
        return self.issued == len(self.steps)

    def start(self, free):
        """When its next step can start, or None while it waits for a chain."""
        first = self.ready
        for other in self.behind:
            if not other.finished():
                return None
            first = max(first, other.ready)
        times = self.steps[self.issued][2]
        for engine in range(ENGINES):
            if times[engine] > 0:
                first = max(first, free[engine])
        return first

    def issue(self, case, start, free):
        """Issue its next step, which keeps its engines from the start on."""
        step, part, times, next_one = self.steps[self.issued]
        for engine in range(ENGINES):
            if times[engine] > 0:
                free[engine] = start + times[engine]
        self.ready = start + SLACK * next_one
        self.issued += 1
        step(case, part)


def issue_all(case, chains):
    """Issue all steps of all chains."""
    free = [0.0] * ENGINES
    waiting = unfinished(chains)
    while len(waiting) > 0:
        chosen, earliest = None, 0.0
        for chain in waiting[0:LOOK_AHEAD]:
            start = chain.start(free)
            if start is not None and (chosen is None or start < earliest):
                chosen, earliest = chain, start
        chosen.issue(case, earliest, free)
        if chosen.finished():
            waiting = unfinished(waiting)


def unfinished(chains):
    """Those chains that have steps left."""
    found = []
    for chain in chains:
        if not chain.finished():
            found.append(chain)
    return found


LOOK_AHEAD = 40
"""How many unfinished chains, the oldest first, are searched for the next step: those of some waves."""
