"""Devices that record launches as the cases of a bundle: the launches of one layer, or of a whole generation.

A bundle is a folder with kernels, inputs and expected outputs, which an instance with NeuronCores runs and compares. A
case is one launch in it. A recipe tells how to make a weight from the checkpoint's tensors, so that the bundle need not
contain it. `nkw bundle` uses these devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from model.device.binding import bind_arguments, find_kernel, run_checked
from model.device.chips import can_divide_among
from model.device.simulated import SimulatedDevice
from model.errors import ModelError
from nkw.errors import NkwError
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
    rename_fields,
)
from simulate.bundle.manifest import LAYER, MODEL
from simulate.bundle.reading import DTYPES
from simulate.bundle.run_weights import STORED, assemble_operand, draw_tensor, map_tensors
from simulate.run import target_hardware
from simulate.run.launch import unwrap_kernel

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
    "Written",
    "check_folder",
    "check_recipes",
    "draw_array",
]


class BundlingDevice(SimulatedDevice):
    """One simulated rank that records the launches of one layer as cases named `<phase>-<number>-<kernel>`.

    Set `phase` to the name of the next step before the step. Numbers count the launches of a phase from 1. Call
    `layer_done` after every layer. Replays are exact: a launch gets the very bytes that the launches before it
    returned.

    Args:
        target: Name of the chip.
        layer: Number of the recorded layer.
        weights: Arrays by name that the bundle refers to by recipes and does not contain.
        lnc: Physical cores of the rank. A case of a kernel that they do not divide is a launch on one of them. The
            values of the layers are computed on one.
    """

    def __init__(self, target: str, layer: int, weights: Mapping[str, np.ndarray], lnc: int = 1) -> None:
        super().__init__(target, 1, exact=True)
        self.phase = ""
        self._operands = {id(array): name for name, array in weights.items()}
        self._layer, self._running, self._lnc = layer, -1, lnc
        self._chip = run_checked(lambda: target_hardware(target))
        self._cases = Cases()
        self._numbers: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        """Number of launches recorded so far."""
        return len(self._cases.cases)

    def layer_done(self, done: int, layers: int) -> None:
        """Record that layers 0 to `done` - 1 of `layers` have ended; the next launch belongs to layer `done`."""
        self._running = done

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Record a launch if it is in the recorded layer, then launch the kernel and return its outputs.

        Args:
            kernel: Name of a kernel of `nki_kernels`.
            arguments: Arguments by parameter, of the one rank.
            written: Unused; kernels write to the arrays themselves.

        Raises:
            ModelError: A bundle cannot contain the launch, or the kernel refuses its arguments.
        """
        if self._running == self._layer:
            self._numbers[self.phase] += 1
            name = f"{self.phase}-{self._numbers[self.phase]}-{kernel}"
            run_checked(lambda: self._add_case(kernel, arguments[0], name))
        return super().run(kernel, arguments, written)

    def _add_case(self, kernel: str, arguments: Mapping[str, Any], name: str) -> None:
        """Add a launch as a case, on all physical cores of the rank if they can divide its work, else on one."""
        function, args = unwrap_kernel(find_kernel(kernel)), bind_arguments(kernel, arguments)
        path = f"nki_kernels:{kernel}"

        def add(cores: int) -> None:
            self._cases.add_launch(function, path, args, name, self._chip, self._operands, cores)

        if self._lnc > 1 and can_divide_among(kernel, self._lnc):
            # Two cores do not divide some small shapes, such as a single column.
            with suppress(NkwError):
                return add(self._lnc)
        add(1)

    def write(self, folder: Path, weights: Weights | None) -> Written:
        """Write the recorded cases as a bundle to a folder, and return what was written.

        Args:
            folder: The new folder.
            weights: Recipes of the weights that the bundle does not contain; None without such weights.

        Raises:
            ModelError: The bundle cannot be written.
        """
        target = self._chip.name
        return run_checked(lambda: self._cases.write(folder, LAYER, target, None, weights))  # type: ignore[no-any-return]


class GenerationDevice(SimulatedDevice):
    """One simulated rank that records all launches as cases named `p<prompt>-t<token>-<section>-<kernel>`.

    Prompts, and the tokens of each, are counted from 1; a section is "embedding", "layer-N" or "head". Call
    `begin_step` before every step, `layer_done` after every layer, and `end_step` after every step.

    Args:
        target: Name of the chip.
        weights: The rank's weights by name.
    """

    def __init__(self, target: str, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(target, 1, exact=True)
        self._chip = run_checked(lambda: target_hardware(target))
        self._cases = LaunchCases(self._chip)
        self._steps: list[Step] = []
        self._prompt, self._number, self._names = 0, 0, Counter[str]()
        for name, array in weights.items():
            self._cases.note_weight(name, array)

    @property
    def launches(self) -> int:
        """Number of launches recorded so far."""
        return len(self._cases.cases)

    def begin_step(self, prompt: int, number: int) -> None:
        """Begin step `number` of prompt `prompt`, both counted from 0; the next launches belong to the embedding."""
        self._prompt, self._number = prompt, number
        self._cases.step, self._cases.section = len(self._steps), "embedding"

    def layer_done(self, done: int, layers: int) -> None:
        """Record that `done` of `layers` layers have ended; the next launch belongs to layer `done`, or to the head."""
        self._cases.section = f"layer {done}" if done < layers else "head"

    def end_step(self, values: int, tokens: int, token: int, text: str, margin: float) -> None:
        """Record the end of a step, whose last recorded launch has to be that of the head.

        The arguments become the fields of the same names of `Step`.
        """
        case = self._cases.cases[-1].name
        self._steps.append(Step(self._prompt, self._number, case, values, tokens, token, text, margin))

    def run(
        self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Sequence[str | None] = ()
    ) -> list[Any]:
        """Launch a kernel, record the launch and its outputs, and return the outputs.

        Args:
            kernel: Name of a kernel of `nki_kernels`.
            arguments: Arguments by parameter, of the one rank.
            written: For each output, the parameter whose array the kernel overwrites; None for a new array.

        Raises:
            ModelError: A bundle cannot contain the launch, or the kernel refuses its arguments.
        """
        section = self._cases.section.replace(" ", "-")
        name = f"p{self._prompt + 1}-t{self._number + 1}-{section}-{kernel}"
        self._names[name] += 1
        name += f"-{self._names[name]}" if self._names[name] > 1 else ""
        function, args = unwrap_kernel(find_kernel(kernel)), bind_arguments(kernel, arguments[0])
        path = f"nki_kernels:{kernel}"

        def launch() -> Any:
            return super(GenerationDevice, self).run(kernel, arguments, written)[0]

        return [
            run_checked(lambda: self._cases.add_launched_case(function, path, args, written, name, launch))
        ]

    def write(self, folder: Path, weights: Weights, prompts: tuple[Prompt, ...]) -> Written:
        """Write the recorded cases and steps as a bundle to a folder, and return what was written.

        Args:
            folder: The new folder.
            weights: Recipes of the weights.
            prompts: The prompts, in the order of their numbers.

        Raises:
            ModelError: The folder cannot be written.
        """
        generation = Generation(prompts, tuple(self._steps))
        target = self._chip.name
        return run_checked(lambda: self._cases.write(folder, MODEL, target, generation, weights))  # type: ignore[no-any-return]


def check_folder(folder: Path) -> None:
    """Check that a bundle can be written to a folder: it does not exist, or is empty.

    Raises:
        ModelError: The folder is not empty.
    """
    run_checked(lambda: check_free(folder))


def draw_array(tensor: Drawn) -> np.ndarray:
    """Return the elements of a weight tensor that is drawn from random numbers, [count] in its dtype."""
    bits, _ = draw_tensor(asdict(tensor))
    return bits.view(np.dtype(DTYPES[tensor.dtype]))  # type: ignore[no-any-return]


def check_recipes(files: Sequence[Path], weights: Weights) -> None:
    """Check that recipes can be followed and give the recorded weights, as an instance will do with the bundle.

    Args:
        files: Safetensors files of the checkpoint.
        weights: The recipes.

    Raises:
        ModelError: A recipe does not give the weight that was loaded.
    """
    tensors = {name: tensor for path in files for name, tensor in map_tensors(path).items()}
    recipes = {recipe.name: asdict(recipe) for recipe in weights.drawn}
    for operand in weights.operands:
        names = {piece.tensor for piece in operand.pieces} & recipes.keys()
        try:
            assemble_operand(
                asdict(operand, dict_factory=rename_fields),
                tensors | {name: draw_tensor(recipes[name]) for name in names},
            )
        except ValueError as error:
            raise ModelError(f"the recipe of a weight is wrong: {error}") from None
