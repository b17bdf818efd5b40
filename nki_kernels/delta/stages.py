"""The steps that a wave of units takes, with what they cost: see `delta/order.py`.

Times are those of four heads on trn2 in bfloat16, from the timelines that the simulator predicts, in ns.
"""

from __future__ import annotations

from nki_kernels.delta.blocks import BLOCK, add_up, begin, bring, bring_back, multiply, send, send_back
from nki_kernels.delta.chunks import (
    begin_wave,
    decay,
    gate,
    load,
    load_sums,
    normalise,
    read_keys,
    score,
    split,
    turn,
    weigh,
)
from nki_kernels.delta.inverse import join, join_halves, keep_joined, link, link_halves
from nki_kernels.delta.masks import LEVELS
from nki_kernels.delta.order import Chain
from nki_kernels.delta.walk import (
    advance,
    attend,
    begin_state,
    decayed,
    finish,
    measure,
    pairs_of,
    query_state,
    store,
    values,
    write,
)

NONE = (0, 0, 0, 0)


def bring_wave(case, wave):
    """Load the operands of a wave; a sequence's first chunk loads its state, too."""
    for unit in wave["units"]:
        load(case, unit)
        if unit["state"]["wide"] is None:
            begin_state(case, unit["state"])


def bring_sums(case, wave):
    """Load what the decays of a wave follow from."""
    for unit in wave["units"]:
        unit["sums"] = load_sums(case, unit) if case["differences"] is not None else None


def prepare(wave):
    """What needs neither inverse nor state."""
    steps = [(begin_wave, wave, NONE, 0)]
    for phase, times, next_one in (
        (normalise, (0, 70, 640, 470), 300),
        (decay, (430, 0, 570, 0), 300),
        (turn, (220, 0, 530, 0), 300),
        (score, (220, 1200, 0, 0), 300),
    ):
        for unit in wave["units"]:
            steps.append((phase, unit, times, next_one))
    return steps


def weigh_all(wave):
    """Scaled keys, and the factors of outputs."""
    steps = []
    for unit in wave["units"]:
        steps.append((weigh, unit, (0, 0, 0, 1100), 0))
    for unit in wave["units"]:
        steps.append((gate, unit, (0, 0, 610, 1650), 0))
    return steps


def invert_blocks(wave):
    """The inverses of the triangles' smallest blocks."""
    steps = [(send, wave, NONE, 3000), (bring, wave, NONE, 2500), (begin, wave, (0, 400, 0, 0), 600)]
    size = 2
    while size < BLOCK:
        terms = BLOCK // 2 * size * size
        for second in (False, True):
            steps.append((multiply, (wave, size, second), (0, 0, 0, 130 + terms), 170 + terms))
            steps.append((add_up, (wave, size, second), (0, 70 + terms, 0, 0), 210 + terms))
        size = 2 * size
    steps.append((send_back, wave, (0, 330, 270, 0), 2900))
    steps.append((bring_back, wave, NONE, 2300))
    return steps


def join_blocks(wave):
    """The inverses of the triangles, and what follows from them alone."""
    steps = [(split, wave, NONE, 0)]
    for level in range(len(LEVELS)):
        for phase, times, next_one in (
            (link, (240, 200, 0, 0), 200),
            (join, (590, 0, 0, 0), 250),
            (keep_joined, (0, 0, 320, 0), 200),
        ):
            for unit in wave["units"]:
                steps.append((at_level, (phase, unit, level), times, next_one))
    for phase, times, next_one in (
        (link_halves, (120, 0, 270, 0), 200),
        (join_halves, (120, 330, 0, 0), 200),
        (read_keys, (400, 0, 480, 0), 250),
    ):
        for unit in wave["units"]:
            steps.append((phase, unit, times, next_one))
    return steps


def at_level(case, part):
    """A phase of a level."""
    phase, unit, level = part
    phase(case, unit, level)


def walk(wave):
    """The state through the chunks; the outputs of a unit come behind the next one's first steps."""
    steps = []
    before, earlier = None, None
    for unit in wave["units"]:
        pairs = len(pairs_of(unit))
        for pair in range(pairs):
            steps.append((values, (unit, pair), (170, 0, 0, 0), 0))
        for pair in range(pairs):
            steps.append((write, (unit, pair), (110, 0, 270, 0), 320))
        steps.append((query_state, unit, (220, 0, 0, 0), 0))
        if before is not None:
            steps.append((measure, before, (0, 70, 640, 0), 0))
        for pair in range(pairs):
            steps.append((advance, (unit, pair), (110, 400, 270, 0), 500))
        steps.append((decayed, unit, (0, 0, 630, 0), 200))
        steps.append((attend, unit, (440, 0, 0, 0), 200))
        if earlier is not None:
            steps.append((store, earlier, NONE, 0))
        if before is not None:
            steps.append((finish, before, (0, 800, 60, 0), 0))
        before, earlier = unit, before
    steps.append((measure, before, (0, 70, 640, 0), 0))
    wave["finished"] = (earlier, before)
    return steps


def end(wave):
    """The last outputs of a wave."""
    steps = []
    earlier, before = wave["finished"]
    if earlier is not None:
        steps.append((store, earlier, NONE, 800))
    steps.append((finish, before, (0, 800, 60, 0), 1800))
    steps.append((store, before, NONE, 0))
    return steps


def chains_of(waves):
    """The chains of all waves, the first of which is loaded: no more than `AHEAD` waves are on their way."""
    chains, prepared, ended = [], [], []
    loaded, inverted, weighed, joined, walked = [], [], [], [], []
    for wave in waves:
        steps = [(bring_wave, wave, NONE, 2500)] if len(ended) > 0 else []
        loaded = [Chain(steps, loaded + before_last(ended, AHEAD))]
        brought = [Chain([(bring_sums, wave, NONE, 2500)], before_last(prepared, SUMS_AHEAD))]
        prepared.append(Chain(prepare(wave), loaded + brought + before_last(prepared, 1)))
        first = before_last(prepared, 1)
        inverted = [Chain(invert_blocks(wave), first + inverted)]
        weighed = [Chain(weigh_all(wave), first + weighed)]
        joined = [Chain(join_blocks(wave), inverted + weighed + joined)]
        walked = [Chain(walk(wave), joined + walked)]
        ended.append(Chain(end(wave), walked))
        for found in (loaded, brought, first, inverted, weighed, joined, walked, before_last(ended, 1)):
            chains.extend(found)
    return chains


def before_last(chains, count):
    """The chain that is the last but `count` - 1, in a list of its own; none if there are fewer."""
    if len(chains) < count:
        return []
    return [chains[len(chains) - count]]


AHEAD = 3
"""Waves on their way at a time."""

SUMS_AHEAD = 2
"""Waves whose decays are on their way at a time: `Differences` has tiles for eight units, two waves."""
