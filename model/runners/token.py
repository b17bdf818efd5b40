"""Steps of a network on a device that end with the sampling of tokens, for contiguous and paged runners.

A runner reads the results of the head, the last layers of the network: logits, candidates (the likeliest tokens with
their logits), and tokens that the device sampled.
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
from model.layers.sample import RESULTS, build_sample_arrays
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.sampling import Drawn, RowSampling, StepOutput


class TokenRunner:
    """Runner of the steps of a model that computes tokens; arguments as those of `LaunchedNetwork`.

    `expert_load` counts the experts that tokens select. `network` has the states and copies their pages.
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
        """Run one step and return the output of each row of the head, one data-parallel group after the other.

        A row of the head is a token after which the step computes logits.

        Args:
            shape: The sizes of the step.
            inputs: The arrays of the step by name, [groups, ...] each.
            logits: Whether outputs have the logits of the whole vocabulary; otherwise these stay on the device.
        """
        inputs = {**inputs, "own_positions": inputs["positions"]}
        names = (VALUES, TOKENS, *(RESULTS if shape.draws else ()), *((LOGITS,) if logits else ()))
        with self._device.session():
            outputs = (
                self._score_all_tokens(shape, inputs)
                if shape.scores
                else list(chain(*self._step_outputs(self.network.run(shape, inputs, names))))
            )
        if self._expert_load is not None:
            self._count_experts(self._expert_load, shape.sequence_ranks)
        return outputs

    def draw_inputs(
        self, sample_rows: Sequence[RowSampling | None], draws: DrawVariant
    ) -> dict[str, np.ndarray]:
        """Return the arguments of the kernel `sample` by name, [groups, rows of a group, 1 or vocabulary] each.

        Args:
            sample_rows: Sampling parameters of the head's rows of all groups; None for a row without sampling.
            draws: The variant of the kernel.
        """
        arrays = build_sample_arrays(sample_rows, self._vocab_size, draws.full_vocabulary)
        return {name: array.reshape(self._mesh.data, -1, array.shape[-1]) for name, array in arrays.items()}

    def _score_all_tokens(self, shape: StepShape, inputs: Mapping[str, np.ndarray]) -> list[StepOutput]:
        """Return the output of every token of the step, one data-parallel group after the other.

        The head computes at most `MOST_ROWS` tokens at a time, so it runs several times.
        """
        rows = min(shape.tokens, MOST_ROWS)
        indices = np.arange(-(-shape.tokens // rows) * rows, dtype=np.int32).clip(max=shape.tokens - 1)
        pieces = [
            {"logits_indices": np.tile(piece[:, None], (self._mesh.data, 1, 1))}
            for piece in indices.reshape(-1, rows)
        ]
        group_outputs: list[list[StepOutput]] = [[] for _ in range(self._mesh.data)]
        for arrays in self.network.run_in_pieces(shape, inputs, pieces, (VALUES, TOKENS, LOGITS)):
            for outputs, piece_outputs in zip(group_outputs, self._step_outputs(arrays)):
                outputs += piece_outputs
        return [output for outputs in group_outputs for output in outputs[: shape.tokens]]

    def _step_outputs(self, arrays: Mapping[str, RankArrays]) -> list[list[StepOutput]]:
        """Return, for each data-parallel group, the output of each row of the head.

        All tensor-parallel ranks of a group have the group's candidates and sampled tokens. Each rank has the logits of
        its shard of the vocabulary.

        Args:
            arrays: For each output of the network, its array on each rank of the last pipeline stage.
        """
        group_outputs = []
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
                        None if draws is None else _read_drawn(*(array[row] for array in draws)),
                    )
                    for row in range(len(values))
                ]
            )
        return group_outputs

    def _count_experts(self, expert_load: ExpertLoad, sequence_ranks: int) -> None:
        """Add the experts that the tokens of the last step selected to `expert_load`.

        Args:
            expert_load: The counts.
            sequence_ranks: Number of ranks of a group among which the rows are divided; the first ranks have them.
        """
        for expert_ids in self.network.traced_arrays:
            # Ranks of other pipeline stages have empty arrays.
            gathered = [ids for ids in self._device.gather(expert_ids) if ids.size]
            first_ranks = range(0, len(gathered), self._mesh.tensor)
            expert_load.add(
                [np.concatenate(gathered[first : first + sequence_ranks]) for first in first_ranks]
            )


def _read_drawn(token: np.ndarray, logprob: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> Drawn:
    """Return the token that the device sampled in one row, with the candidates' log-probabilities.

    Args:
        token: Sampled token, [1].
        logprob: Its log-probability, [1].
        ids: Token ids of the candidates.
        logprobs: Log-probabilities of the candidates.
    """
    return Drawn(int(token[0]), float(logprob[0]), ids, logprobs)
