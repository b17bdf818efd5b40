"""The mesh of a generation, as its options ask for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from model.config import ModelConfig
from model.errors import ModelError
from model.loading.weights import check_ranks
from model.mesh import Mesh, check_experts, check_sequence

MOST_RANKS = 32
"""Of one run: they compute in turn, in one process or in one each."""


def mesh_of(options: argparse.Namespace, config: ModelConfig) -> Mesh:
    """The mesh of the options; ModelError for too many ranks, or ranks that cannot share the model."""
    check_sequence(options.sp, options.tp)
    check_experts(config, options.ep, options.dp)
    mesh = Mesh(options.tp, options.dp, options.sp, options.pp, options.ep)
    if mesh.pipeline > 1:
        _check_pipeline(mesh, config)
    elif mesh.ranks > MOST_RANKS:
        groups = MOST_RANKS // mesh.tensor
        works = f"--tp {mesh.tensor} with --dp 1 to {groups}" if groups else f"--tp 1 to {MOST_RANKS}"
        raise ModelError(
            f"--tp {mesh.tensor} times --dp {mesh.data} are {mesh.ranks} ranks; one run takes {MOST_RANKS}: {works}"
        )
    check_ranks(config, options.tp)
    return mesh


def _check_pipeline(mesh: Mesh, config: ModelConfig) -> None:
    """Raise ModelError for more stages than layers, or too many ranks."""
    if mesh.pipeline > len(config.blocks):
        raise ModelError(
            f"{mesh.pipeline} pipeline stages for {len(config.blocks)} layers; this model takes --pp 1 to "
            f"{len(config.blocks)}"
        )
    if mesh.ranks > MOST_RANKS:
        raise ModelError(
            f"--pp {mesh.pipeline} times --tp {mesh.tensor} times --dp {mesh.data} are {mesh.ranks} ranks; one run "
            f"takes {MOST_RANKS}"
        )


def check_groups(mesh: Mesh, prompts: Sequence[str]) -> None:
    """Raise ModelError where there are fewer prompts than groups."""
    if mesh.data > len(prompts):
        count = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        works = "--dp 1" if len(prompts) == 1 else f"--dp 1 to {len(prompts)}"
        raise ModelError(f"--dp {mesh.data} makes {mesh.data} groups for {count}; this run takes {works}")
