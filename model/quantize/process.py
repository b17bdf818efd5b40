"""Quantisation of a model layer by layer: inputs of calibration, rounding, and the errors of weights.

A layer is computed with the calibration texts twice: first as it is, for the statistics of its inputs, then quantised,
for the inputs of the next layer, so that later layers see the errors of earlier ones. Without calibration each weight
is rounded on its own and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.errors import ModelError
from model.layers.arithmetic import Arithmetic, widen
from model.layers.layer import Layer
from model.loading.checkpoint import Checkpoint
from model.network import Network
from model.quantize.calibration import InputStatistics, Recorder
from model.quantize.containers import OUTLIER_THRESHOLD, choose_scale_dtype
from model.quantize.evaluation import Evaluation
from model.quantize.folding import choose_smoothing, fold_norm, measure_product_error, search_factors
from model.quantize.gptq import DAMPING, round_with_products
from model.quantize.layer_weights import LayerWeights
from model.quantize.linears import Linear, Selection, group_by_layer
from model.quantize.rounding import Rounded, round_to_nearest
from model.quantize.schemes import Method, Scheme
from model.quantize.sequences import Sequences, find_last_readers

_TRACED_TOKENS = 4
_FOLDED_TOLERANCE = 1e-3
"""Largest change of a layer's result, over its root mean square, that folded factors may cause before rounding."""

Write = Callable[[str, Rounded | np.ndarray], None]
"""Function that stores a quantised weight, or a plain one whose numbers have changed, by name."""


@dataclass(frozen=True)
class WeightError:
    """Errors of one quantised weight.

    weight   root mean square of the difference of the numbers, over that of the original
    product  the same of products with the calibration rows; None without products of inputs
    """

    weight: float
    product: float | None = None


@dataclass
class Findings:
    """What quantisation found.

    errors    errors of weights by module
    unreached modules of experts that calibration never reached, which were rounded to nearest
    unfolded  norms into which no factors could be folded, whose readers were rounded as they are
    outliers  columns with outliers by module (LLM.int8)
    """

    errors: dict[str, WeightError] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    unfolded: list[str] = field(default_factory=list)
    outliers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Scheme and parameters of GPTQ: the damping, and whether columns are rounded in the order of their inputs."""

    scheme: Scheme
    damping: float = DAMPING
    orders_columns: bool = False


def quantise(
    network: Network,
    checkpoint: Checkpoint,
    selection: Selection,
    settings: Settings,
    write: Write,
    calibration: Sequence[Sequence[int]] = (),
    held_out: Sequence[Sequence[int]] = (),
    iterate: Callable[[Sequence[Layer]], Iterable[Layer]] = iter,
) -> tuple[Findings, Evaluation | None]:
    """Quantise the selected weights of a network, and return what was found and the errors on held-out sequences.

    Args:
        network: The layers.
        checkpoint: The original weights.
        selection: The weights to quantise.
        settings: The scheme and its parameters.
        write: Called once with every quantised weight and every plain weight that changes.
        calibration: Token ids of the calibration texts; needed by schemes with calibration.
        held_out: Token ids of the texts on which errors are measured; without any, the second result is None.
        iterate: Function that yields the layers, such as a progress bar.

    Raises:
        ModelError: A weight is not finite, or GPTQ cannot use the inputs.
    """
    return _Quantiser(network, checkpoint, selection, settings, write, calibration, held_out).run(iterate)


class _Quantiser:
    """State of one quantisation; `quantise` describes the arguments."""

    def __init__(
        self,
        network: Network,
        checkpoint: Checkpoint,
        selection: Selection,
        settings: Settings,
        write: Write,
        calibration: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
    ) -> None:
        self._network, self._checkpoint, self._write = network, checkpoint, write
        self._settings, self._scheme = settings, settings.scheme
        self._linears = group_by_layer(selection.linears)
        self._weights = LayerWeights(checkpoint)
        self._findings = Findings()
        self._sequences: Sequences | None = None
        self._evaluation: Evaluation | None = None
        texts = calibration if self._scheme.needs_calibration else ()
        if texts or held_out:
            first = next(iter([*texts, *held_out]))[:_TRACED_TOKENS]
            last_readers = find_last_readers(network, checkpoint, first)
            checkpoint.release()
            if texts:
                self._sequences = Sequences(texts, last_readers)
            if held_out:
                self._evaluation = Evaluation(
                    held_out,
                    last_readers,
                    LayerWeights(checkpoint),
                    self._weights,
                    network.exact,
                    self._scheme.activations,
                    frozenset(linear.name for linear in selection.linears),
                    any(name.endswith(".keys") for name in last_readers),
                )

    def run(
        self, iterate: Callable[[Sequence[Layer]], Iterable[Layer]]
    ) -> tuple[Findings, Evaluation | None]:
        """Quantise all layers in order."""
        layers = list(self._network.layers)
        for index, layer in enumerate(iterate(layers)):
            linears = self._linears.get(index, [])
            if linears:
                self._quantise_layer(layer, linears)
            if self._sequences is not None and index < max(self._linears):
                numpy = Arithmetic(self._weights, np.dtype(np.float32), 0, exact=self._network.exact)
                for number in range(len(self._sequences)):
                    self._sequences.advance(number, layer, index, numpy)
            if self._evaluation is not None:
                self._evaluation.advance(layer, index, index == len(layers) - 1)
                self._evaluation.original.forget()
            self._weights.forget()
            self._checkpoint.release()
        return self._findings, self._evaluation

    def _quantise_layer(self, layer: Layer, linears: Sequence[Linear]) -> None:
        """Quantise the weights of one layer, replace them in the weights of the layer, and write them."""
        recorder = None
        if self._sequences is not None:
            recorder = Recorder(self._weights, self._network.exact, self._scheme.needs_products)
            for number in range(len(self._sequences)):
                self._sequences.peek(layer, number, recorder)
        for linear in linears:
            if not np.isfinite(self._weights[linear.name]).all():
                raise ModelError(
                    f"{linear.name} has weights that are not finite, which no scale can store; quantise a checkpoint "
                    "whose weights are all finite",
                    "NKW-MODEL-WEIGHTS",
                )
        if recorder is not None and self._scheme.method in (Method.awq, Method.smoothquant):
            self._fold_factors(layer, linears, recorder)
        for linear in linears:
            inputs = None if recorder is None else recorder.statistics.get(linear.name)
            if recorder is not None and inputs is None:
                self._findings.unreached.append(linear.module)
            weight = self._weights[linear.name]
            rounded = self._round(linear, weight, inputs)
            self._findings.errors[linear.module] = _measure_error(weight, rounded.widen(), inputs)
            self._weights.replace(linear.name, rounded)
            self._write(linear.name, rounded)

    def _round(self, linear: Linear, weight: np.ndarray, inputs: InputStatistics | None) -> Rounded:
        """Return a rounded weight; without inputs it is rounded to nearest."""
        scale_dtype = choose_scale_dtype(self._scheme, self._checkpoint[linear.name].dtype)
        if self._scheme.method is Method.gptq and inputs is not None and inputs.products is not None:
            settings = self._settings.damping, self._settings.orders_columns
            return round_with_products(weight, inputs.products, self._scheme, scale_dtype, *settings)
        if self._scheme.method is Method.outliers and inputs is not None:
            columns = np.nonzero(inputs.largest > OUTLIER_THRESHOLD)[0]
            self._findings.outliers[linear.module] = columns.tolist()
            if self._evaluation is not None:
                self._evaluation.plain_columns[linear.name] = columns
        return round_to_nearest(weight, self._scheme, scale_dtype)

    def _fold_factors(self, layer: Layer, linears: Sequence[Linear], recorder: Recorder) -> None:
        """Fold factors of columns into the norms of a layer, replace norms and readers, and write the plain ones.

        A norm keeps its weight, and is listed as unfolded, if it has a bias, is of another layer too, or the layer's
        result would change, because something else reads the norm.
        """
        names = {linear.name for linear in linears}
        for norm, readers in recorder.readers.items():
            quantised = [name for name in readers if name in names]
            if not quantised:
                continue
            if not self._can_fold(norm, recorder):
                self._findings.unfolded.append(norm)
                continue
            inputs = recorder.statistics[quantised[0]]
            factors = self._choose_factors(quantised, readers, inputs)
            offset = recorder.offsets[norm]
            stored = self._checkpoint[norm].dtype
            folded, exact = fold_norm(widen(self._weights[norm]), factors, offset, stored)
            before = {name: self._weights[name] for name in (norm, *readers)}
            expected = self._peek_first(layer)
            self._weights.replace(norm, folded)
            for name in readers:
                self._weights.replace(name, before[name] * exact)
            changed = self._peek_first(layer)
            scale = np.sqrt(np.mean(np.square(expected))) or np.float32(1)
            if np.abs(changed - expected).max() > _FOLDED_TOLERANCE * scale:
                for name, weight in before.items():
                    self._weights.replace(name, weight)
                self._findings.unfolded.append(norm)
                continue
            inputs.scale(1 / exact)
            for name in (norm, *(reader for reader in readers if reader not in names)):
                self._write(name, self._weights[name])

    def _can_fold(self, norm: str, recorder: Recorder) -> bool:
        """Return whether a norm has no bias and belongs to one layer."""
        owners = sum(
            any(tensor.name == norm for weight in layer.weights for tensor in weight.tensors)
            for layer in self._network.layers
        )
        return owners == 1 and norm in recorder.offsets

    def _choose_factors(
        self, quantised: Sequence[str], readers: Sequence[str], inputs: InputStatistics
    ) -> np.ndarray:
        """Return the factors of AWQ or SmoothQuant for the weights that read one norm."""
        if self._scheme.method is Method.smoothquant:
            return choose_smoothing([self._weights[name] for name in readers], inputs)
        scale_dtype = choose_scale_dtype(self._scheme, self._checkpoint[quantised[0]].dtype)
        return search_factors(
            [self._weights[name] for name in quantised],
            inputs,
            lambda weight: round_to_nearest(weight, self._scheme, scale_dtype).widen(),
        )

    def _peek_first(self, layer: Layer) -> np.ndarray:
        """Return the result of a layer for the first calibration text with the present weights."""
        assert self._sequences is not None
        numpy = Arithmetic(self._weights, np.dtype(np.float32), 0, exact=self._network.exact)
        return self._sequences.peek(layer, 0, numpy)


def _measure_error(weight: np.ndarray, rounded: np.ndarray, inputs: InputStatistics | None) -> WeightError:
    """Return the relative errors of a rounded weight."""
    squares = float(np.square(weight, dtype=np.float64).sum())
    error = float(np.square(weight - rounded, dtype=np.float64).sum())
    relative = (error / squares) ** 0.5 if squares else 0.0
    if inputs is None or inputs.products is None:
        return WeightError(relative)
    total = measure_product_error(weight, np.zeros_like(weight), inputs)
    product = measure_product_error(weight, rounded, inputs)
    return WeightError(relative, max(0.0, product / total) ** 0.5 if total > 0 else 0.0)
