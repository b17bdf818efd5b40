"""Mixture of experts: a router selects a few gated feed-forward blocks for each token.

    x + sum over the top-k experts of weight * down(activation(gate(n)) * up(n)),   n = norm(x)

Shared experts are a feed-forward block for every token. A launch of `mlp` after the router adds it to x, optionally
multiplied by a gate, one number for each token. Tensor-parallel ranks divide the intermediate size of every expert,
and all of them route alike.

With expert parallelism the ranks also divide the experts:

    rows, choices  = experts_dispatch(n)     gathers the rows and choices of all expert ranks
    results        = experts_…(rows)         computes a rank's experts for all gathered rows
    x              = experts_combine(results) + x

With sequence parallelism a rank routes its rows. A second, inner pair of `experts_dispatch` and `experts_combine`
gathers the rows of the tensor-parallel ranks, and returns each rank's rows of the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from model.config.blocks import SWIGLU_ALPHA, SWIGLU_LIMIT, SWIGLU_OAI, Experts
from model.layers.arithmetic import Arithmetic, Seen, Span
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Growth,
    Launch,
    LeastWork,
    StepShape,
    Value,
    count_copy_work,
    count_product_work,
)
from model.layers.layer import Constant, Stateless, States
from model.layers.mlp import FeedForward, apply_activation
from model.layers.norm import Norm, add_residual
from model.layers.precision import FLOAT32
from model.layers.projection import Projection
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, TRANSPOSED, slice_evenly
from model.layers.weight import Numbered, StackedRow, StackedWeight, Tensor, Weight, create_argument

EXPERT_IDS = "expert_ids"
"""Name of the expert ids that `router` returns, [rows, K] int32."""

FEWEST_SORTED_EXPERTS = 32
"""Fewest experts of a rank for which sorting rows takes less time than it saves; twice as many where ranks divide the
experts, because a rank then sorts the rows of all ranks."""

MATRICES = ("w_gate", "w_up", "w_down")
"""Parameters of the kernels of experts for the matrices of experts."""

_SORTED_WIDTH_ROWS = 64
"""Rows from which on `experts_decode` takes time for each row, so that sorting pays at proportionally larger widths."""


@dataclass(frozen=True)
class ExpertProjections:
    """Projections of one expert."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True)
class RoutedExperts(Stateless):
    """Mixture-of-experts layer.

    `routing` has the rules of routing and the sizes. `shared` are the projections of shared experts, and `shared_gate`
    [1, hidden] is their gate. `choice_bias` is the checkpoint tensor of a bias that changes only which experts are
    selected. `after` normalises the sum of routed and shared experts before it is added to x.
    """

    name: str
    hidden: int
    norm: Norm
    routing: Experts
    router: Projection
    experts: Sequence[ExpertProjections]
    shared: ExpertProjections | None = None
    choice_bias: str | None = None
    shared_gate: Projection | None = None
    after: Norm | None = None

    @property
    def _w_router(self) -> Weight:
        """Matrix of the router, [hidden, experts] on every rank."""
        return Weight(f"{self.name}.w_router", (self.router.weight(TRANSPOSED),))

    @property
    def _b_router(self) -> Weight | None:
        """Bias of the router's logits, [1, experts] on every rank; None without a bias."""
        bias = self.router.bias
        return None if bias is None else Weight(f"{self.name}.b_router", (self.router.bias_row(ROW),))

    @property
    def _b_choice(self) -> Weight | None:
        """Bias that changes only which experts are selected, [1, experts] float32 on every rank; None without one."""
        if self.choice_bias is None:
            return None
        row = Tensor(self.choice_bias, (self.routing.count,), ROW, exact=True)
        return Weight(f"{self.name}.b_choice", (row,), component="buffers")

    @property
    def _shared_block(self) -> FeedForward | None:
        """Shared experts as a feed-forward block with the norm of the router; None without shared experts."""
        if self.shared is None:
            return None
        return FeedForward(
            f"{self.name}.shared",
            self.hidden,
            self.norm,
            self.shared.gate,
            self.shared.up,
            self.shared.down,
            self.routing.activation,
            row_gate=self.shared_gate,
        )

    def _stack(self, tensor_of: Callable[[ExpertProjections], Tensor]) -> Numbered[Tensor]:
        """Return a sequence of `tensor_of(expert)` for every expert of the layer, called when an element is read."""
        return Numbered(range(len(self.experts)), lambda index: tensor_of(self.experts[index]))

    @property
    def _matrices(self) -> tuple[StackedWeight, ...]:
        """Matrices of a rank's experts: gate and up [experts, hidden, width], down [experts, width, hidden]."""
        stacks = (
            self._stack(lambda expert: expert.gate.weight(COLUMN_PARALLEL)),
            self._stack(lambda expert: expert.up.weight(COLUMN_PARALLEL)),
            self._stack(lambda expert: expert.down.weight(ROW_PARALLEL)),
        )
        # `experts_prefill` has the same parameters.
        return tuple(
            StackedWeight(f"{self.name}.{name}", stack, reader=("experts_decode", name))
            for name, stack in zip(MATRICES, stacks)
        )

    @property
    def _biases(self) -> tuple[StackedRow | None, ...]:
        """Biases of a rank's experts: gate and up [experts, width], down [experts, hidden]; all None without biases."""
        if self.experts[0].down.bias is None:
            return (None, None, None)
        rows = {
            "b_gate": self._stack(lambda expert: expert.gate.bias_row(COLUMN_PARALLEL)),
            "b_up": self._stack(lambda expert: expert.up.bias_row(COLUMN_PARALLEL)),
            "b_down": self._stack(lambda expert: expert.down.bias_row(ROW)),
        }
        return tuple(StackedRow(f"{self.name}.{name}", stack) for name, stack in rows.items())

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm, the router, the shared experts, the routed experts, and the norm after them."""
        shared = () if self._shared_block is None else self._shared_block.weights[len(self.norm.weights) :]
        router = (self._w_router, self._b_router, self._b_choice)
        optional_weights = (*router, *shared, *self._matrices, *self._biases)
        after = () if self.after is None else self.after.weights
        return (*self.norm.weights, *(weight for weight in optional_weights if weight is not None), *after)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the function that computes the id of a rank's first expert, [1, 1] int32.

        The result is empty without expert parallelism.
        """
        if step.expert_ranks == 1:
            return {}
        count = self.routing.count // step.expert_ranks
        return {self._first_expert.name: lambda shard: np.array([[shard.expert_rank * count]], INT32)}

    @property
    def _first_expert(self) -> Value:
        return Value(f"{self.name}.first", (1, 1), INT32)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the router, the shared experts, the routed experts, and the norm after them, in order.

        The shared experts and the norm are left out if the layer has none. With expert or sequence parallelism the
        routed experts are enclosed by `experts_dispatch` and `experts_combine`.
        """
        tokens = step.local_rows
        x = Value("x", (tokens, self.hidden), step.activations)
        matrix = self._w_router.value(step)
        routed_rows = self._describe_routed_rows(step, tokens)
        route = Launch(
            "router",
            {
                "x": x,
                "norm_weight": self.norm.weight.value(step),
                "w_router": matrix,
                "eps": self.norm.eps,
                "top_k": self.routing.per_token,
                "renormalise": self.routing.renormalise,
                "scoring": self.routing.scoring,
                "bias": create_argument(self._b_router, step),
                "choice_bias": create_argument(self._b_choice, step),
                "groups": self.routing.groups,
                "top_groups": self.routing.top_groups,
                "scale": self.routing.scale,
                "norm_offset": self.norm.offset,
            },
            tuple(array.name for array in routed_rows),
            count_product_work(tokens, matrix),
            tokens,
        )
        launches = [route]
        if self._shared_block is not None:
            launches.append(replace(self._shared_block, after=self.after).launches(step)[0])
        launches += self._exchange_and_compute(step, routed_rows)
        if self.after is not None:
            total = Value(self._sum_name, x.shape, x.dtype)
            launches.append(self.after.launch(step, total, "x", "after the experts", x))
        return launches

    @property
    def _sum_name(self) -> str:
        """Name of the array to which the experts add: "x", or "mlp" with a norm `after` the experts, which adds x."""
        return "x" if self.after is None else "mlp"

    def _find_addend(self, step: StepShape, rows: int) -> Value | None:
        """Return the array [`rows`, hidden] to which the routed experts add.

        It is x, or the result of the shared experts if a norm follows; None with such a norm and no shared experts.
        """
        if self.after is not None and self.shared is None:
            return None
        return Value(self._sum_name, (rows, self.hidden), step.activations)

    def _describe_routed_rows(self, step: StepShape, rows: int, name: str = "") -> tuple[Value, Value, Value]:
        """Return the arrays that `router` writes, or `experts_dispatch` gathers, for `rows` rows.

        These are the normalised hidden states [rows, hidden], the routing weights [rows, K] float32 and the expert ids
        [rows, K] int32. `name` is a prefix of the three names.
        """
        chosen = (rows, self.routing.per_token)
        return (
            Value(f"{name}expert_rows", (rows, self.hidden), step.activations),
            Value(f"{name}expert_weights", chosen, FLOAT32),
            Value(f"{name}{EXPERT_IDS}", chosen, INT32),
        )

    def _exchange_and_compute(self, step: StepShape, chosen: tuple[Value, Value, Value]) -> list[Launch]:
        """Return the launch of the routed experts, enclosed by exchanges over expert ranks and sequence ranks.

        An exchange is `experts_dispatch` before the experts and `experts_combine` after them. Without expert and
        sequence parallelism there is none. `chosen` are the results of the router (`_describe_routed_rows`).
        """
        local_experts, down = self.routing.count // step.expert_ranks, self._biases[2]
        exchanges: list[tuple[Axis, int, str, str, Value | None]] = []
        if step.expert_ranks > 1:
            exchanges.append((Axis.expert, step.expert_ranks, "all_", "", self._first_expert))
        if step.sequence_ranks > 1:
            exchanges.append((Axis.tensor, step.sequence_ranks, "whole_", "rows of a group", None))
        before, after = list[Launch](), list[Launch]()
        residual, result = self._find_addend(step, step.local_rows), self._sum_name
        for axis, ranks, name, label, first in exchanges:
            received = self._describe_routed_rows(step, ranks * chosen[0].shape[0], name)
            results = Value(f"{name}expert_results", received[0].shape, step.activations)
            work = LeastWork(0.0, 2.0 * sum(array.nbytes for array in received))
            names = tuple(array.name for array in received)
            choices = dict(zip(("n", "weights", "ids"), chosen))
            group: dict[str, Argument] = {"replica_group": axis, "ranks": ranks}
            dispatched: dict[str, Argument] = {**choices, "first": first, "experts": local_experts, **group}
            before.append(Launch("experts_dispatch", dispatched, names, work, step.local_rows, label))
            combined: dict[str, Argument] = {
                "results": results,
                **group,
                "residual": residual,
            }
            if (
                axis is Axis.tensor and down is not None
            ):  # the kernel of the experts would add it once for each rank
                combined |= {
                    "weights": choices["weights"],
                    "ids": choices["ids"],
                    "b_down": down.value(step),
                    "absent": step.expert_ranks > 1,
                }
            after.insert(
                0,
                Launch(
                    "experts_combine", combined, (result,), count_copy_work(results), step.local_rows, label
                ),
            )
            chosen, residual, result = received, None, results.name
        return [*before, self.create_experts_launch(step, chosen[0].shape[0]), *after]

    def create_experts_launch(self, step: StepShape, rows: int, kernel: str | None = None) -> Launch:
        """Return the launch of a rank's experts for `rows` rows, counted after they are gathered from other ranks.

        `kernel` is `experts_decode` or `experts_prefill`. With None it is `experts_prefill` if that is predicted to be
        faster or if `experts_decode` refuses the shapes, else `experts_decode`.
        """
        divided, cut = step.expert_ranks > 1, step.sequence_ranks > 1
        name = "whole_" if cut else "all_" if divided else ""
        stacks: dict[str, Value] = {}
        for matrix, weight in zip(MATRICES, self._matrices):
            stacks |= weight.arguments(matrix, step)
        matrices = [stacks[name] for name in MATRICES]
        b_gate, b_up, b_down = (create_argument(bias, step) for bias in self._biases)
        arguments: dict[str, Argument] = {
            **dict(zip(("n", "weights", "ids"), self._describe_routed_rows(step, rows, name))),
            **stacks,
            "activation": self.routing.activation,
            "b_gate": b_gate,
            "b_up": b_up,
            "absent": divided,
        }
        if not name:
            arguments |= {"residual": self._find_addend(step, rows)}
        if not cut:  # otherwise experts_combine sums over the ranks and adds the bias once
            arguments |= {"replica_group": Axis.tensor, "b_down": b_down}
        choices = rows // step.expert_ranks * self.routing.per_token
        local_experts = matrices[0].shape[0]
        elements = sum(prod(matrix.shape) for matrix in matrices) / local_experts
        nbytes = sum(stack.nbytes for stack in stacks.values()) / local_experts
        work = LeastWork(choices * elements * 2.0, min(choices, local_experts) * nbytes)
        result = f"{name}expert_results" if name else self._sum_name
        launch = Launch("experts_decode", arguments, (result,), work, rows, growth=Growth.experts)
        if kernel is None:
            sorts = self._is_sorting_faster(step, rows, choices, matrices[0]) or launch.refusal is not None
            kernel = "experts_prefill" if sorts else launch.kernel
        if kernel == launch.kernel:
            return launch
        return replace(launch, kernel=kernel, arguments=arguments | {"expert_ranks": step.expert_ranks})

    def _is_sorting_faster(self, step: StepShape, rows: int, choices: int, gate: Value) -> bool:
        """Return whether `experts_prefill`, which sorts rows by expert, is predicted to be the faster kernel.

        `choices` is the number of (row, expert) pairs that a rank computes on average, and `gate` the stacked gate
        matrices [experts, hidden, width] of the rank.

        With more choices than experts `experts_decode` multiplies all rows by every expert. Its time for an expert
        depends on the hidden size, and that of `experts_prefill` on the bytes of weights. So narrow experts are sorted.
        The rule follows dry launches on all chips (tests/model/test_expert_kernels.py).
        """
        experts, _, width = gate.shape
        if choices <= experts or experts < FEWEST_SORTED_EXPERTS * min(2, step.expert_ranks):
            return False
        return width <= step.sorted_expert_width * max(1.0, rows / _SORTED_WIDTH_ROWS)

    def resized(self, count: int, per_token: int, width: int) -> RoutedExperts:
        """Return the layer with other sizes, for predictions; all experts have the projections of the first one.

        Args:
            count: Experts of the layer, over all ranks.
            per_token: Experts of a token, at most `count`.
            width: Intermediate size of an expert.
        """
        first = self.experts[0]
        projections = ExpertProjections(
            first.gate.resized(width),
            first.up.resized(width),
            replace(first.down, inputs=width),
        )
        return replace(
            self,
            routing=replace(self.routing, count=count, per_token=per_token, width=width),
            router=self.router.resized(count),
            experts=Numbered(range(count), lambda _: projections),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the layer, computed in NumPy one expert after another.

        Expert ids and routing weights are passed to `numpy.observe`.
        Rounded are the weighted gated products, the sum with the shared experts, and the sum with the residual.
        """
        normed, shared = self.norm.reference(x, numpy), self._shared_block
        residual = x
        if self.after is not None:
            x = np.zeros_like(x) if shared is None else numpy.round(shared.compute_output(x, numpy))
        elif shared is not None:
            x = shared.reference(x, span, states, numpy)
        ids, weights = self._route(numpy.multiply(normed, self.router), numpy)
        numpy.observe(Seen.experts, ids, weights)
        products = []
        total = x.copy()
        for expert_id in np.unique(ids):
            rows, choices = np.nonzero(ids == expert_id)
            expert = self.experts[expert_id]
            gate, up = (numpy.multiply(normed[rows], projection) for projection in (expert.gate, expert.up))
            weight = weights[rows, choices][:, None]
            inner = apply_gated_activation(gate, up, self.routing.activation)
            products.append((rows, numpy.round(inner * weight), expert.down))
            total[rows] += weight * numpy.load_bias(expert.down)
        total = numpy.round(total + numpy.sum_expert_products((len(x), self.hidden), products, slice_evenly))
        if self.after is None:
            return total
        return add_residual(residual, self.after.reference(total, numpy), None, numpy)

    def _route(self, logits: np.ndarray, numpy: Arithmetic) -> tuple[np.ndarray, np.ndarray]:
        """Return expert ids and routing weights, [tokens, K] each, for the router's logits [tokens, experts].

        The best expert is first; ties take the lower id. Weights are scaled, and renormalised if the routing says so.
        """
        if self.routing.scoring == "softmax":
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            choice, total = logits, scores.sum(axis=1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits))
            bias = 0 if self.choice_bias is None else numpy.load_tensor(self.choice_bias)
            choice, total = scores + bias, np.float32(1)
        ids = np.argsort(-self._mask_groups(choice), axis=1, kind="stable")[:, : self.routing.per_token]
        weights = np.take_along_axis(scores, ids, axis=1)
        if self.routing.renormalise:
            total = weights.sum(axis=1, keepdims=True)
        return ids, weights / total * np.float32(self.routing.scale)

    def _mask_groups(self, choice: np.ndarray) -> np.ndarray:
        """Return the scores [tokens, experts] with -inf for experts outside a token's best `top_groups` groups.

        The score of a group is its largest score with softmax, otherwise the sum of its two largest scores. If all
        groups count, `choice` itself is returned.
        """
        routing = self.routing
        if routing.top_groups == routing.groups:
            return choice
        by_group = choice.reshape(len(choice), routing.groups, -1)
        counted = 1 if routing.scoring == "softmax" else 2
        best = np.sort(by_group, axis=2)[:, :, -counted:].sum(axis=2)
        mask = np.zeros(best.shape, bool)
        np.put_along_axis(mask, np.argsort(-best, axis=1, kind="stable")[:, : routing.top_groups], True, 1)
        return np.where(mask[:, :, None], by_group, -np.inf).reshape(choice.shape)


def apply_gated_activation(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """Return activation(gate) * up, element by element and not rounded.

    For the activation SWIGLU_OAI of gpt-oss it is (up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate). Gate is limited to at
    most SWIGLU_LIMIT first, and up to ±SWIGLU_LIMIT.
    """
    if activation != SWIGLU_OAI:
        return apply_activation(gate, activation) * up
    bounded = np.minimum(gate, np.float32(SWIGLU_LIMIT))
    linear = np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) + np.float32(1.0)
    return linear * bounded / (1 + np.exp(np.float32(-SWIGLU_ALPHA) * bounded))
