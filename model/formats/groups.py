"""Containers whose weights have different formats, or of which config.json leaves some plain.

A container has groups, each with a format and with targets, and a list of modules to leave plain, `ignore`. A module is
the name of a weight without ".weight". Where several targets match a module, an exact name goes before a pattern, and
a pattern before a class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass, replace

import numpy as np

from model.errors import ModelError
from model.formats.format import ChipLimits, ConfigFields, Container, Format, QuantisedWeight, Shape
from nkw.errors import shown

PATTERN = "re:"
"""Prefix of targets that are regular expressions, which match the beginning of a module's name."""
CLASSES = ("Linear", "Embedding")
"""Classes of PyTorch as targets; each matches every matrix, because a checkpoint does not name classes."""
_WEIGHT = ".weight"
_STORED_SUFFIXES = ("_packed", "_scale", "_zero_point")
"""Suffixes of tensors of compressed-tensors that only quantised weights have."""


@dataclass(frozen=True)
class Group:
    """Weights of one format.

    name      name in config.json
    targets   exact names of modules, patterns with the prefix "re:", and classes
    format    format of the weights
    """

    name: str
    targets: tuple[str, ...]
    format: Format

    def find_rank(self, module: str) -> int | None:
        """Return how closely a target matches a module: 0 by name, 1 by pattern, 2 by class; None for no match."""
        ranks = [_find_rank(target, module) for target in self.targets]
        return min((rank for rank in ranks if rank is not None), default=None)


@dataclass(frozen=True)
class Groups(Container):
    """Container with several groups of weights, or with plain modules.

    method      `quant_method` of config.json
    groups      the groups; the first has precedence where targets match equally closely
    ignore      modules that are plain: names, patterns with the prefix "re:", and classes
    is_strict   whether a weight must be quantised exactly if config.json says so; otherwise its tensors decide
    remarks     what kernels compute otherwise than config.json says, in sentences
    """

    method: str
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    is_strict: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`quant_method` of config.json."""
        return self.method

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the container, then the notes of its formats, each once."""
        notes = (*self.remarks, *(note for format in self.formats for note in format.notes))
        return tuple(dict.fromkeys(notes))

    def adapt_to_chip(self, chip: ChipLimits) -> Container:
        """Return the container with the format of each group as kernels of a chip read it."""
        adapted = tuple(replace(group, format=group.format.adapt_to_chip(chip)) for group in self.groups)
        return replace(self, groups=adapted)

    def share_row_maxima(self) -> Container:
        """Return the container whose groups share row maxima where their formats compute a scale for each row."""
        shared = tuple(replace(group, format=group.format.share_row_maxima()) for group in self.groups)
        return replace(self, groups=shared)

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container | None:
        """Return None: readers of the methods in `FORMATS` make groups."""
        return None

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of the groups, each once."""
        return tuple(dict.fromkeys(group.format for group in self.groups))

    def find_group(self, module: str) -> Group | None:
        """Return the group whose target matches a module most closely; None if none matches or it is in `ignore`."""
        if any(_find_rank(target, module) is not None for target in self.ignore):
            return None
        ranked = [(rank, group) for group in self.groups if (rank := group.find_rank(module)) is not None]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def find_format(self, name: str) -> Format | None:
        """Return the format of the group of the matrix `name`; None for a plain one."""
        group = self.find_group(name.removesuffix(_WEIGHT))
        return None if group is None else group.format

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove the stored tensors of a weight from `tensors` and return the weight, in the format of its group.

        Returns None, and removes nothing, for a plain weight.

        Raises:
            ModelError: A tensor is missing or does not fit the format, or the weight is quantised in the checkpoint and
                plain by a strict container.
        """
        format = self.find_format(name)
        if format is None and not self.is_strict:
            format = self.groups[0].format
        if format is not None:
            return format.from_checkpoint(name, tensors, shape, dtype)
        stored = next((name + suffix for suffix in _STORED_SUFFIXES if name + suffix in tensors), None)
        if stored is not None:
            module = name.removesuffix(_WEIGHT)
            is_ignored = any(_find_rank(target, module) is not None for target in self.ignore)
            listed = "in ignore" if is_ignored else "in the targets of no group"
            raise ModelError(
                f"{module} is {listed} of quantization_config, so its weight is plain; but the file has {stored}: "
                "correct quantization_config"
            )
        return None

    def check_weights(self, quantised: Collection[str], plain: Collection[str]) -> None:
        """Check for a strict container that every target matches a weight, and that all targeted weights are quantised.

        A class matches weights of other classes too. So a weight that a class or a pattern targets may be plain if all
        weights with its last name, such as "gate", are plain.

        Raises:
            ModelError: A target matches no weight, or a targeted weight is plain.
        """
        if not self.is_strict:
            return
        modules = [name.removesuffix(_WEIGHT) for name in quantised]
        last_names = {module.rpartition(".")[2] for module in modules}
        plain_modules = [name.removesuffix(_WEIGHT) for name in plain if name.endswith(_WEIGHT)]
        for module in plain_modules:
            group = self.find_group(module)
            if group is None:
                continue
            if group.find_rank(module) == 0 or module.rpartition(".")[2] in last_names:
                raise ModelError(
                    f"{module} is in the targets of {shown(group.name, 60)} of quantization_config, and its weight is "
                    'plain: quantise it, or add its name to "ignore"'
                )
        for group in self.groups:
            for target in group.targets:
                if not any(_find_rank(target, module) is not None for module in (*modules, *plain_modules)):
                    raise ModelError(
                        f"quantization_config: {shown(group.name, 60)} has the target {shown(target, 60)!r}, which "
                        "matches no weight: correct the target or remove it"
                    )


def read_skipped_modules(fields: ConfigFields, *names: str, head: bool = True) -> tuple[str, ...]:
    """Return targets for the modules that the lists in some fields name, and for the language model's head.

    A listed name matches the modules that begin with it, and those that end with it, as in transformers. A star in it
    stands for any text.

    Args:
        fields: Fields of `quantization_config`.
        names: Names of the fields, each of which may be absent.
        head: Whether `lm_head` is among the targets.
    """
    modules: list[str] = ["lm_head"] if head else []
    for name in names:
        listed = fields.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(module, str) for module in listed):
            fields.unsupported(name, f"{listed!r:.60} is not a list of names")
            continue
        modules.extend(listed)
    escaped = (re.escape(module).replace(r"\*", ".*") for module in dict.fromkeys(modules))
    return tuple(f"{PATTERN}(.*{pattern}$|{pattern})" for pattern in escaped)


def find_contradiction(groups: Collection[Group], ignore: Collection[str]) -> str | None:
    """Return a sentence on a module that two groups of different formats, or a group and `ignore`, have by its name.

    The result is None if there is no such module.
    """
    seen: dict[str, Group] = {}
    for group in groups:
        for target in group.targets:
            earlier = seen.setdefault(target, group)
            if earlier.format != group.format:
                return (
                    f"{shown(target, 60)!r} is a target of {shown(earlier.name, 40)} and of {shown(group.name, 40)}, "
                    "whose formats differ: keep one"
                )
            if target in ignore or (
                not target.startswith(PATTERN)
                and target not in CLASSES
                and any(_find_rank(pattern, target) is not None for pattern in ignore)
            ):
                return f"{shown(target, 60)!r} is a target of {shown(group.name, 40)} and in ignore: keep one"
    return None


def find_invalid_pattern(targets: Collection[str]) -> str | None:
    """Return the first target that is no regular expression after its prefix "re:", or None."""
    for target in targets:
        if target.startswith(PATTERN):
            try:
                re.compile(target.removeprefix(PATTERN))
            except (re.error, RecursionError, OverflowError):
                return target
    return None


def _find_rank(target: str, module: str) -> int | None:
    """Return 0 if a target is the name of a module, 1 for a pattern that matches, 2 for a class, and None otherwise."""
    if target == module:
        return 0
    if target.startswith(PATTERN):
        return 1 if re.match(target.removeprefix(PATTERN), module) else None
    return 2 if target in CLASSES else None
