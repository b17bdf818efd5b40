"""Plan of images: weights and passes of the components of a diffusion model, and what images of an instance cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.device import DryDevice
from model.errors import ModelError
from model.layers.launch import LeastWork
from model.loading.component import LoadedComponent
from model.plan.prices import Price, compute_price_per
from model.runners.component import make_step
from model.runners.denoise import ImageRequest, ImageRunner, Sampling, check_count
from model.runners.image_mesh import check_components
from model.runners.image_times import ComponentTime, DryBackend
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.pipeline import ImagePipeline
from model.runners.rank_memory import RankMemory


@dataclass(frozen=True)
class ImagePlan:
    """Predicted times of a batch of images on some ranks of an instance.

    image_size     rows and columns of an image in pixels
    tokens         patches of an image in the denoiser
    images         images of a batch
    ranks          ranks that draw a batch
    ulysses        Ulysses ranks of each of their tensor-parallel ranks
    lnc            physical cores of a rank
    copies         batches that the instance draws at once, each on its own ranks
    parameters     parameters of all components
    weight_bytes   bytes of their weights in the dtype of activations, or in the format of quantised ones
    components     times of the components
    work           least work of one pass of the denoiser over its batch on one rank
    memory         HBM of a rank, and the weights on it
    price          price of the instance; None if unknown
    """

    target: str
    image_size: tuple[int, int]
    tokens: int
    images: int
    ranks: int
    ulysses: int
    lnc: int
    copies: int
    parameters: int
    weight_bytes: int
    components: tuple[ComponentTime, ...]
    work: LeastWork
    memory: RankMemory
    price: Price | None

    @property
    def activation_bytes(self) -> int:
        """Most bytes of activations that a pass of a component takes on a rank."""
        return max(component.activation_bytes for component in self.components)

    @property
    def total_ns(self) -> float:
        """Time of a batch in ns: engines and DMA queues in program order."""
        return sum(component.total_ns for component in self.components)

    @property
    def images_per_second(self) -> float:
        """Images that the instance draws in a second with all its cores."""
        return self.copies * self.images / self.total_ns * 1e9

    @property
    def dollars_per_thousand(self) -> float | None:
        """Price of 1,000 images in dollars; None if the price of the instance is unknown."""
        if self.price is None:
            return None
        return compute_price_per(1000, self.images_per_second, self.price.dollars_per_hour)

    def format_lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the report, for a model called `name`."""
        rows, columns = self.image_size
        yield f"{name}: {self.parameters:,} parameters, {self.weight_bytes:,} bytes"
        batch = "one image" if self.images == 1 else f"{self.images} images"
        cores = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} of {self.target} (LNC {self.lnc})"
        if self.ulysses > 1:
            cores += f", {self.ulysses} by Ulysses"
        yield f"{batch} of {columns}x{rows} pixels, {self.tokens:,} tokens, on {cores}, program order:"
        for component in self.components:
            share = component.total_ns / self.total_ns
            yield (
                f"  {component.name.replace('_', ' ')}: {component.passes} x "
                f"{component.prediction.program_ns / 1e6:,.3f} ms = {component.total_ns / 1e6:,.2f} ms ({share:.1%})"
            )
        attention = self.work.beside_weights / self.work.operations
        yield (
            f"  denoiser, a pass: {self.work.operations / 1e12:,.3g} TFLOP on a rank, {attention:.0%} in attention"
        )
        yield (
            f"  HBM of a rank: {self.memory.weight_bytes / 1e9:,.2f} GB of weights, "
            f"{self.activation_bytes / 1e9:,.2f} of activations, of {self.memory.hbm_bytes / 1e9:,.2f}"
        )
        yield f"  together: {self.total_ns / 1e6:,.2f} ms; host and runtime are not counted"
        yield f"images a second on all cores of the instance ({self.copies} at once): {self.images_per_second:,.2f}"
        if self.dollars_per_thousand is not None:
            yield f"$ for 1,000 images: {self.dollars_per_thousand:,.3f}"

    def build_document(self, name: str) -> dict[str, Any]:
        """Return the plan as a JSON object; times are in ns."""
        return {
            "model": name,
            "target": self.target,
            "lnc": self.lnc,
            "ranks": self.ranks,
            "ulysses_ranks": self.ulysses,
            "copies": self.copies,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "rank_weight_bytes": self.memory.weight_bytes,
            "rank_activation_bytes": self.activation_bytes,
            "rank_hbm_bytes": self.memory.hbm_bytes,
            "image_size": list(self.image_size),
            "tokens": self.tokens,
            "images": self.images,
            "denoiser_operations": self.work.operations,
            "attention_operations": self.work.beside_weights,
            "total_ns": self.total_ns,
            "images_per_second": self.images_per_second,
            "dollars_per_thousand": self.dollars_per_thousand,
            "components": [component.build_document() for component in self.components],
        }


class ImagePredictor:
    """Predictor of the times of batches of images, by dry runs; a component is timed once for each size of its batches.

    Args:
        pipeline: The model for images of one size.
        target: Name of the chip.
        ranks: Ranks of a group, Ulysses ranks included.
        lnc: Physical cores of a rank.
        groups: Data-parallel groups of ranks, which share each batch.

    Raises:
        ModelError: The ranks cannot share a component, or their HBM does not hold the weights.
    """

    def __init__(
        self, pipeline: ImagePipeline, target: str, ranks: int = 1, lnc: int = 1, groups: int = 1
    ) -> None:
        check_components(pipeline.components, ranks)
        self.memory = RankMemory.measure(pipeline.components, target, ranks, lnc)
        self.memory.check_weights()
        device = DryDevice(target, ranks * groups, one_for_all=True, lnc=lnc)
        self._pipeline, self._backend = pipeline, DryBackend(device, target, groups, self.memory)

    def predict(self, sampling: Sampling, images: int) -> tuple[ComponentTime, ...]:
        """Return the times of the components for a batch.

        Raises:
            ModelError: The batch has more than `MOST_IMAGES` images, its passes do not fit into HBM beside the weights,
                or the schedule does not have so many steps.
        """
        requests = [ImageRequest("", seed) for seed in range(images)]
        passes = ImageRunner(self._pipeline, self._backend).draw(requests, sampling).passes
        return tuple(self._backend.list_times(passes))


def count_copies(cores: int, ranks: int, lnc: int) -> int:
    """Return the number of batches that an instance draws at once, each on its own ranks.

    Args:
        cores: Physical cores of the instance.
        ranks: Ranks that draw a batch.
        lnc: Physical cores of a rank.

    Raises:
        ModelError: The instance has fewer ranks.
    """
    copies = cores // (ranks * lnc)
    if copies == 0:
        raise ModelError(f"{ranks} ranks of {lnc} cores; the instance has {cores} cores", "NKW-MODEL-OPTION")
    return copies


def open_planned_pipeline(folder: Path, dtype: str, size: tuple[int, int] | None) -> ImagePipeline:
    """Open a folder of a diffusion model for dry runs, which need no weights.

    Args:
        folder: The folder.
        dtype: Dtype of activations; any but float32 is bfloat16.
        size: Width and height of an image in pixels; None for the model's first size.

    Raises:
        ModelError: A file is missing or damaged, the folder describes what no layer computes, or the model does not
            have the size.
    """
    pipeline = open_pipeline(folder, "float32" if dtype == "float32" else "bfloat16", is_planned=True)
    return pipeline if size is None else pipeline.with_image_size(size[1], size[0])


def plan_images(
    pipeline: ImagePipeline,
    target: str,
    cores: int,
    sampling: Sampling,
    images: int = 1,
    ranks: int = 1,
    lnc: int = 1,
    price: Price | None = None,
    ulysses: int = 1,
) -> ImagePlan:
    """Return the plan of a batch of images; every component is timed by a dry run of one pass.

    Args:
        pipeline: The model for images of one size.
        target: Name of the chip.
        cores: Physical cores of the instance.
        sampling: Steps and guidance.
        images: Images of a batch.
        ranks: Tensor-parallel ranks that draw a batch.
        lnc: Physical cores of a rank.
        price: Price of the instance; None if unknown.
        ulysses: Ulysses ranks of each tensor-parallel rank.

    Raises:
        ModelError: The ranks cannot share a component, the instance has fewer of them, their HBM does not hold weights
            and activations, or the batch has more than `MOST_IMAGES` images.
    """
    check_count(images)
    all_ranks, divided = ranks * ulysses, pipeline.with_ulysses_ranks(ulysses)
    copies = count_copies(cores, all_ranks, lnc)
    predictor = ImagePredictor(divided, target, all_ranks, lnc)
    components = predictor.predict(sampling, images)
    batch = next(component.batch for component in components if component.name == "denoiser")
    return ImagePlan(
        target,
        pipeline.image_size,
        pipeline.denoiser_config.rows,
        images,
        all_ranks,
        ulysses,
        lnc,
        copies,
        sum(component.parameters for component in pipeline.components),
        sum(component.count_weight_bytes(target) for component in pipeline.components),
        components,
        _count_work(divided.denoiser, batch, ranks, target),
        predictor.memory,
        price,
    )


def _count_work(model: LoadedComponent, batch: int, ranks: int, target: str) -> LeastWork:
    """Return the least work of one pass of a component over a batch on a rank, with so many tensor-parallel ranks."""
    step = make_step(model.config, model.activations, model.choose_dtypes(target), batch, ranks)
    works = [launch.work for layer in model.network.layers for launch in layer.launches(step)]
    return sum(works, LeastWork(0.0, 0.0))
