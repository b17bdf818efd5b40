"""A backend of kernels on a device, for a batch of sequences that start together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from model.config import ModelConfig
from model.execution.bound_launch import Device
from model.execution.expert_load import ExpertLoad
from model.execution.launched_network import Progress
from model.layers.cache import AUTO, check_cache_dtype
from model.layers.launch import Phase, StepShape
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.window import WindowRunner, make_token_runner
from model.sampling import StepOutput


class KernelModel:
    """A backend that computes the model with kernels on a device, for a batch of `sequences` sequences.

    `weights` are the shards of the ranks in this process, each once; the groups of `mesh` share them. `cache_length`
    positions are held per layer and sequence; `candidates` is how many of the best tokens the sampler wants picked out
    (lm_head picks a multiple of eight, and beyond eight no more than a rank's part of the vocabulary holds).
    `progress` is called with the layers done, and their number, before the first and after each one. `kv_cache_dtype`
    is one of `CACHE_FORMATS`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Sequence[RankWeights],
        device: Device,
        cache_length: int,
        candidates: int = 1,
        progress: Progress = lambda done, layers: None,
        sequences: int = 1,
        mesh: Mesh | None = None,
        expert_load: ExpertLoad | None = None,
        kv_cache_dtype: str = AUTO,
    ) -> None:
        check_cache_dtype(kv_cache_dtype)
        self._mesh = mesh = mesh or Mesh(device.ranks)
        self._cache_length = cache_length
        first = weights[0]
        self._shape = partial(
            StepShape,
            sequences=mesh.sequences_of_group(sequences),
            cache_length=cache_length,
            context=min(cache_length, config.context),
            ranks=mesh.tensor,
            activations=first.dtype,
            weights=first.dtypes,
            candidates=candidates,
            cuts_sequence=mesh.sequence,
            expert_ranks=mesh.expert,
            cache_dtype=kv_cache_dtype,
        )
        self._sequences = sequences
        self._longest_short, self._limit = config.longest_short, config.context
        self._ids: list[list[int]] = []
        shape = self._shape(Phase.prefill, mesh.sequences_of_group(sequences))
        per_sequence = "" if sequences == 1 else f" for each of {sequences} sequences"
        purpose = f"a cache of {cache_length:,} positions{per_sequence}"
        # Decode steps all have one shape; a prompt's is used once.
        self._runner = make_token_runner(
            config, weights, device, shape, mesh, purpose, progress, expert_load=expert_load
        )

    def encode(self, features: Sequence[np.ndarray]) -> None:
        """Run the encoder on a window of speech for each sequence: its log-mel spectrum [bands, columns].

        The next prompts attend to what it leaves behind.
        """
        assert len(features) == self._sequences and self._mesh.data == 1
        assert isinstance(self._runner, WindowRunner)
        self._runner.encode(features)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Start a sequence with each prompt and return the output after its last token.

        Prompts are padded to the longest of them, or further, so that ranks that cut rows divide them.
        """
        group_sequences = self._mesh.sequences_of_group(self._sequences)
        length = self._mesh.padded_length(max(map(len, prompts)), group_sequences)
        assert len(prompts) == self._sequences and min(map(len, prompts)) > 0
        assert length <= self._cache_length, f"{length} tokens, a cache of {self._cache_length}"
        self._runner.network.clear()
        self._ids = [list(prompt) for prompt in prompts]
        rows = self._padded_sequences
        ids = np.zeros((rows, length), np.int32)
        for row, prompt in zip(ids, prompts):
            row[: len(prompt)] = prompt
        lengths = np.array([*map(len, prompts), *[1] * (rows - len(prompts))])
        # Rows behind the longest prompt take positions that later tokens write again, within every table.
        last = min(self._cache_length, self._limit) - 1
        positions = np.tile(np.minimum(np.arange(length), last), (rows, 1))
        last_tokens = np.arange(rows) % group_sequences * length + lengths - 1
        return self._step(
            Phase.prefill,
            min(lengths) < length,
            ids=ids,
            positions=positions,
            logits_indices=last_tokens,
            num_computed_tokens=0 * lengths,
            num_scheduled_tokens=lengths,
        )

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence at its position; an ended one gets a token that nothing reads."""
        assert len(tokens) == len(positions) == self._sequences
        assert all(0 < position < self._cache_length for position in positions), (
            f"{positions}, {self._cache_length}"
        )
        for ids, token in zip(self._ids, tokens):
            ids.extend([] if token is None else [token])
        new_positions = [position for token, position in zip(tokens, positions) if token is not None]
        if self._longest_short in new_positions:
            return self.prefill(self._ids)  # cached keys need the rotations of long sequences, too
        padding = self._padded_sequences - self._sequences
        padded_positions = np.array([*positions, *[1] * padding])
        return self._step(
            Phase.decode,
            ids=np.array([*(token or 0 for token in tokens), *[0] * padding]),
            positions=padded_positions,
            num_computed_tokens=padded_positions,
            num_scheduled_tokens=np.ones_like(padded_positions),
        )

    @property
    def _padded_sequences(self) -> int:
        """Sequences of all groups, padding included where the groups do not divide the prompts."""
        return self._mesh.data * self._mesh.sequences_of_group(self._sequences)

    def _step(self, phase: Phase, padded: bool = False, **inputs: np.ndarray) -> list[StepOutput]:
        """Compute one step; `inputs` have a row for every sequence, in the order of groups and of state slots."""
        inputs["state_slots"] = np.arange(self._padded_sequences) % self._mesh.sequences_of_group(
            self._sequences
        )
        if self._longest_short is not None:
            inputs["rope_rows"] = self._rope_rows(inputs["positions"], self._longest_short)
        group_inputs = {
            name: array.astype(np.int32).reshape(self._mesh.data, -1, 1) for name, array in inputs.items()
        }
        shape = self._shape(phase, group_inputs["ids"].shape[1], padded=padded)
        return self._runner.step(shape, group_inputs)[: self._sequences]

    def _rope_rows(self, positions: np.ndarray, longest_short: int) -> np.ndarray:
        """Return rows of the rotation tables; rows for long sequences follow those for short ones."""
        by_sequence = positions.reshape(self._padded_sequences, -1)
        long = np.zeros((self._padded_sequences, 1), bool)
        long[: len(self._ids), 0] = [len(ids) > longest_short for ids in self._ids]
        return by_sequence + min(self._cache_length, self._limit) * long
