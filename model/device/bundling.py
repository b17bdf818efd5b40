"""A rank that computes, and keeps launches as the cases of a bundle: those of one layer, or all of a generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from model.device.binding import checked, in_order, kernel_named
from model.device.simulated import SimulatedDevice
from model.errors import ModelError
from simulate.bundle.cases import Cases, Written
from simulate.bundle.chain import LaunchCases
from simulate.bundle.folder import check_free
from simulate.bundle.generation import (
    Drawn,
    Generation,
    Operand,
    Piece,
    Prompt,
    Step,
    WeightFile,
    Weights,
)
from simulate.bundle.manifest import LAYER, MODEL
from simulate.bundle.reading import DTYPES
from simulate.bundle.run_weights import STORED, drawn, prepared, tensors_of
from simulate.run import target_hardware
from simulate.run.launch import plain

__all__ = [
    "STORED",
    "BundlingDevice",
    "Drawn",
    "GenerationDevice",
    "Operand",
    "Piece",
    "Prompt",
    "WeightFile",
    "Weights",
    "check_folder",
    "check_recipes",
    "drawn_array",
]


class BundlingDevice(SimulatedDevice):
    """One simulated rank whose launches of layer `layer` become cases, named `<phase>-<number>-<kernel>`.

    `phase` is that of the step to come; numbers count its launches from 1. `layer_done` has to be told of every
    layer. Replays are exact, so that the arguments of a launch are the bytes that the launches before it returned.
    Raises ModelError for a launch that cannot travel, before it is made. The arrays of `named` are named and stay
    behind.
    """

    def __init__(self, target: str, layer: int, named: Mapping[str, np.ndarray]) -> None:
        super().__init__(target, 1, exact=True)
        self.phase = ""
        self._operands = {id(array): name for name, array in named.items()}
        self._layer, self._running = layer, -1
        self._chip = checked(lambda: target_hardware(target))
        self._cases = Cases()
        self._numbers: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        """How many were kept."""
        return len(self._cases.cases)

    def layer_done(self, done: int, layers: int) -> None:
        """So many layers are done: what follows is the layer of this number, counted from 0."""
        self._running = done

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel; keep it first, as it comes, where it belongs to the layer."""
        if self._running == self._layer:
            self._numbers[self.phase] += 1
            name = f"{self.phase}-{self._numbers[self.phase]}-{kernel}"
            function, args = plain(kernel_named(kernel)), in_order(kernel, arguments[0])
            words = f"nki_kernels:{kernel}"
            checked(lambda: self._cases.add_launch(function, words, args, name, self._chip, self._operands))
        return super().run(kernel, arguments, written)

    def write(self, folder: Path, weights: Weights | None) -> Written:
        """Write the bundle, with the recipes of operands that stay behind; ModelError where it cannot be written."""
        target = self._chip.name
        return checked(lambda: self._cases.write(folder, LAYER, target, None, weights))  # type: ignore[no-any-return]


class GenerationDevice(SimulatedDevice):
    """One simulated rank whose launches all become cases, named `p<prompt>-t<token>-<part>-<kernel>`.

    Prompts and the tokens that follow each are counted from 1; a part is the embedding, a layer, or the head.
    `begin_step` has to be told of every step, `layer_done` of every layer. `weights` are the rank's operands by name.
    """

    def __init__(self, target: str, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(target, 1, exact=True)
        self._chip = checked(lambda: target_hardware(target))
        self._cases = LaunchCases(self._chip)
        self._steps: list[Step] = []
        self._place, self._names = (0, 0), Counter[str]()
        for name, array in weights.items():
            self._cases.weight(name, array)

    @property
    def launches(self) -> int:
        """How many were kept."""
        return len(self._cases.cases)

    def begin_step(self, prompt: int, number: int) -> None:
        """What follows is this step of a prompt, both counted from 0."""
        self._place = prompt, number
        self._cases.step, self._cases.part = len(self._steps), "embedding"

    def layer_done(self, done: int, layers: int) -> None:
        """So many layers are done."""
        self._cases.part = f"layer {done}" if done < layers else "head"

    def end_step(self, values: int, tokens: int, token: int, text: str, margin: float) -> None:
        """The last launch was the head's; see `Step` for what is told of it."""
        case = self._cases.cases[-1].name
        self._steps.append(Step(*self._place, case, values, tokens, token, text, margin))

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel and keep the launch."""
        prompt, number = self._place
        name = f"p{prompt + 1}-t{number + 1}-{self._cases.part.replace(' ', '-')}-{kernel}"
        self._names[name] += 1
        name += f"-{self._names[name]}" if self._names[name] > 1 else ""
        function, args = plain(kernel_named(kernel)), in_order(kernel, arguments[0])
        words = f"nki_kernels:{kernel}"

        def launch() -> Any:
            return super(GenerationDevice, self).run(kernel, arguments, written)[0]

        return [checked(lambda: self._cases.launched(function, words, args, written, name, launch))]

    def write(self, folder: Path, weights: Weights, prompts: tuple[Prompt, ...]) -> Written:
        """Write the bundle, with the recipes of the operands that launches are given.

        Raises ModelError where the folder cannot be written.
        """
        generation = Generation(prompts, tuple(self._steps))
        target = self._chip.name
        return checked(lambda: self._cases.write(folder, MODEL, target, generation, weights))  # type: ignore[no-any-return]


def check_folder(folder: Path) -> None:
    """Raise ModelError where a bundle cannot be written: the folder has to be absent or empty."""
    checked(lambda: check_free(folder))


def drawn_array(tensor: Drawn) -> np.ndarray:
    """The values of a drawn tensor, [count]."""
    bits, _ = drawn(asdict(tensor))
    return bits.view(np.dtype(DTYPES[tensor.dtype]))  # type: ignore[no-any-return]


def check_recipes(files: Sequence[Path], weights: Weights) -> None:
    """Follow the recipes as the instance will; ModelError where an operand does not come out as it was loaded."""
    tensors = {name: each for path in files for name, each in tensors_of(path).items()}
    made = {each.name: each for each in weights.drawn}
    for operand in weights.operands:
        own = {
            each.tensor: drawn(asdict(made[each.tensor])) for each in operand.pieces if each.tensor in made
        }
        try:
            prepared(asdict(operand), tensors | own)
        except ValueError as wrong:
            raise ModelError(f"the recipe of a weight is wrong: {wrong}") from None
