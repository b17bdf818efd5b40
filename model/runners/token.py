"""Token steps of a network on a device: what contiguous and paged runners share.

The runner adds what the network's layers call the inputs of a token step, and reads the results of the head: logits,
candidates and draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from model.config import ModelConfig
from model.engine.buckets import MOST_ROWS
from model.execution.bound_launch import Device
from model.execution.expert_load import ExpertLoad
from model.execution.launched_network import LaunchedNetwork, Progress, RankArrays
from model.families import compose
from model.layers.experts import EXPERT_IDS
from model.layers.head import LOGITS, TOKENS, VALUES
from model.layers.launch import DrawVariant, StepShape
from model.layers.sample import RESULTS, arguments_of
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.sampling import Drawn, RowSampling, StepOutput


class TokenRunner:
    """Runs the token steps of a model; arguments as those of `LaunchedNetwork`.

    `expert_load` counts which experts tokens choose. `network` has the states, and copies pages of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        largest_step: StepShape,
        mesh: Mesh,
        purpose: str,
        progress: Progress = lambda done, sections: None,
        max_bound_steps: int = 2,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        traced = () if expert_load is None else (EXPERT_IDS,)
        network = compose(config)
        self.network = LaunchedNetwork(
            network, weights, device, largest_step, mesh, purpose, progress, max_bound_steps, traced
        )
        self._mesh, self._device, self._vocab_size = mesh, device, config.vocab_size
        self._expert_load = expert_load

    def step(
        self, shape: StepShape, inputs: Mapping[str, np.ndarray], logits: bool = True
    ) -> list[StepOutput]:
        """Run one step; returns one output for each row of the head, data-parallel group after group.

        `inputs` has the arrays of the step by name; their first axis is the data-parallel group. With `logits` an
        output has those of the whole vocabulary; without, they stay on the device.
        """
        inputs = {**inputs, "own_positions": inputs["positions"]}
        if shape.scores:
            outputs = self._score_all_tokens(shape, inputs)
        else:
            names = (VALUES, TOKENS, *(RESULTS if shape.draws else ()), *((LOGITS,) if logits else ()))
            outputs = list(chain(*self._step_outputs(self.network.run(shape, inputs, names))))
        if self._expert_load is not None:
            self._note_load(self._expert_load, shape.sequence_ranks)
        return outputs

    def draw_inputs(
        self, sample_rows: Sequence[RowSampling | None], draws: DrawVariant
    ) -> dict[str, np.ndarray]:
        """The arguments of the kernel `sample` by name, [groups, rows of a group, 1 or vocabulary] each."""
        arrays = arguments_of(sample_rows, self._vocab_size, draws.full_vocabulary)
        return {name: array.reshape(self._mesh.data, -1, array.shape[-1]) for name, array in arrays.items()}

    def _score_all_tokens(self, shape: StepShape, inputs: Mapping[str, np.ndarray]) -> list[StepOutput]:
        """One output for each row of each group; the head takes as many rows at a time as it can."""
        rows = min(shape.tokens, MOST_ROWS)
        pieces = []
        for first in range(0, shape.tokens, rows):
            indices = np.minimum(np.arange(first, first + rows, dtype=np.int32), shape.tokens - 1)
            pieces.append({"logits_indices": np.tile(indices[:, None], (self._mesh.data, 1, 1))})
        group_outputs: list[list[StepOutput]] = [[] for _ in range(self._mesh.data)]
        for arrays in self.network.run_in_pieces(shape, inputs, pieces, (VALUES, TOKENS, LOGITS)):
            for outputs, piece_outputs in zip(group_outputs, self._step_outputs(arrays)):
                outputs += piece_outputs
        return [output for outputs in group_outputs for output in outputs[: shape.tokens]]

    def _step_outputs(self, arrays: Mapping[str, RankArrays]) -> list[list[StepOutput]]:
        """The outputs of the head for every row of each data-parallel group."""
        group_outputs = []
        # All tensor-parallel ranks of a group have its candidates and draws; each has the logits of its own tokens.
        for first in range(0, self._mesh.stage_ranks, self._mesh.tensor):
            group_logits = None
            if LOGITS in arrays:
                group_logits = np.concatenate(arrays[LOGITS][first : first + self._mesh.tensor], axis=1)
            values, ids = arrays[VALUES][first], arrays[TOKENS][first]
            draws = [arrays[name][first] for name in RESULTS] if RESULTS[0] in arrays else None
            group_outputs.append(
                [
                    StepOutput(
                        None if group_logits is None else group_logits[row],
                        values[row],
                        ids[row],
                        None if draws is None else _drawn(*(result[row] for result in draws)),
                    )
                    for row in range(len(values))
                ]
            )
        return group_outputs

    def _note_load(self, expert_load: ExpertLoad, sequence_ranks: int) -> None:
        """Count the experts that the tokens of the last step chose.

        The first `sequence_ranks` ranks of a group have its rows, each some of them.
        """
        for expert_ids in self.network.traced_arrays:
            # Ranks of other pipeline stages have none.
            gathered = [ids for ids in self._device.gather(expert_ids) if ids.size]
            first_ranks = range(0, len(gathered), self._mesh.tensor)
            expert_load.note(
                [np.concatenate(gathered[first : first + sequence_ranks]) for first in first_ranks]
            )


def _drawn(token: np.ndarray, logprob: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> Drawn:
    """The draw in one row of the results of the kernel `sample`."""
    return Drawn(int(token[0]), float(logprob[0]), ids, logprobs)
