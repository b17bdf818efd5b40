"""Predicted times of a Llama's passes: dry runs of the project's kernels at one rank's shapes, added up.

Equal layers are launched once and counted as often as they are there. `attention_decode` takes one sequence, so a batch
is as many launches; `lm_head` takes 128 rows at a time. A kernel that refuses a shape, or that would compute something
else than the model, is replaced by its roofline, and the reason is kept.

No launch is taken as shorter than its work on the core's peaks. The readings know what DMA engines can move, on trn2
more than one core's part of the HBM bandwidth, and the dataflow reading leaves even that unlimited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.device import chip, kernel_limit
from model.errors import ModelError
from model.plan.calls import Call, RankCalls, RowCall
from model.plan.dry import ROWS_TOGETHER, DryTimes, Time
from model.plan.parameters import LlamaLayer, Model
from model.plan.roofline import core


@dataclass(frozen=True)
class Part:
    """One kernel of a pass: how often it is launched, and the time of all launches, on one rank.

    `floor_ns` is their work on the core's peaks. `refusal` is empty for dry runs; else it is why `time` is the floor.
    """

    name: str
    launches: int
    time: Time
    floor_ns: float
    refusal: str = ""


@dataclass(frozen=True)
class PassTime:
    """A pass of the model over all ranks: its kernels, and starting and ending a kernel once."""

    overhead: Time
    parts: tuple[Part, ...]

    @property
    def time(self) -> Time:
        """The whole pass."""
        return sum((part.time for part in self.parts), self.overhead)

    @property
    def floor_ns(self) -> float:
        """The work of all kernels on the core's peaks."""
        return sum(part.floor_ns for part in self.parts)

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts are rooflines."""
        return tuple(dict.fromkeys(part.refusal for part in self.parts if part.refusal))


class Predictor:
    """Times of a model over `tp` cores of one chip, for sequences that end at `context` tokens."""

    def __init__(
        self, model: Model, layer: LlamaLayer, target: str, tp: int, dtype: str, context: int
    ) -> None:
        self._model, self._tp, self._head_norms = model, tp, layer.head_norms
        self._core = core(chip(target), dtype)
        self._dry = DryTimes(target, tp)
        searched = kernel_limit("top_k", "MAX_SEARCHED")
        self._calls = RankCalls(model, layer, tp, dtype, context, self._dry.replica_group, searched)
        narrow = [each.window for each in model.layers if each.window is not None and each.window < context]
        self._window = f"no kernel attends within a window, here of {min(narrow)} tokens" if narrow else ""

    def first_token(self, tokens: int) -> PassTime:
        """One prompt, and the head for its last token."""
        most = kernel_limit("attention_prefill", "MAX_TOKENS")
        refusal = self._window
        if not refusal and tokens > most:
            refusal = f"attention_prefill takes at most {most} tokens, not {tokens}"
        call = self._calls.attention_prefill

        def measure() -> Time:
            return self._dry.by_tokens(call, tokens)

        attention = self._part("attention_prefill", call(tokens), measure, self._model.num_layers, refusal)
        return self._pass(tokens, attention, sequences=1)

    def step(self, batch: int) -> PassTime:
        """One token for each of `batch` sequences."""
        call = self._calls.attention_decode()

        def measure() -> Time:
            return self._dry.launch(call)

        launches = self._model.num_layers * batch
        attention = self._part("attention_decode", call, measure, launches, self._window)
        return self._pass(batch, attention, sequences=batch)

    def _pass(self, rows: int, attention: Part, sequences: int) -> PassTime:
        calls, layers = self._calls, self._model.num_layers
        parts = [
            self._rows("embedding", calls.embedding, 1, rows),
            self._rows("qkv_projection", calls.qkv_projection, layers, rows),
        ]
        for what, heads in (("queries", calls.heads), ("keys", calls.kv_heads)):
            if self._head_norms:
                parts.append(self._rows(f"rmsnorm, {what}", calls.head_norm(heads), layers, rows))
            parts.append(self._rows(f"rope, {what}", calls.rope(heads), layers, rows))
        parts += [
            attention,
            self._rows("output_projection", calls.output_projection, layers, rows),
            self._rows("mlp", calls.mlp, layers, rows),
        ]
        if self._tp > 1:
            parts.append(self._rows("all_reduce", calls.all_reduce, 2 * layers, rows))
        parts += self._heads(sequences)
        return PassTime(Time.exact(self._dry.overhead_ns), tuple(parts))

    def _heads(self, rows: int) -> list[Part]:
        """The head, 128 rows at a time."""
        whole, rest = divmod(rows, ROWS_TOGETHER)
        head = self._calls.lm_head
        parts = [self._rows("lm_head", head, whole, ROWS_TOGETHER)] if whole else []
        return parts + ([self._rows("lm_head", head, 1, rest)] if rest else [])

    def _rows(self, name: str, call: RowCall, launches: int, rows: int) -> Part:
        return self._part(name, call(rows), lambda: self._dry.by_rows(call, rows), launches)

    def _part(
        self, name: str, call: Call, measure: Callable[[], Time], launches: int, refusal: str = ""
    ) -> Part:
        floor_ns = 1e9 * call.work.seconds(self._core)
        time = Time.exact(floor_ns)
        if not refusal:
            try:
                time = measure().at_least(floor_ns)
            except ModelError as error:
                refusal = str(error).removeprefix(f"{call.kernel}: ")
        return Part(name, launches, time * launches, floor_ns * launches, refusal)
