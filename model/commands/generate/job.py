"""Input of `nkw generate`: a model with its ranks, and prompts, for generation and for prediction."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

from model.commands.generate.micro_batches import MicroBatches, size_micro_batches
from model.engine import SamplingParams
from model.errors import ModelError
from model.execution.bound_launch import Device
from model.execution.expert_load import ExpertLoad
from model.layers.cache_formats import CacheScales, check_cache_dtype
from model.llm.loaded import LoadedModel, open_device
from model.loading.weights import RankWeights
from model.mesh import Mesh
from model.runners.bucket_length import bucket_length, count_positions_needed
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from model.runners.static_batch import Backend

Progress = Callable[[int, int], None]


def get_rank() -> int | None:
    """Return the rank of this process if torchrun started a process for each rank, else None."""
    if "RANK" not in os.environ:  # avoids loading the simulator
        return None
    from model.device import read_process_rank

    return read_process_rank()


class Job:
    """Model with its ranks, and prompts to continue.

    `prompt_ids` has an entry for each prompt. `prompts` and `sequence_ids` have one for each continuation.
    `micro_batches` are the numbers of sequences that pass the stages of a pipeline together. `replay_report` returns
    what became of the launches of the backend.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        model: LoadedModel,
        prompts: list[str],
        prompt_ids: list[list[int]],
        sampling: SamplingParams,
        mesh: Mesh,
    ) -> None:
        """Divide the continuations into micro-batches; nothing is loaded yet.

        Raises:
            ModelError: --micro-batches exceeds the prompts of a data-parallel group, or --kv-cache-dtype is unknown.
        """
        self.mesh = mesh
        self.options = options
        self.model = model
        self.config = config = model.config
        self.prompts = [prompt for prompt in prompts for _ in range(sampling.n)]
        self.prompt_ids = prompt_ids
        self.sequence_ids = [ids for ids in prompt_ids for _ in range(sampling.n)]
        self.replay_report = lambda: "replay: nothing was launched"
        self.expert_load = ExpertLoad.for_model(config, mesh)
        self.sampling = sampling
        sequences = len(self.sequence_ids)
        self.micro_batches = size_micro_batches(sequences, _count_micro_batches(options, mesh, sequences))
        needed = count_positions_needed(max(map(len, prompt_ids)), options.max_new_tokens, config)
        check_cache_dtype(options.kv_cache_dtype, has_pages=False)
        self._cache_length = bucket_length(needed, config.context, mesh.row_multiple)

    @cached_property
    def _local_shards(self) -> tuple[RankWeights, ...]:
        """Weights of the ranks in this process.

        Under torchrun a process has one rank, with the weights of its pipeline stage.
        """
        rank = get_rank()
        return self.model.load_shards(self.mesh, None if rank is None else [rank])

    @cached_property
    def _cache_scales(self) -> CacheScales:
        """Scales of the caches, from --calibration or the checkpoint."""
        return self.model.choose_cache_scales(self.options.kv_cache_dtype, self.options.calibration)

    def create_reference(self) -> ReferenceModel:
        """Return the model in NumPy, with the cache format and its scales."""
        return self.model.create_reference(self.options.tp, self.options.kv_cache_dtype, self._cache_scales)

    def create_backend(self, progress: Progress) -> Backend:
        """Return the backend that --backend names, with loaded weights; `progress` is called after each layer."""
        options = self.options
        if options.backend == "numpy":
            return self.create_reference()
        device = open_device(
            options.backend,
            options.target,
            self.mesh.ranks,
            processes=get_rank() is not None,
            exact=options.exact,
            verify=options.verify_replay,
        )
        if options.backend == "simulate":
            self.replay_report = cast(Any, device).replays.report.text
        return self._create_model(device, progress, expert_load=self.expert_load)

    def create_dry_model(
        self, device: Device, target: str, progress: Progress, done: Callable[[], None], lnc: int
    ) -> MicroBatches:
        """Return the model on a dry device, which predicts times, with all ranks, also those of other processes.

        Args:
            device: The dry device.
            target: Its chip, which may read weights and caches in other formats than that of --target.
            progress: Called with the number of finished layers and of all layers.
            done: Called after each step of a micro-batch.
            lnc: Number of physical cores of a rank of the device.
        """
        shards = self.model.describe_shards(self.mesh, target)
        return self._create_model(device, progress, shards, done, lnc=lnc, target=target)

    def _create_model(
        self,
        device: Device,
        progress: Progress,
        shards: tuple[RankWeights, ...] | None = None,
        done: Callable[[], None] = lambda: None,
        expert_load: ExpertLoad | None = None,
        lnc: int = 1,
        target: str | None = None,
    ) -> MicroBatches:
        """Return the model on a device, with a backend for each micro-batch.

        Args:
            device: The device.
            progress: Called with the number of finished layers and of all layers.
            shards: Weights of the ranks; None for those of the ranks in this process.
            done: Called after each step of a micro-batch.
            expert_load: Counts the choices of experts, or None.
            lnc: Number of physical cores of a rank of the device.
            target: The chip of the device; None for that of --target.
        """
        cache_format = self.model.choose_cache_format(self.options.kv_cache_dtype, target)
        backends = [
            KernelModel(
                self.config,
                shards or self._local_shards,
                device,
                self._cache_length,
                progress=progress,
                sequences=sequences,
                mesh=self.mesh,
                expert_load=expert_load,
                kv_cache_dtype=cache_format,
                lnc=lnc,
                cache_scales=self._cache_scales,
            )
            for sequences in self.micro_batches
        ]
        return MicroBatches(backends, self.micro_batches, done)


def _count_micro_batches(options: argparse.Namespace, mesh: Mesh, prompts: int) -> int:
    """Return the number of micro-batches: --micro-batches, or else as many as pipeline stages.

    It is at most the number of prompts of a data-parallel group.

    Raises:
        ModelError: --micro-batches exceeds the prompts of a group.
    """
    most = prompts // mesh.data
    if options.micro_batches is None:
        return min(mesh.pipeline, most)
    if options.micro_batches > most:
        groups = f" in {mesh.data} groups" if mesh.data > 1 else ""
        count = f"{prompts} prompt{'s' if prompts > 1 else ''}{groups}"
        works = f"--micro-batches 1{f' to {most}' if most > 1 else ''}"
        raise ModelError(f"{options.micro_batches} micro-batches of {count}; this run takes {works}")
    return options.micro_batches  # type: ignore[no-any-return]
