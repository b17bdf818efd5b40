"""The steps of `gated_delta`: what each stage takes from a unit or wave and gives it, and what it costs.

The first half has one function for each step, which `Chain.issue` calls with the prompt and the step's target. The
second half has the steps of each chain. Times are those of four heads on trn2 in bfloat16, from the timelines that the
simulator predicts, in ns.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.blocks import (
    BLOCK,
    IN_TURN,
    BlockInverse,
    first_terms,
    invert_pairs,
    load_blocks,
    load_squares,
    second_terms,
    store_inverses,
    store_triangles,
    sum_inner,
    sum_into,
)
from nki_kernels.delta.chunk_states import (
    advance_state,
    attend,
    decay_queried,
    mean_squares,
    multiply_values,
    query_state,
    split_state,
    subtract_predictions,
)
from nki_kernels.delta.chunks import (
    decay_between,
    load_operands,
    load_sums,
    norm_offsets,
    normalise_keys,
    read_keys,
    score,
    transpose_heads,
    weigh_keys,
)
from nki_kernels.delta.inverse import IN_TURN as RIGHT_OPERANDS
from nki_kernels.delta.inverse import join, join_halves, link, link_halves, select_blocks
from nki_kernels.delta.masks import LEVELS
from nki_kernels.delta.order import Step
from nki_kernels.delta.output import gate_factors, gated_norm
from nki_kernels.delta.states import load_state, store_state
from nki_kernels.delta.units import BlockLevel, ChunkInverse, JoinLevel
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS

IDLE = (0, 0, 0, 0)
"""Times of a step that keeps no engine."""


def run_load(prompt, wave):
    """Load the operands of a wave; a sequence's first chunk loads its state, too."""
    arguments = prompt.arguments
    for unit in wave.units:
        unit.operands = load_operands(arguments, unit)
        state = unit.state
        if len(state.pairs) == 0:
            number = prompt.slots.read[0:1, state.sequence : state.sequence + 1]
            state.pairs = split_state(load_state(arguments.states, number, state.heads), arguments.qkv.dtype)


def run_load_sums(prompt, wave):
    """Load what the decays of a wave follow from."""
    if prompt.differences is not None:
        for unit in wave.units:
            unit.scores.sums = load_sums(prompt.differences, prompt.decays, unit)


def run_allocate(prompt, wave):
    """Allocate a tile of all triangles of a wave."""
    shape = (PARTITIONS, wave.heads, PARTITIONS)
    wave.negated = nl.ndarray(shape, dtype=prompt.arguments.qkv.dtype, buffer=nl.sbuf)
    for unit in wave.units:
        first, end = unit.wave_heads
        unit.inverse = ChunkInverse(wave.negated[:, first:end, :])


def run_normalise(prompt, unit):
    """Normalise keys, and take the lengths of queries."""
    depth = prompt.arguments.states.shape[2]
    unit.scores.key_rows = normalise_keys(unit.operands.k, depth)
    unit.scores.norm_offset = norm_offsets(unit.operands.q, depth, prompt.arguments.eps)


def run_decay(prompt, unit):
    """Compute the decays between a unit's tokens."""
    g, beta = unit.columns(prompt.decays.g), unit.columns(prompt.decays.beta)
    unit.scores.decay = decay_between(prompt.constants, unit.scores.sums, g, beta)


def run_transpose(prompt, unit):
    """Transpose queries and keys."""
    scores = unit.scores
    scores.query_columns = transpose_heads(unit.operands.q.reshape(scores.key_rows.shape))
    scores.key_columns = transpose_heads(scores.key_rows)


def run_score(prompt, unit):
    """Compute -A and P transposed."""
    scores = unit.scores
    scores.attended = score(
        unit.inverse.negated, scores.key_columns, scores.query_columns, scores.decay, unit.group()
    )


def run_weigh(prompt, unit):
    """Multiply keys by the decay before them, and by that after them and beta."""
    scores, decays = unit.scores, prompt.decays
    scores.keys_before = weigh_keys(scores.key_rows, unit.group(), unit.columns(decays.until))
    scores.keys_after = weigh_keys(scores.key_rows, unit.group(), unit.columns(decays.after))


def run_gate(prompt, unit):
    """Compute the factors of a unit's outputs."""
    unit.scores.gate_factors = gate_factors(unit.operands.z, prompt.norm_weight)


def run_store_triangles(prompt, wave):
    """Store the triangles of a wave."""
    store_triangles(wave.negated, prompt.scratch[wave.index % IN_TURN].triangles)


def run_load_blocks(prompt, wave):
    """Load the blocks of a wave's triangles."""
    triangles = prompt.scratch[wave.index % IN_TURN].triangles
    wave.inversion = BlockInverse(load_blocks(triangles, wave.heads))


def run_invert_pairs(prompt, wave):
    """Invert blocks of two."""
    wave.inversion.y = invert_pairs(wave.inversion.blocks, prompt.constants.unit_block)


def run_first_terms(prompt, target):
    """Multiply the terms of a level's first product."""
    inversion = target.wave.inversion
    inversion.terms = first_terms(inversion.blocks, inversion.y, target.size)


def run_sum_inner(prompt, target):
    """Add up a level's first product."""
    target.wave.inversion.inner = sum_inner(target.wave.inversion.terms)


def run_second_terms(prompt, target):
    """Multiply the terms of a level's second product."""
    inversion = target.wave.inversion
    inversion.terms = second_terms(inversion.y, inversion.inner, target.size)


def run_sum_into(prompt, target):
    """Add up a level's second product."""
    inversion = target.wave.inversion
    sum_into(inversion.y, inversion.terms, target.size)


def run_store_inverses(prompt, wave):
    """Store the inverses of a wave's blocks."""
    store_inverses(wave.inversion.y, prompt.scratch[wave.index % IN_TURN].inverses, wave.heads)


def run_load_squares(prompt, wave):
    """Load the inverses of a wave's blocks as squares, and give each unit its heads."""
    inverses = prompt.scratch[wave.index % IN_TURN].inverses
    y, x = load_squares(inverses, 0, wave.heads), load_squares(inverses, 1, wave.heads)
    for unit in wave.units:
        first, end = unit.wave_heads
        unit.inverse.y, unit.inverse.x = y[:, first:end, :], x[:, first:end, :]


def run_link(prompt, target):
    """Compute a level's first product."""
    inverse, level = target.unit.inverse, target.level
    inverse.right = link(
        inverse.negated,
        inverse.x,
        prompt.right_operands[level][target.unit.index % RIGHT_OPERANDS],
        prompt.constants.second_blocks[level],
        LEVELS[level],
    )


def run_join(prompt, target):
    """Compute a level's second products: x in the columns of first blocks, y in those of second ones."""
    inverse, size, identity = target.unit.inverse, LEVELS[target.level], prompt.constants.identity
    x, y = select_blocks(inverse.x, size, False), select_blocks(inverse.y, size, True)
    inverse.joined_x = join(inverse.y, select_blocks(inverse.right, size, False), x, identity)
    inverse.joined_y = join(inverse.right, y, y, identity)


def run_copy_joined(prompt, target):
    """Copy a level's second products to the inverses."""
    inverse, size = target.unit.inverse, LEVELS[target.level]
    nisa.activation(dst=select_blocks(inverse.x, size, False), op=nl.copy, data=inverse.joined_x)
    nisa.activation(dst=select_blocks(inverse.y, size, True), op=nl.copy, data=inverse.joined_y)


def run_link_halves(prompt, unit):
    """Compute the first product of the last level."""
    unit.inverse.right = link_halves(unit.inverse.negated, unit.inverse.x)


def run_join_halves(prompt, unit):
    """Compute the block that joins the halves."""
    unit.inverse.corner = join_halves(unit.inverse.y, unit.inverse.right)


def run_read_keys(prompt, unit):
    """Multiply the inverse by the decayed keys."""
    unit.inverse.reading = read_keys(unit.scores.keys_before, unit.inverse.y, unit.inverse.corner)


def run_values(prompt, pair):
    """Multiply the inverse by the values of a pair of heads."""
    unit, width = pair.unit, prompt.arguments.states.shape[3]
    v = unit.operands.v.reshape((PARTITIONS, unit.operands.v.shape[1] // width, width))
    pair.values = multiply_values(unit.inverse, v, (pair.first, pair.end))


def run_write(prompt, pair):
    """Compute u of a pair of heads."""
    unit = pair.unit
    reading, state = unit.inverse.reading[:, pair.first : pair.end, :], unit.state.pairs[pair.index]
    unit.outputs.writes.append(subtract_predictions(pair.values, reading, state.narrow))


def run_query(prompt, unit):
    """Multiply the state before a chunk by the queries."""
    heads = unit.heads[1] - unit.heads[0]
    unit.outputs.queried = query_state(unit.scores.query_columns, unit.state.pairs, heads)


def run_advance(prompt, pair):
    """Compute the state of a pair of heads after the chunk."""
    unit, first, end = pair.unit, pair.first, pair.end
    unit.state.pairs[pair.index] = advance_state(
        unit.state.pairs[pair.index],
        unit.scores.keys_after[:, first:end, :],
        unit.outputs.writes[pair.index],
        unit.columns(prompt.decays.total)[:, first:end],
    )


def run_decay_queried(prompt, unit):
    """Multiply q S by its decays."""
    until = unit.columns(prompt.decays.until)
    unit.outputs.decayed = decay_queried(unit.outputs.queried, until, prompt.y.dtype)


def run_attend(prompt, unit):
    """Compute o."""
    outputs = unit.outputs
    outputs.o = attend(unit.scores.attended, outputs.writes, outputs.decayed, prompt.constants.identity)


def run_measure(prompt, unit):
    """Compute the means of the squares of o."""
    unit.outputs.roots = mean_squares(unit.outputs.o, unit.scores.norm_offset, unit.group())


def run_finish(prompt, unit):
    """Normalise and gate a unit's outputs."""
    outputs = unit.outputs
    nisa.activation(dst=outputs.roots, op=nl.rsqrt, data=outputs.roots)
    outputs.y = gated_norm(outputs.o, outputs.roots, unit.scores.gate_factors, prompt.y.dtype)


def run_store(prompt, unit):
    """Store a unit's outputs; after the last chunk the state as well."""
    (start, stop), (first, end) = unit.rows, unit.heads
    width = prompt.arguments.states.shape[3]
    y = unit.outputs.y.reshape((PARTITIONS, (end - first) * width))
    transfer(prompt.y[start:stop, first * width : end * width], y[0 : stop - start, :], COMPILER)
    if unit.is_last:
        sequence = unit.state.sequence
        number = prompt.slots.written[0:1, sequence : sequence + 1]
        for pair in unit.head_pairs():
            heads = (first + pair.first, first + pair.end)
            store_state(prompt.arguments.states, number, heads, unit.state.pairs[pair.index].wide)


def repeat_step(steps, run, targets, engine_times, delay):
    """Append a step for each target."""
    for target in targets:
        steps.append(Step(run, target, engine_times, delay))


def prepare_steps(wave):
    """Return the steps that need neither inverse nor state."""
    steps = [Step(run_allocate, wave, IDLE, 0)]
    repeat_step(steps, run_normalise, wave.units, (0, 70, 640, 470), 300)
    repeat_step(steps, run_decay, wave.units, (430, 0, 570, 0), 300)
    repeat_step(steps, run_transpose, wave.units, (220, 0, 530, 0), 300)
    repeat_step(steps, run_score, wave.units, (220, 1200, 0, 0), 300)
    return steps


def weigh_steps(wave):
    """Return the steps of scaled keys and of the factors of outputs."""
    steps = []
    repeat_step(steps, run_weigh, wave.units, (0, 0, 0, 1100), 0)
    repeat_step(steps, run_gate, wave.units, (0, 0, 610, 1650), 0)
    return steps


def invert_steps(wave):
    """Return the steps that invert the triangles' smallest blocks."""
    steps = [
        Step(run_store_triangles, wave, IDLE, 3000),
        Step(run_load_blocks, wave, IDLE, 2500),
        Step(run_invert_pairs, wave, (0, 400, 0, 0), 600),
    ]
    size = 2
    while size < BLOCK:
        level, terms = BlockLevel(wave, size), BLOCK // 2 * size * size
        multiply_times, add_times = (0, 0, 0, 130 + terms), (0, 70 + terms, 0, 0)
        steps.append(Step(run_first_terms, level, multiply_times, 170 + terms))
        steps.append(Step(run_sum_inner, level, add_times, 210 + terms))
        steps.append(Step(run_second_terms, level, multiply_times, 170 + terms))
        steps.append(Step(run_sum_into, level, add_times, 210 + terms))
        size = 2 * size
    steps.append(Step(run_store_inverses, wave, (0, 330, 270, 0), 2900))
    steps.append(Step(run_load_squares, wave, IDLE, 2300))
    return steps


def join_steps(wave):
    """Return the steps that join the blocks, and those that follow from the inverse alone."""
    steps = []
    for level in range(len(LEVELS)):
        targets = []
        for unit in wave.units:
            targets.append(JoinLevel(unit, level))
        repeat_step(steps, run_link, targets, (240, 200, 0, 0), 200)
        repeat_step(steps, run_join, targets, (590, 0, 0, 0), 250)
        repeat_step(steps, run_copy_joined, targets, (0, 0, 320, 0), 200)
    repeat_step(steps, run_link_halves, wave.units, (120, 0, 270, 0), 200)
    repeat_step(steps, run_join_halves, wave.units, (120, 330, 0, 0), 200)
    repeat_step(steps, run_read_keys, wave.units, (400, 0, 480, 0), 250)
    return steps


def state_steps(wave):
    """Return the steps of the state through the chunks; a unit's outputs come after the next one's first steps."""
    steps = []
    units = wave.units
    for i in range(len(units)):  # i: unit
        pairs = units[i].head_pairs()
        repeat_step(steps, run_values, pairs, (170, 0, 0, 0), 0)
        repeat_step(steps, run_write, pairs, (110, 0, 270, 0), 320)
        steps.append(Step(run_query, units[i], (220, 0, 0, 0), 0))
        if i > 0:
            steps.append(Step(run_measure, units[i - 1], (0, 70, 640, 0), 0))
        repeat_step(steps, run_advance, pairs, (110, 400, 270, 0), 500)
        steps.append(Step(run_decay_queried, units[i], (0, 0, 630, 0), 200))
        steps.append(Step(run_attend, units[i], (440, 0, 0, 0), 200))
        if i > 1:
            steps.append(Step(run_store, units[i - 2], IDLE, 0))
        if i > 0:
            steps.append(Step(run_finish, units[i - 1], (0, 800, 60, 0), 0))
    steps.append(Step(run_measure, units[len(units) - 1], (0, 70, 640, 0), 0))
    return steps


def end_steps(wave):
    """Return the steps of the last outputs of a wave."""
    steps = []
    last = len(wave.units) - 1
    if last > 0:
        steps.append(Step(run_store, wave.units[last - 1], IDLE, 800))
    steps.append(Step(run_finish, wave.units[last], (0, 800, 60, 0), 1800))
    steps.append(Step(run_store, wave.units[last], IDLE, 0))
    return steps
