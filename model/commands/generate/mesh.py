"""Mesh of ranks of `nkw generate`, from its options: tensor, data, sequence, pipeline and expert parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from model.config import ModelConfig
from model.errors import ModelError
from model.loading.weights import check_ranks
from model.mesh import Mesh, check_experts, check_sequence

MOST_RANKS = 32
"""Most ranks of a run, which compute in turn in one process, or in a process each."""


def create_mesh(options: argparse.Namespace, config: ModelConfig) -> Mesh:
    """Return the mesh that the options ask for.

    Raises:
        ModelError: There are more than 32 ranks, more stages than layers, or ranks that cannot divide the model.
    """
    check_sequence(options.sp, options.tp)
    check_experts(config, options.ep, options.dp)
    mesh, layers = Mesh(options.tp, options.dp, options.sp, options.pp, options.ep), len(config.blocks)
    if mesh.pipeline > layers:
        raise ModelError(
            f"{mesh.pipeline} pipeline stages for {layers} layers; this model takes --pp 1 to {layers}"
        )
    if mesh.ranks > MOST_RANKS:
        stages = f"--pp {mesh.pipeline} times " if mesh.pipeline > 1 else ""
        groups = MOST_RANKS // (mesh.pipeline * mesh.tensor)
        works = (
            f"--tp {mesh.tensor} with --dp 1 to {groups}"
            if groups
            else f"--tp 1 to {MOST_RANKS // mesh.pipeline}"
        )
        raise ModelError(
            f"{stages}--tp {mesh.tensor} times --dp {mesh.data} are {mesh.ranks} ranks; one run takes {MOST_RANKS}: "
            f"{works}"
        )
    check_ranks(config, options.tp)
    return mesh


def check_groups(mesh: Mesh, prompts: Sequence[str]) -> None:
    """Check that each data-parallel group of the mesh gets a prompt.

    Raises:
        ModelError: There are fewer prompts than groups.
    """
    if mesh.data > len(prompts):
        count = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        works = "--dp 1" if len(prompts) == 1 else f"--dp 1 to {len(prompts)}"
        raise ModelError(f"--dp {mesh.data} makes {mesh.data} groups for {count}; this run takes {works}")
