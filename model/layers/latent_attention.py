"""Multi-head latent attention with the norm before it and the residual after it; the cache has one row per token.

    c    = norm(x) w_q_a;  q = norm(c) w_q     or q = norm(x) w_q; rotated; heads divided over the ranks
    kv   = norm(x) w_kv                        latent and key of every token, the same on every rank
    row  = [norm(latent) | rotated key]        a row of the cache
    o    = attention of q with keys [key | w_uk latent] and values w_uv latent of every head
    x    = output_projection(o, x)             all-reduced over the ranks, plus x

A prefill step computes these formulas: `latent_keys_values` expands keys and values, also of cached positions, for
`attention_prefill`. A decode step does not expand them: `latent_attention_decode` multiplies the queries by w_uk and
the softmax results by w_uv (weight absorption).

Heads of queries and keys are [rotated | plain] here. Checkpoints have the plain elements first, and the two elements of
a rotated pair are neighbours there.

With sequence parallelism a rank computes the query latents of its rows. The launches with w_q and w_kv gather the rows
of all ranks, and the last launch returns each rank's rows of the sum.

The cache is [sequences, length, latent + key], or pages [pages, block size, latent + key], whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.config.mixers import LatentAttention, Positions
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention_heads import RotaryTable
from model.layers.cache import Cache, create_latent_cache
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Growth,
    Launch,
    LeastWork,
    Phase,
    StepShape,
    Value,
    count_product_work,
    find_largest_launch,
    list_gather_arguments,
    split_into_launches,
)
from model.layers.layer import Constant, States
from model.layers.norm import Norm
from model.layers.precision import FLOAT32
from model.layers.projection import Projection
from model.layers.shard import TRANSPOSED, HeadPart, Reordered, by_query_heads
from model.layers.weight import Tensor, Weight, list_row_arguments

_PROJECTED = ("qkv_projection", "w_qkv")
"""Reader of the matrices that are multiplied by normalised rows."""


@dataclass(frozen=True)
class LatentProjections:
    """Projections in a checkpoint; `query_latent` is None if queries are projected from the hidden states."""

    query_latent: Projection | None
    query: Projection
    latent: Projection
    expand: Projection
    output: Projection


@dataclass(frozen=True)
class LatentMixer:
    """Latent attention layer: x + attention(norm(x)).

    `query_norm` normalises the latents of queries, `latent_norm` the latents of keys and values.
    """

    mixes: ClassVar[bool] = False
    component: ClassVar[str] = "attention"

    name: str
    hidden: int
    heads: LatentAttention
    norm: Norm
    projections: LatentProjections
    query_norm: Norm | None
    latent_norm: Norm

    @property
    def _positions(self) -> Positions:
        positions = self.heads.positions
        assert positions is not None
        return positions

    @property
    def w_query_latent(self) -> Weight | None:
        """Matrix of query latents, [hidden, query_rank] on every rank; None if there are no query latents."""
        projection = self.projections.query_latent
        if projection is None:
            return None
        return Weight(f"{self.name}.w_q_a", (projection.weight(TRANSPOSED),), reader=_PROJECTED)

    @property
    def w_query(self) -> Weight:
        """Matrix of queries, [query_rank, or hidden without query latents; heads of a rank * query_dim].

        The elements of a head are in the order [rotated | plain].
        """
        cut = Reordered(by_query_heads(*self.heads.divided), tuple(self._order_head()))
        return Weight(f"{self.name}.w_q", (self.projections.query.weight(cut),), reader=_PROJECTED)

    @property
    def w_latent(self) -> Weight:
        """Matrix of the latents and the key that all heads share, [hidden, latent_rank + rope_dim] on every rank."""
        rank = self.heads.latent_rank
        order = (*range(rank), *(rank + element for element in self._order_rotated()))
        tensors = (self.projections.latent.weight(Reordered(TRANSPOSED, order)),)
        return Weight(f"{self.name}.w_kv", tensors, reader=_PROJECTED)

    @property
    def w_keys(self) -> Weight:
        """Matrix w_uk that expands latents to plain elements of keys, [heads of a rank * plain_dim, latent_rank]."""
        return Weight(f"{self.name}.w_uk", (self._cut_expansion(0, self.heads.plain_dim, True),))

    @property
    def w_values(self) -> Weight:
        """Matrix w_uv that expands latents to values, [latent_rank, heads of a rank * value_dim]."""
        first = self.heads.plain_dim
        return Weight(f"{self.name}.w_uv", (self._cut_expansion(first, first + self.heads.value_dim, False),))

    @property
    def w_o(self) -> Weight:
        """Matrix of the output projection, [heads of a rank * value_dim, hidden]."""
        cut = by_query_heads(*self.heads.divided, axis=1)
        tensors = (self.projections.output.weight(cut),)
        return Weight(f"{self.name}.w_o", tensors, reader=("output_projection", "w_o"))

    def _cut_expansion(self, first: int, end: int, rows: bool) -> Tensor:
        """Return the rows first … end - 1 of every head of the checkpoint's `expand` [heads * rows, latent_rank].

        A rank has the rows of its heads: [heads * (end - first), latent_rank] with `rows`, transposed without.
        """
        span = by_query_heads(*self.heads.divided).span
        return self.projections.expand.weight(HeadPart(span, self.heads.heads, (first, end), rows))

    def _order_rotated(self) -> Sequence[int]:
        """Return the indices of a checkpoint's rotated elements in the order in which kernels expect them.

        Kernels have the first elements of all pairs, then the second ones. Checkpoints with `interleaved` pairs have
        the two elements of a pair side by side; without it the order is unchanged.
        """
        rotated = range(self.heads.rope_dim)
        return (*rotated[::2], *rotated[1::2]) if self.heads.interleaved else rotated

    def _order_head(self) -> Sequence[int]:
        """Return the indices of a checkpoint's query head [plain | rotated] in the kernels' order [rotated | plain]."""
        plain = self.heads.plain_dim
        return (*(plain + element for element in self._order_rotated()), *range(plain))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norms and of all projections."""
        norms = (norm for norm in (self.norm, self.query_norm, self.latent_norm) if norm is not None)
        matrices = (self.w_query_latent, self.w_query, self.w_latent, self.w_keys, self.w_values, self.w_o)
        return (
            *(weight for norm in norms for weight in norm.weights),
            *(matrix for matrix in matrices if matrix is not None),
        )

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """Return the cache with one row [latent | rotated key] for each token, whole on every rank."""
        return (self._cache(step),)

    def _cache(self, step: StepShape) -> Cache:
        """Return the cache for a step without `decoding`: this layer has no launches for mixed steps."""
        return create_latent_cache(self.name, self.heads.row_width, replace(step, decoding=None))

    def _describe_tables(self, step: StepShape) -> tuple[Value, Value]:
        """Return the rotary tables of cosines and sines, [positions, half of the rotated elements] each."""
        positions = self._positions
        shape = (min(step.cache_length, positions.limit), positions.width // 2)
        cos, sin = (Value(f"{positions.name}.{function}", shape, FLOAT32) for function in ("cos", "sin"))
        return cos, sin

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute the rotary tables and the scales of the cache, by array name.

        Layers with equal positions share the tables by name.
        """
        tables: dict[str, Constant] = {
            table.name: RotaryTable(self._positions, table.shape[0], index)
            for index, table in enumerate(self._describe_tables(step))
        }
        return tables | dict(self._cache(step).constants)

    @property
    def cached_projections(self) -> Mapping[str, Projection]:
        """Projection to the rows of the cache, by the name of the cache array."""
        return {f"{self.name}.rows": self.projections.latent}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of the projections, of attention, and of the output projection.

        A prefill step expands keys and values before attention. A decode step has as many launches of attention as
        needed, since the kernel takes a limited number of sequences.
        """
        if step.phase is Phase.prefill:
            return [*self._project(step), *self._prefill(step), self._project_output(step)]
        most = find_largest_launch(step.sequences, lambda sequences: [self._decode(step, sequences, 1)])
        sizes = split_into_launches(step.sequences, most)
        attend = [self._decode(step, sequences, repeat) for sequences, repeat in sizes]
        return [*self._project(step), *attend, self._project_output(step)]

    def _count_heads(self, step: StepShape) -> int:
        return self.heads.layout(step.ranks).heads_of_rank

    def _describe_queries(self, step: StepShape) -> Value:
        width = self._count_heads(step) * self.heads.query_dim
        return Value("q", (step.tokens, width), step.activations)

    def _describe_rows(self, step: StepShape) -> Value:
        return Value("kv", (step.tokens, self.heads.row_width), step.activations)

    def _project(self, step: StepShape) -> list[Launch]:
        """Return the launches that write `q`, the rotated queries, and `kv`, the latents and keys of the new tokens.

        `kv` is neither normalised nor rotated yet; the attention kernels do both.
        """
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        cos, sin = self._describe_tables(step)
        rotation: dict[str, Argument] = {
            "positions": Value("positions", (step.tokens, 1), INT32),
            "cos": cos,
            "sin": sin,
            "head_dim": self.heads.query_dim,
        }
        source, norm, launches = x, self.norm, []
        if self.w_query_latent is not None and self.query_norm is not None:
            latent = Value("query_latent", (step.local_rows, self.heads.query_rank), step.activations)
            launches.append(
                _project_normed(step, x, self.norm, self.w_query_latent, latent, "latents of queries", {})
            )
            source, norm = latent, self.query_norm
        return [
            *launches,
            _project_normed(
                step, source, norm, self.w_query, self._describe_queries(step), "queries", rotation
            ),
            _project_normed(step, x, self.norm, self.w_latent, self._describe_rows(step), "latents", {}),
        ]

    def _list_latent_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments with which `latent_keys_values` and `latent_attention_decode` treat the latents.

        These are the norm's weight and eps, the rotary tables, and the matrices `w_uk` and `w_uv`.
        """
        cos, sin = self._describe_tables(step)
        return {
            "norm_weight": self.latent_norm.weight.value(step),
            "eps": self.latent_norm.eps,
            "cos": cos,
            "sin": sin,
            "w_uk": self.w_keys.value(step),
            "w_uv": self.w_values.value(step),
        }

    def _prefill(self, step: StepShape) -> list[Launch]:
        """Return two launches: `latent_keys_values` and `attention_prefill`.

        The first writes the new rows to the cache, and expands keys and values of the cached prefix and the new tokens.
        The second attends to them.
        """
        heads = self._count_heads(step)
        new, cache = step.new_tokens, self._cache(step)
        end = step.prefix + new
        matrices = [weight.value(step) for weight in (self.w_keys, self.w_values)]
        expanded = step.sequences * end
        keys = Value("expanded_keys", (step.sequences, heads, self.heads.query_dim, end), step.activations)
        values = Value(
            "expanded_values", (step.sequences, heads, end, self.heads.value_dim), step.activations
        )
        size = step.activations.itemsize
        pairs = step.sequences * (end * (end + 1) - step.prefix * (step.prefix + 1)) // 2
        width = heads * (self.heads.query_dim + self.heads.value_dim)
        attention_bytes = size * width * (expanded + step.tokens)
        return [
            Launch(
                "latent_keys_values",
                {
                    "kv": self._describe_rows(step),
                    **cache.arguments,
                    "positions": cache.positions,
                    **self._list_latent_arguments(step),
                    "heads": heads,
                    "prefix": step.prefix,
                },
                (keys.name, values.name, *cache.names),
                count_product_work(expanded, *matrices, moved_bytes=float(size * width * expanded)),
                step.tokens,
            ),
            Launch(
                "attention_prefill",
                {
                    "q": self._describe_queries(step),
                    "k_cache": keys,
                    "v_cache": values,
                    "scale": self.heads.score_scale,
                    "num_kv_heads": heads,
                    "prefix": step.prefix,
                    **({"positions": cache.positions} if step.prefix else {}),
                },
                ("o",),
                LeastWork(2.0 * width * pairs, float(attention_bytes), 2.0 * width * pairs),
                step.tokens,
                growth=Growth.square,
            ),
        ]

    def _decode(self, step: StepShape, sequences: int, repeat: int) -> Launch:
        """Return the launch of `latent_attention_decode` for the new tokens of `sequences` sequences.

        The launch has the repeat count `repeat`. If it takes fewer tokens than the step, it reads the last rows.
        """
        tokens = sequences * step.new_tokens
        q, kv = (
            rows.take_last(tokens) if tokens < step.tokens else rows
            for rows in (self._describe_queries(step), self._describe_rows(step))
        )
        cache = self._cache(replace(step, tokens=tokens, sequences=sequences))
        seen = sequences * step.cache_length
        heads = self._count_heads(step)
        matrices = [weight.value(step) for weight in (self.w_keys, self.w_values)]
        projections = count_product_work(
            tokens, *matrices, moved_bytes=float(seen * self.heads.row_width * cache.arrays[0].dtype.itemsize)
        )
        scored = 2.0 * step.new_tokens * seen * heads * (self.heads.row_width + self.heads.latent_rank)
        return Launch(
            "latent_attention_decode",
            {
                "q": q,
                "kv": kv,
                **cache.arguments,
                "positions": cache.positions,
                "scale": self.heads.score_scale,
                **self._list_latent_arguments(step),
            },
            ("o", *cache.names),
            LeastWork(projections.operations + scored, projections.bytes, scored),
            tokens,
            repeat=repeat,
        )

    def _project_output(self, step: StepShape) -> Launch:
        """Return the launch of the output projection, which adds the residual."""
        matrices = self.w_o.arguments("w_o", step)
        return Launch(
            "output_projection",
            {
                "o": Value("o", (step.tokens, matrices["w_o"].shape[0]), step.activations),
                **matrices,
                "residual": Value("x", (step.local_rows, self.hidden), step.activations),
                "replica_group": Axis.tensor,
                "sequence_ranks": step.sequence_ranks,
                **list_row_arguments(step, self.w_o, divides_columns=True),
            },
            ("x",),
            count_product_work(step.tokens, matrices["w_o"]),
            step.tokens,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [tokens, hidden] after the layer, computed in NumPy; appends the new rows to `states`.

        Keys and values of every head are expanded from all rows of the cache, in decode steps too.
        """
        normed = source = self.norm.reference(x, numpy)
        if self.projections.query_latent is not None and self.query_norm is not None:
            latent = numpy.round(numpy.multiply_rows(normed, self.projections.query_latent))
            source = self.query_norm.reference(latent, numpy)
        query = numpy.round(numpy.multiply_rows(source, self.projections.query))
        query = query.reshape(len(x), self.heads.heads, -1)[:, :, list(self._order_head())]
        query = numpy.rotate(query.swapaxes(0, 1), self._positions, span)
        projected = numpy.round(numpy.multiply_rows(normed, self.projections.latent))
        latent, key = np.split(projected, [self.heads.latent_rank], axis=1)
        key = numpy.rotate(key[None, :, list(self._order_rotated())], self._positions, span)[0]
        new = np.concatenate([self.latent_norm.reference(latent, numpy), key], axis=1)
        name = f"{self.name}.rows"
        new = numpy.caching.store_latents(name, new, self.heads.latent_rank)
        rows = states[name] = np.concatenate([states[name], new]) if name in states else new
        head_span = by_query_heads(*self.heads.divided).span
        mixed = self._attend(query, rows, numpy)
        output = self.projections.output
        y = numpy.sum_partial_products(mixed, output, head_span)
        return numpy.round(x + y)

    def _attend(self, query: np.ndarray, rows: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return the sums of values weighted by the softmax of scores, [tokens, heads * value_dim], rounded.

        Args:
            query: Rotated queries, [heads, tokens, query_dim].
            rows: All rows of the cache, [positions, latent + key]; the last ones are the tokens'. The mask is causal.
            numpy: The arithmetic.
        """
        heads, tokens = self.heads, query.shape[1]
        latent, key = np.split(rows, [heads.latent_rank], axis=1)
        expanded = numpy.round(numpy.multiply(latent, self.projections.expand))
        plain, values = np.split(expanded.reshape(len(rows), heads.heads, -1), [heads.plain_dim], axis=2)
        rotated = np.broadcast_to(key[:, None], (len(rows), heads.heads, heads.rope_dim))
        keys = np.concatenate([rotated, plain], axis=2).transpose(1, 2, 0)
        scores = query @ keys * np.float32(heads.score_scale)
        hidden = np.arange(len(rows) - tokens, len(rows))[:, None] < np.arange(len(rows))
        scores[:, hidden] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = numpy.round(scores) @ values.swapaxes(0, 1) / scores.sum(axis=-1, keepdims=True)
        return numpy.round(mixed).swapaxes(0, 1).reshape(tokens, -1)


def _project_normed(
    step: StepShape,
    x: Value,
    norm: Norm,
    weight: Weight,
    result: Value,
    label: str,
    rotation: Mapping[str, Argument],
) -> Launch:
    """Return the launch of `qkv_projection` that writes norm(x) @ weight to `result`.

    The launch gathers the rows of all ranks if `result` has more rows than x. `rotation` has the arguments that rotate
    heads - positions, tables and size of a head - or is empty. `label` distinguishes the launch in reports.
    """
    matrices, rows = weight.arguments("w_qkv", step), result.shape[0]
    return Launch(
        "qkv_projection",
        {
            "x": x,
            "norm_weight": norm.weight.value(step),
            **matrices,
            "eps": norm.eps,
            "q_size": result.shape[1],
            **list_row_arguments(step, weight),
            **rotation,
            **(list_gather_arguments(step) if rows > x.shape[0] else {}),
        },
        (result.name,),
        count_product_work(rows, matrices["w_qkv"]),
        rows,
        label,
    )
