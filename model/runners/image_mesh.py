"""Meshes of the components of a diffusion model, and rows of a denoiser's images on Ulysses ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from model.config.component import ComponentConfig
from model.config.denoisers import DenoiserConfig
from model.layers.shard import Shape
from model.loading.component import LoadedComponent
from model.loading.weights import check_ranks
from model.mesh import Mesh


def count_ulysses_ranks(config: ComponentConfig) -> int:
    """Return the number of ranks that divide the rows of a component, for each tensor-parallel rank.

    Only denoisers have rows that ranks divide.
    """
    return config.ulysses_ranks if isinstance(config, DenoiserConfig) else 1


def create_mesh(config: ComponentConfig, ranks: int, groups: int = 1) -> Mesh:
    """Return the mesh of a component on the ranks of a device.

    Ranks that divide the rows of a denoiser are further tensor-parallel ranks of other components.

    Args:
        config: The component.
        ranks: All ranks.
        groups: Data-parallel groups of ranks, which share a batch.
    """
    ulysses = count_ulysses_ranks(config)
    return Mesh(ranks // (groups * ulysses), groups * ulysses, ulysses=ulysses)


def check_components(components: Iterable[LoadedComponent], ranks: int) -> None:
    """Raise ModelError if the ranks of a group cannot share one of the components; a denoiser is checked first."""
    for component in sorted(components, key=lambda model: not isinstance(model.config, DenoiserConfig)):
        check_ranks(component.config, create_mesh(component.config, ranks).tensor)


def divide_rows(array: np.ndarray, local_shape: Shape, ulysses: int) -> np.ndarray:
    """Return an input as the arrays of all data-parallel groups of a mesh, [groups * ulysses, *local_shape].

    Ulysses ranks divide the axis in which the shapes differ. An input without such an axis is equal on all of them.

    Args:
        array: The input of all groups that share a batch, [groups, ...].
        local_shape: Its shape on a rank.
        ulysses: Ulysses ranks.
    """
    divided = [axis for axis, size in enumerate(local_shape, 1) if array.shape[axis] != size]
    if not divided:
        return np.repeat(array, ulysses, axis=0)
    (axis,) = divided
    return np.stack(np.split(array, ulysses, axis=axis), axis=1).reshape(-1, *local_shape)


def join_rows(batches: Sequence[np.ndarray], ulysses: int) -> np.ndarray:
    """Return the images of a batch, [images, ...], from the arrays of the data-parallel groups of a mesh in order.

    Ulysses ranks divide the last axis but one, which has the rows of an image.
    """
    if ulysses == 1:
        return np.concatenate(batches)
    firsts = range(0, len(batches), ulysses)
    return np.concatenate([np.concatenate(batches[first : first + ulysses], axis=-2) for first in firsts])
