"""The steps of the chains of a wave, the units of `gated_delta` that go through the stages together.

`gated_delta` makes a `Wave` of each list of units, and chains of the steps listed here; `delta/order.py`
interleaves the chains. A step's method issues its instructions. Times are those of four heads on trn2 in
bfloat16, from the timelines that the simulator predicts, in ns.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.delta.block_inverse import BLOCK, IN_TURN, BlockInverses, BlockLevel
from nki_kernels.delta.chunk_inverse import ChunkInverse, JoinLevel
from nki_kernels.delta.chunk_outputs import ChunkOutputs, HeadPair
from nki_kernels.delta.chunk_scores import ChunkScores
from nki_kernels.delta.masks import LEVELS
from nki_kernels.delta.order import Step
from nki_kernels.delta.state_slots import PAIR
from nki_kernels.tiles import ranges

IDLE = (0, 0, 0, 0)
"""Times of a step that keeps no engine."""


@dataclass
class Wave(nl.NKIObject):
    """Units that go through the stages together: their blocks, and for each unit its scores, inverse and outputs.

    scores, inverses, outputs: lists of ChunkScores, ChunkInverse and ChunkOutputs in the order of `units`.
    """

    units: list
    blocks: BlockInverses
    scores: list
    inverses: list
    outputs: list

    def load(self, prompt):
        """Load queries, keys, values and gates of all units from HBM, and states that are not loaded yet."""
        for unit in self.units:
            unit.load(prompt.arguments, prompt.slots)

    def load_sums(self, prompt):
        """Load the sums of the logarithms of decays of all units from HBM to operand tiles.

        Does nothing if `prompt.differences` is None: decays then need no stored sums.
        """
        if prompt.differences is not None:
            for scores in self.scores:
                scores.load_sums(prompt)


def plan_wave(index, units):
    """Return the Wave of some units, with their blocks, scores, inverses and outputs; allocates no tile.

    Args:
        index: of the wave among all waves.
    """
    wave = Wave(units, BlockInverses(index % IN_TURN, units[len(units) - 1].wave_heads[1]), [], [], [])
    for unit in units:
        scores, pairs = ChunkScores(unit, wave.blocks), []
        inverse = ChunkInverse(scores)
        for first, end in ranges(0, unit.count_heads(), PAIR):
            pairs.append(HeadPair(inverse, first // PAIR, first, end))
        wave.scores.append(scores)
        wave.inverses.append(inverse)
        wave.outputs.append(ChunkOutputs(scores, pairs))
    return wave


def append_steps(steps, run, targets, engine_times, delay):
    """Append to `steps` one Step for each target, in their order: it runs method `run` of the target.

    Args:
        engine_times: ns that a step keeps the Tensor, Vector, Scalar and GpSimd engine.
        delay: ns from the start of a step to that of the next step of its chain.
    """
    for target in targets:
        steps.append(Step(run, target, engine_times, delay))


def list_score_steps(wave):
    """Return the list of Steps that compute what needs neither inverse nor state, for all units of a wave.

    These are keys over their lengths, decays, transposes and scores.
    """
    steps = [Step(BlockInverses.allocate, wave.blocks, IDLE, 0)]
    append_steps(steps, ChunkScores.normalise_keys, wave.scores, (0, 70, 640, 470), 300)
    append_steps(steps, ChunkScores.compute_decays, wave.scores, (430, 0, 570, 0), 300)
    append_steps(steps, ChunkScores.transpose_operands, wave.scores, (220, 0, 530, 0), 300)
    append_steps(steps, ChunkScores.compute_scores, wave.scores, (220, 1200, 0, 0), 300)
    return steps


def list_scale_steps(wave):
    """Return the list of Steps that multiply keys by decays, and compute gate factors, for all units of a wave."""
    steps = []
    append_steps(steps, ChunkScores.scale_keys, wave.scores, (0, 0, 0, 1100), 0)
    append_steps(steps, ChunkScores.compute_gate_factors, wave.scores, (0, 0, 610, 1650), 0)
    return steps


def list_invert_steps(wave):
    """Return the list of Steps that invert the diagonal blocks [16, 16] of a wave's triangles, by way of HBM."""
    steps = [
        Step(BlockInverses.store_triangles, wave.blocks, IDLE, 3000),
        Step(BlockInverses.load_blocks, wave.blocks, IDLE, 2500),
        Step(BlockInverses.invert_pairs, wave.blocks, (0, 400, 0, 0), 600),
    ]
    size = 2
    while size < BLOCK:
        level, terms = BlockLevel(wave.blocks, size), BLOCK // 2 * size * size
        multiply_times, add_times = (0, 0, 0, 130 + terms), (0, 70 + terms, 0, 0)
        steps.append(Step(BlockLevel.multiply_first, level, multiply_times, 170 + terms))
        steps.append(Step(BlockLevel.sum_first, level, add_times, 210 + terms))
        steps.append(Step(BlockLevel.multiply_second, level, multiply_times, 170 + terms))
        steps.append(Step(BlockLevel.sum_second, level, add_times, 210 + terms))
        size = 2 * size
    steps.append(Step(BlockInverses.store_inverses, wave.blocks, (0, 330, 270, 0), 2900))
    steps.append(Step(BlockInverses.load_squares, wave.blocks, IDLE, 2300))
    return steps


def list_join_steps(wave):
    """Return the list of Steps that join the inverses of a wave's blocks [16, 16] to those of its triangles [128, 128].

    The last Steps multiply the keys by the inverses.
    """
    steps = []
    for level in range(len(LEVELS)):
        targets = []
        for inverse in wave.inverses:
            targets.append(JoinLevel(inverse, level))
        append_steps(steps, JoinLevel.multiply_first, targets, (240, 200, 0, 0), 200)
        append_steps(steps, JoinLevel.join, targets, (590, 0, 0, 0), 250)
        append_steps(steps, JoinLevel.copy_joined, targets, (0, 0, 320, 0), 200)
    append_steps(steps, ChunkInverse.multiply_across_halves, wave.inverses, (120, 0, 270, 0), 200)
    append_steps(steps, ChunkInverse.join_halves, wave.inverses, (120, 330, 0, 0), 200)
    append_steps(steps, ChunkInverse.compute_reading, wave.inverses, (400, 0, 480, 0), 250)
    return steps


def list_state_steps(wave):
    """Return the list of Steps that take the states through a wave's units, one unit after another.

    The outputs of a unit are normalised among the steps of the next unit, and stored among those of the one
    after. `list_output_steps` has what remains for the last two units.
    """
    steps, outputs = [], wave.outputs
    for i in range(len(outputs)):  # i: unit
        before, earlier = outputs[max(0, i - 1) : i], outputs[max(0, i - 2) : max(0, i - 1)]
        append_steps(steps, HeadPair.multiply_values, outputs[i].pairs, (170, 0, 0, 0), 0)
        append_steps(steps, HeadPair.compute_writes, outputs[i].pairs, (110, 0, 270, 0), 320)
        steps.append(Step(ChunkOutputs.query_state, outputs[i], (220, 0, 0, 0), 0))
        append_steps(steps, ChunkOutputs.average_squares, before, (0, 70, 640, 0), 0)
        append_steps(steps, HeadPair.advance_state, outputs[i].pairs, (110, 400, 270, 0), 500)
        steps.append(Step(ChunkOutputs.decay_queried, outputs[i], (0, 0, 630, 0), 200))
        steps.append(Step(ChunkOutputs.attend, outputs[i], (440, 0, 0, 0), 200))
        append_steps(steps, ChunkOutputs.store, earlier, IDLE, 0)
        append_steps(steps, ChunkOutputs.normalise, before, (0, 800, 60, 0), 0)
    steps.append(Step(ChunkOutputs.average_squares, outputs[len(outputs) - 1], (0, 70, 640, 0), 0))
    return steps


def list_output_steps(wave):
    """Return the list of Steps for a wave's last outputs: store the last but one, normalise and store the last."""
    steps, outputs = [], wave.outputs
    last = len(outputs) - 1
    append_steps(steps, ChunkOutputs.store, outputs[max(0, last - 1) : last], IDLE, 800)
    steps.append(Step(ChunkOutputs.normalise, outputs[last], (0, 800, 60, 0), 1800))
    steps.append(Step(ChunkOutputs.store, outputs[last], IDLE, 0))
    return steps
