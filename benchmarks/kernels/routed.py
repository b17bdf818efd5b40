"""Works of routed experts on one rank: the router and the experts, of a prompt and of decode steps.

Shapes are one rank's: Mixtral-8x7B over 8 ranks, Qwen3-30B-A3B over 4, OLMoE-1B-7B on one, gpt-oss-20b over 8. Widths
are those of a rank's part of an expert. The floor counts the weights of every expert that a token may choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.kernels.works import BFLOAT16, Shape, Work, build_step
from model.config import ModelConfig
from model.config.blocks import SWIGLU_OAI, Block, Experts, Norms
from model.config.mixers import GroupedAttention
from model.families import compose
from model.layers.launch import LeastWork, Phase

TOKENS = (2048,)
SEQUENCES = (1, 16, 64)


@dataclass(frozen=True)
class ExpertShape(Shape):
    """Sizes of one rank's routed experts: the number of experts, and how many of them each token is routed to."""

    experts: int
    per_token: int
    model_type: str = "mixtral"

    @property
    def config(self) -> ModelConfig:
        """Configuration of a one-layer model with these sizes, for one rank."""
        has_biases = self.model_type == "gpt_oss"
        routed = Experts(
            *(self.experts, self.per_token, self.width),
            bias=has_biases,
            router_bias=has_biases,
            activation=SWIGLU_OAI if has_biases else "silu",
        )
        block = Block(GroupedAttention(1, 1, 128), routed, Norms(1e-5))
        return ModelConfig(128, self.hidden, (block,), 8192, False, model_type=self.model_type)


SHAPES = (
    ExpertShape("Mixtral tp8", 4096, 1792, 8, 2),
    ExpertShape("Qwen3-30B tp4", 2048, 192, 128, 8),
    ExpertShape("OLMoE", 2048, 1024, 64, 8),
    ExpertShape("gpt-oss-20b tp8", 2880, 360, 32, 4, "gpt_oss"),
)


def expert_works() -> Iterator[Work]:
    """Yield the works of prompts, then those of decode steps."""
    for phase, sizes in ((Phase.prefill, TOKENS), (Phase.decode, SEQUENCES)):
        for shape in SHAPES:
            for rows in sizes:
                yield from _works(shape, phase, rows)


def _works(shape: ExpertShape, phase: Phase, rows: int) -> Iterator[Work]:
    """Yield the works of the router and of the experts; `rows` are tokens of a prompt or sequences of a decode step."""
    (_, layer) = compose(shape.config).blocks[0]
    router, experts = layer.launches(build_step(phase, rows, max(rows, 128)))
    activations = BFLOAT16.itemsize * rows * shape.hidden
    for name, launch, passes in (("router", router, 2), ("experts", experts, 3)):
        least = LeastWork(launch.work.operations, launch.work.bytes + passes * activations)
        yield Work(f"{phase.value} {name}", shape, rows, least, (launch,))
