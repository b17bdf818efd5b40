"""Predictors of masked tokens: by kernels on a device, and in plain numpy.

A pass computes whole texts of one length without padding, since every token sees every position. Texts of other
lengths are passes of other sizes. Rows before a block are left out in passes that reuse their keys and values
(`model.layers.block_cache`). The head computes the rows of the block only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from model.config.masked_text import MaskedTextConfig
from model.engine.buckets import MOST_ROWS
from model.execution.bound_launch import Device
from model.execution.launched_network import LaunchedNetwork
from model.families.llada import compose, compose_with_cache
from model.formats import Weight
from model.layers.arithmetic import Arithmetic, Span
from model.layers.head import LOGITS
from model.layers.launch import Phase, StepShape
from model.layers.layer import States
from model.layers.precision import choose_activation_dtype
from model.loading.weights import RankWeights, find_row_formats
from model.mesh import Mesh


class ReferenceMaskPredictor:
    """Predictor in plain numpy, the definition that the kernels are compared with.

    Args:
        config: The model.
        weights: The weights of the checkpoint by name.
        dtype: Dtype of activations: float32, bfloat16 or auto, the checkpoint's.
        ranks: Activations are rounded as on a device of so many ranks.
        caches: Whether passes may reuse keys and values before a block.
        widened_bytes: Weights of two bytes are widened once if they take at most so many bytes, else at every use.
    """

    def __init__(
        self,
        config: MaskedTextConfig,
        weights: Mapping[str, Weight],
        dtype: str = "float32",
        ranks: int = 1,
        caches: bool = False,
        widened_bytes: int = 2**30,
    ) -> None:
        network = (compose_with_cache if caches else compose)(config)
        *self._layers, self._head = network.layers
        row_formats = find_row_formats(network.weights, weights, ranks)
        activations = choose_activation_dtype(dtype, config, weights)
        self._numpy = Arithmetic(
            weights, activations, widened_bytes, ranks, network.exact, row_formats=row_formats
        )
        self._states: list[States] = []

    def predict(self, ids: np.ndarray, block: range, reuses: bool) -> np.ndarray:
        """Return the logits of the positions of a block, see `MaskPredictor.predict`."""
        start = block.start if reuses else 0
        if not reuses:
            self._states = [{} for _ in ids]
        rows = []
        for text, states in zip(ids, self._states, strict=True):
            x, span = text[start:], Span(start, len(text) - start)
            if reuses:
                for name, array in states.items():
                    states[name] = array[:, :start]
            for layer in self._layers:
                x = layer.reference(x, span, states, self._numpy)
            x = x[block.start - start : block.stop - start]
            rows.append(self._head.reference(x, Span(block.start, len(block)), states, self._numpy))
        return np.stack(rows)


class KernelMaskPredictor:
    """Predictor by kernels on a device, for a fixed number of texts of a fixed length.

    Args:
        config: The model.
        weights: The distinct weight shards of the ranks.
        device: The device; all ranks are tensor-parallel.
        sequences: Texts of a pass; two for each text with guidance.
        length: Tokens of a text, prompt included.
        caches: Whether passes may reuse keys and values before a block.
        max_bound_steps: Sizes of passes whose bound launches are kept: the whole pass, and one for each block whose
            passes reuse.
        lnc: Physical cores of a rank.
    """

    def __init__(
        self,
        config: MaskedTextConfig,
        weights: Sequence[RankWeights],
        device: Device,
        sequences: int,
        length: int,
        caches: bool = False,
        max_bound_steps: int = 2,
        lnc: int = 1,
    ) -> None:
        first = weights[0]
        self._device = device
        self._step = shape_pass(
            sequences,
            length,
            StepShape(
                Phase.prefill,
                1,
                1,
                1,
                1,
                device.ranks,
                first.dtype,
                first.dtypes,
                lnc=lnc,
                sorted_expert_width=device.sorted_expert_width,
            ),
        )
        self._network = LaunchedNetwork(
            (compose_with_cache if caches else compose)(config),
            weights,
            device,
            self._step,
            Mesh(device.ranks),
            f"keys and values of {sequences} texts of {length:,} tokens",
            max_bound_steps=max_bound_steps,
        )

    def predict(self, ids: np.ndarray, block: range, reuses: bool) -> np.ndarray:
        """Return the logits of the positions of a block, see `MaskPredictor.predict`."""
        sequences, length = ids.shape
        start = block.start if reuses else 0
        step = shape_pass(sequences, length, self._step, start)
        positions = np.tile(np.arange(start, length), sequences)
        inputs = {"ids": ids[:, start:], "positions": positions, "own_positions": positions}
        with self._device.session():
            pieces = self._network.run_in_pieces(
                step,
                {name: array.astype(np.int32).reshape(1, -1, 1) for name, array in inputs.items()},
                list_head_pieces(step, range(block.start - start, block.stop - start)),
                (LOGITS,),
            )
            logits = np.concatenate([np.concatenate(arrays[LOGITS], axis=1) for arrays in pieces])
        return logits[: sequences * len(block)].reshape(sequences, len(block), -1)


def shape_pass(sequences: int, length: int, step: StepShape, start: int = 0) -> StepShape:
    """Return the sizes of a pass over texts; all further fields are those of `step`.

    Args:
        sequences: Texts of the pass.
        length: Tokens of a text.
        step: Dtypes, ranks and cores.
        start: First position that is computed; keys and values before it are reused.
    """
    step = step.with_sizes(Phase.prefill, sequences, length - start, length, start)
    return replace(step, context=length, scores=True)


def list_head_pieces(step: StepShape, block: range) -> list[dict[str, np.ndarray]]:
    """Return the inputs of each launch of the head: the rows of a block of each text, as many as a launch takes.

    Args:
        step: The sizes of the pass.
        block: Rows of the block among the rows of a text.
    """
    first_rows = np.arange(step.sequences)[:, None] * step.new_tokens
    rows = (first_rows + np.arange(block.start, block.stop)).reshape(-1)
    size = min(step.tokens, MOST_ROWS)
    padded = np.pad(rows, (0, -len(rows) % size), mode="edge").astype(np.int32)
    return [{"logits_indices": piece[None, :, None]} for piece in np.split(padded, len(padded) // size)]
