"""Routed experts: a router and gated feed-forward blocks, of which each token passes the few that it chose.

    x + sum over the chosen experts of weight * down(activation(gate(n)) * up(n)),   n = norm(x)

The intermediate size of every expert is cut over the ranks, as an MLP's is; all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.config.parts import Experts
from model.errors import ModelError
from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Growth,
    Launch,
    LeastWork,
    StackedWeight,
    StepShape,
    Tensor,
    Value,
    Weight,
    product,
)
from model.layers.layer import Stateless, States
from model.layers.mlp import activated
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, TRANSPOSED, even_span
from model.precision import FLOAT32

DECODED_TOKENS = 128
"""Tokens of a step up to which experts_decode takes them; beyond, experts_prefill sorts them by expert."""


@dataclass(frozen=True)
class ExpertProjections:
    """The projections of one expert."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class RoutedExperts(Stateless):
    """The block with its norm, its router and the projections of each expert; `routing` says how tokens choose."""

    name: str
    hidden: int
    norm: Norm
    routing: Experts
    router: Projection
    experts: tuple[ExpertProjections, ...]

    @property
    def _router_weights(self) -> dict[str, Weight | None]:
        """The router's matrix [hidden, experts], and its bias as a row where it has one."""
        bias = None
        if self.router.bias is not None:
            bias = Weight(f"{self.name}.b_router", (self.router.bias_row(ROW),))
        return {
            "w_router": Weight(f"{self.name}.w_router", (self.router.weight(TRANSPOSED),)),
            "b_router": bias,
        }

    @property
    def _matrices(self) -> tuple[StackedWeight, ...]:
        """Those of all experts: gate and up [experts, hidden, width], down [experts, width, hidden]."""
        return (
            self._stacked("w_gate", tuple(each.gate.weight(COLUMN_PARALLEL) for each in self.experts)),
            self._stacked("w_up", tuple(each.up.weight(COLUMN_PARALLEL) for each in self.experts)),
            self._stacked("w_down", tuple(each.down.weight(ROW_PARALLEL) for each in self.experts)),
        )

    def _stacked(self, name: str, tensors: tuple[Tensor, ...]) -> StackedWeight:
        return StackedWeight(f"{self.name}.{name}", tensors)

    @property
    def weights(self) -> Sequence[Weight]:
        """The norm, the router, and the projections of the experts."""
        router = (each for each in self._router_weights.values() if each is not None)
        return (*self.norm.weights, *router, *self._matrices)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """The router with the norm, and the experts that its choices name; ModelError for rows that ranks cut."""
        if step.cuts_sequence:
            raise ModelError("routed experts take whole rows: run them without sequence parallelism (--sp)")
        tokens, chosen = step.tokens, self.routing.per_token
        x = Value("x", (tokens, self.hidden), step.activations)
        router = {
            name: None if each is None else each.value(step) for name, each in self._router_weights.items()
        }
        matrix, bias = router["w_router"], router["b_router"]
        assert matrix is not None
        norm = (self.norm.weight.value(step), matrix, self.norm.eps)
        first: tuple[Argument, ...] = (x, *norm, chosen, self.routing.renormalise, "softmax", bias)
        rows = Value("expert_rows", x.shape, x.dtype)
        weights = Value("expert_weights", (tokens, chosen), FLOAT32)
        ids = Value("expert_ids", (tokens, chosen), INT32)
        matrices = [each.value(step) for each in self._matrices]
        second: tuple[Argument, ...] = (
            x,
            rows,
            weights,
            ids,
            *matrices,
            Axis.tensor,
            self.routing.activation,
        )
        kernel = "experts_decode" if tokens <= DECODED_TOKENS else "experts_prefill"
        reached = min(tokens * chosen, self.routing.count)
        each = sum(matrix.nbytes for matrix in matrices) / self.routing.count
        work = LeastWork(tokens * chosen * each / step.weights.itemsize * 2.0, reached * each)
        names = (rows.name, weights.name, ids.name)
        return (
            Launch("router", first, names, product(tokens, matrix), tokens),
            Launch(kernel, second, ("x",), work, tokens, growth=Growth.experts),
        )

    def resized(self, count: int, per_token: int, width: int) -> RoutedExperts:
        """The same with other numbers of experts and of those of a token, no more than there are, and another width."""
        first = self.experts[0]
        own = ExpertProjections(
            replace(first.gate, outputs=width),
            replace(first.up, outputs=width),
            replace(first.down, inputs=width),
        )
        return replace(
            self,
            routing=replace(self.routing, count=count, per_token=per_token, width=width),
            router=replace(self.router, outputs=count),
            experts=(own,) * count,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Expert by expert; the weighted gated product is rounded, and the sum with the residual."""
        normed = self.norm.reference(x, numpy)
        ids, weights = self._chosen(numpy.product(normed, self.router))
        products = []
        for number in np.unique(ids):
            rows, places = np.nonzero(ids == number)
            own = self.experts[number]
            gate, up = (numpy.product(normed[rows], each) for each in (own.gate, own.up))
            inner = activated(gate, self.routing.activation) * up * weights[rows, places][:, None]
            products.append((rows, numpy.rounded(inner), own.down))
        return numpy.rounded(x + numpy.sum_of_products((len(x), self.hidden), products, even_span))

    def _chosen(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of each token's experts, the largest first and of equal ones the lowest, and their weights."""
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : self.routing.per_token]
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights = np.take_along_axis(exponentials, ids, axis=1)
        total = weights if self.routing.renormalise else exponentials
        return ids, weights / total.sum(axis=1, keepdims=True)
