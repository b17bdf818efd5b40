"""Predicted times of masked-diffusion text: of the passes, and of decoding as many tokens one by one instead.

The compared Llama has the same sizes and a causal mask. It computes the prompt in one step, and then a step for each
further token, with a cache. `nkw generate` and `nkw plan` print both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from model.config.masked_text import MaskedTextConfig
from model.families.llada import compose, compose_causal, compose_with_cache
from model.layers.launch import Launch, Phase, StepShape, Value, WeightDtypes
from model.mesh import Mesh
from model.network import Network
from model.plan.dry import DryTimes, Time
from model.runners.bucket_length import bucket_length
from model.runners.masked_text import list_head_pieces, shape_pass
from model.runners.unmasking import PassRecord, UnmaskingOptions, list_passes
from nkw.report import Hanging, Part, table


@dataclass(frozen=True)
class TextTimes:
    """Times of texts on one chip, of all sequences of a batch together.

    sequences    texts of the batch
    passes       the passes, each with its time
    first_token  time of the compared Llama's prompt
    each_token   time of its decode step with a cache as long as the text
    new_tokens   tokens of a text after its prompt
    lnc          physical cores of a rank
    """

    target: str
    ranks: int
    lnc: int
    sequences: int
    passes: tuple[tuple[PassRecord, Time], ...]
    first_token: Time
    each_token: Time
    new_tokens: int

    @property
    def text(self) -> Time:
        """Time of all passes."""
        return sum((time for _, time in self.passes), Time())

    @property
    def decoded_text(self) -> Time:
        """Time in which the compared Llama decodes as many tokens."""
        return self.first_token + self.each_token * (self.new_tokens - 1)

    @property
    def most_faster_passes(self) -> int:
        """Most passes, each as long as the mean pass, that are faster than decoding."""
        mean_ns = self.text.program_ns / len(self.passes)
        return max(0, int(np.ceil(self.decoded_text.program_ns / mean_ns)) - 1)

    def describe(self) -> Iterator[Part]:
        """Yield the parts of a report: a table in ms, and the number of passes from which on decoding is faster."""
        cores = "1 core" if self.ranks == 1 else f"{self.ranks} cores"
        full = [time for record, time in self.passes if not record.start]
        reusing = [time for record, time in self.passes if record.start]
        rows = [("full passes", f"{len(full)}", _format_ms(full[0]), _format_ms(sum(full, Time())))]
        if reusing:
            total = sum(reusing, Time())
            rows.append(
                (
                    "reusing passes",
                    f"{len(reusing)}",
                    _format_ms(total * (1 / len(reusing))),
                    _format_ms(total),
                )
            )
            rows.append(("the text", f"{len(self.passes)}", "", _format_ms(self.text)))
        decoded = f"{self.new_tokens}"
        rows.append(("token by token", decoded, _format_ms(self.each_token), _format_ms(self.decoded_text)))
        texts = "one text" if self.sequences == 1 else f"{self.sequences} texts"
        yield f"predicted for {texts} on {cores} of {self.target} (LNC {self.lnc}), in ms"
        yield table("|steps|a step|all", rows, gap=4)
        yield Hanging(
            "token by token: a Llama of the same sizes with a cache. Masked text is faster only where passes are far "
            f"fewer than tokens: here with up to {self.most_faster_passes} passes for {self.new_tokens} tokens"
        )

    def build_document(self) -> dict[str, Any]:
        """Return the times as a JSON object, in ns."""
        return {
            "target": self.target,
            "lnc": self.lnc,
            "pass_ns": [time.program_ns for _, time in self.passes],
            "text_ns": self.text.program_ns,
            "decoded_text_ns": self.decoded_text.program_ns,
            "decoded_token_ns": self.each_token.program_ns,
            "most_faster_passes": self.most_faster_passes,
        }


def _format_ms(time: Time) -> str:
    return f"{time.program_ns / 1e6:,.3f}"


@dataclass(frozen=True)
class TextPredictor:
    """Predictor of the times of texts on the ranks of a chip, from dry runs of the kernels.

    weights, activations  dtypes
    """

    config: MaskedTextConfig
    weights: WeightDtypes
    activations: np.dtype
    target: str
    ranks: int = 1
    lnc: int = 1

    @cached_property
    def _dry(self) -> DryTimes:
        return DryTimes(self.target, Mesh(self.ranks), self.lnc)

    @cached_property
    def _times(self) -> dict[Any, Time]:
        """Times of launches by their kernels and the shapes of their arguments."""
        return {}

    def predict(self, prompt: int, sequences: int, options: UnmaskingOptions) -> TextTimes:
        """Return the times of texts.

        Args:
            prompt: Tokens of each prompt.
            sequences: Number of texts that are computed together.
            options: Passes and blocks. Guidance doubles the texts of a pass.

        Raises:
            ModelError: A kernel refuses a launch.
        """
        length = prompt + options.new_tokens
        base = StepShape(
            Phase.prefill,
            sequences * prompt,
            sequences,
            bucket_length(length, self.config.context),
            self.config.context,
            self.ranks,
            self.activations,
            self.weights,
            lnc=self.lnc,
        )
        network = (compose_with_cache if options.reuses else compose)(self.config)
        texts = sequences * (2 if options.guidance else 1)
        passes = []
        for block, record in list_passes(prompt, options):
            step = shape_pass(texts, length, base, record.start)
            rows = range(block.start - record.start, block.stop - record.start)
            passes.append((record, self._time_step(network, step, len(list_head_pieces(step, rows)))))
        causal = compose_causal(self.config)
        decode = base.with_sizes(Phase.decode, sequences, 1, base.cache_length)
        first_token, each_token = self._time_step(causal, base), self._time_step(causal, decode)
        return TextTimes(
            self.target,
            self.ranks,
            self.lnc,
            sequences,
            tuple(passes),
            first_token,
            each_token,
            options.new_tokens,
        )

    def _time_step(self, network: Network, step: StepShape, head_repeats: int | None = None) -> Time:
        """Return the time of a step, which starts one graph.

        Args:
            network: The layers.
            step: The sizes.
            head_repeats: Launches of the head; None for those of its launch list.
        """
        *sections, last_section = network.sections
        body = self._time_launches(
            launch for section in sections for layer in section for launch in layer.launches(step)
        )
        head = self._time_launches(
            (launch for layer in last_section for launch in layer.launches(step)), head_repeats
        )
        return body + head + Time.exact(self._dry.overhead_ns)

    def _time_launches(self, launches: Iterable[Launch], repeats: int | None = None) -> Time:
        """Return the sum of the times of launches; launches of equal shapes are run once."""
        total = Time()
        for launch in launches:
            shapes = _list_shapes(launch.arguments)
            key = launch.kernel, shapes
            if key not in self._times:
                self._times[key] = self._dry.time_launch(launch)
            total = total + self._times[key] * (repeats or launch.repeat)
        return total


def _list_shapes(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides the instructions of a launch: shapes and dtypes of arrays, and the other arguments."""
    return tuple(
        (name, argument.shape, argument.dtype) if isinstance(argument, Value) else (name, argument)
        for name, argument in arguments.items()
    )
