"""Backend with kernels on a device, for sequences that start together and have contiguous KV caches.

`StaticBatch` runs it for commands that compute one batch of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from model.config import ModelConfig
from model.execution.bound_launch import Device
from model.execution.expert_load import ExpertLoad
from model.execution.launched_network import Progress
from model.layers.cache_formats import AUTO, UNSCALED, CacheScales, check_cache_dtype
from model.layers.launch import Phase, StepShape
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.window import WindowRunner, make_token_runner
from model.sampling import StepOutput


class KernelModel:
    """Backend that computes a model with kernels on a device, for `sequences` sequences that start together.

    Args:
        config: The model.
        weights: The distinct weight shards of the ranks in this process; data-parallel groups share them.
        device: The device that launches kernels.
        cache_length: Positions of each sequence in the cache of each layer.
        candidates: Number of likeliest tokens that the sampler needs. lm_head returns a multiple of eight, and beyond
            eight at most the tokens of a rank's shard of the vocabulary.
        progress: Called with the number of finished layers and of all layers, before the first and after each layer.
        sequences: Number of sequences, divided over data-parallel groups.
        mesh: The ranks of each axis, by default tensor parallelism over all ranks of the device.
        expert_load: Counts the experts that tokens select.
        kv_cache_dtype: One of `CACHE_FORMATS`.
        cache_scales: Scales of the caches, if the format has any.
        lnc: Physical cores of a rank, as the device has them; they decide which launches a decoder layer has.
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
        lnc: int = 1,
        cache_scales: CacheScales = UNSCALED,
    ) -> None:
        check_cache_dtype(kv_cache_dtype, has_pages=False)
        self._mesh = mesh = mesh or Mesh(device.ranks)
        self._cache_length = cache_length
        self._group_sequences = mesh.count_group_sequences(sequences)
        first = weights[0]
        self._shape = partial(
            StepShape,
            sequences=self._group_sequences,
            cache_length=cache_length,
            context=min(cache_length, config.context),
            ranks=mesh.tensor,
            activations=first.dtype,
            weights=first.dtypes,
            candidates=candidates,
            cuts_sequence=mesh.sequence,
            expert_ranks=mesh.expert,
            cache_dtype=kv_cache_dtype,
            cache_scales=cache_scales,
            lnc=lnc,
            sorted_expert_width=device.sorted_expert_width,
        )
        self._sequences = sequences
        self._longest_short, self._limit = config.longest_short, config.context
        self._ids: list[list[int]] = []
        per_sequence = "" if sequences == 1 else f" for each of {sequences} sequences"
        purpose = f"a cache of {cache_length:,} positions{per_sequence}"
        # Decode steps all have one shape; a prompt's is used once.
        self._runner = make_token_runner(
            config,
            weights,
            device,
            self._shape(Phase.prefill, self._group_sequences),
            mesh,
            purpose,
            progress,
            expert_load=expert_load,
        )

    def encode(self, features: Sequence[np.ndarray]) -> None:
        """Run the encoder on one window of speech for each sequence; the next prompts attend to its outputs.

        Args:
            features: The log-mel spectrum of each window, [bands, columns] each.
        """
        assert len(features) == self._sequences and self._mesh.data == 1
        assert isinstance(self._runner, WindowRunner)
        self._runner.encode(features)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Clear all caches, compute a prompt for each sequence, and return the output after each prompt's last token.

        Prompts are padded to the longest prompt, or further if sequence parallelism divides their rows.
        """
        length = self._mesh.pad_length(max(map(len, prompts)), self._group_sequences)
        assert len(prompts) == self._sequences and min(map(len, prompts)) > 0
        assert length <= self._cache_length, f"{length} tokens, a cache of {self._cache_length}"
        self._runner.network.clear()
        rows = self._mesh.data * self._group_sequences
        self._ids = [*map(list, prompts), *([0] for _ in range(rows - len(prompts)))]
        lengths = np.array([len(ids) for ids in self._ids])
        # Padding tokens have positions that later tokens overwrite and that rotation tables contain.
        last = min(self._cache_length, self._limit) - 1
        return self._step(
            Phase.prefill,
            min(lengths) < length,
            ids=np.array([ids + [0] * (length - len(ids)) for ids in self._ids]),
            positions=np.tile(np.minimum(np.arange(length), last), (rows, 1)),
            logits_indices=np.arange(rows) % self._group_sequences * length + lengths - 1,
            num_computed_tokens=0 * lengths,
            num_scheduled_tokens=lengths,
        )

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        """Append a token to each sequence, compute one decode step, and return the output after each token.

        All sequences are computed again from their first token when one of them becomes longer than the limit of
        longrope's short factors.

        Args:
            tokens: The token of each sequence. For None, a sequence that has ended, token 0 is computed, and the output
                has no meaning.
            positions: The position of each token: the number of tokens before it.
        """
        assert len(tokens) == len(positions) == self._sequences
        assert all(0 < position < self._cache_length for position in positions), (
            f"{positions}, {self._cache_length}"
        )
        for ids, token in zip(self._ids, tokens):
            ids.extend([] if token is None else [token])
        new_positions = [position for token, position in zip(tokens, positions) if token is not None]
        if self._longest_short in new_positions:
            # Cached keys need the rotations of long sequences, too.
            return self.prefill(self._ids[: self._sequences])
        padding = len(self._ids) - self._sequences
        padded_positions = np.array([*positions, *[1] * padding])
        return self._step(
            Phase.decode,
            ids=np.array([*(token or 0 for token in tokens), *[0] * padding]),
            positions=padded_positions,
            num_computed_tokens=padded_positions,
            num_scheduled_tokens=np.ones_like(padded_positions),
        )

    def _step(self, phase: Phase, padded: bool = False, **inputs: np.ndarray) -> list[StepOutput]:
        """Compute one step and return the outputs of the sequences.

        Args:
            phase: Prompts or decoding.
            padded: Whether some prompts are padded.
            inputs: Arrays with one row for every sequence, padding included, in the order of groups and of state slots.
        """
        inputs["state_slots"] = np.arange(len(self._ids)) % self._group_sequences
        if self._longest_short is not None:
            # Rows of the rotation tables for long sequences follow the rows for short ones.
            is_long = np.array([[len(ids) > self._longest_short] for ids in self._ids])
            positions = inputs["positions"].reshape(len(self._ids), -1)
            inputs["rope_rows"] = positions + min(self._cache_length, self._limit) * is_long
        group_inputs = {
            name: array.astype(np.int32).reshape(self._mesh.data, -1, 1) for name, array in inputs.items()
        }
        shape = self._shape(phase, group_inputs["ids"].shape[1], padded=padded)
        return self._runner.step(shape, group_inputs)[: self._sequences]
