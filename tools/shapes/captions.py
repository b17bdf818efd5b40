"""Captions of pictures with one or two coloured shapes, and their division into training and held-out captions.

    a red circle
    a small green triangle left of a large red circle

A size is optional: a caption without one is true of shapes of both sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 220),
    "yellow": (250, 200, 0),
    "purple": (148, 50, 189),
    "black": (16, 16, 16),
}
"""RGB values of the colours of shapes, from 0 to 255."""

SHAPES = ("circle", "square", "triangle", "diamond", "cross")
SIZES = ("small", "large")
RELATIONS = {"left of": (1, 1), "right of": (1, -1), "above": (0, 1), "below": (0, -1)}
"""Axis of the image (0: rows, 1: columns) and sign of the second shape's centre minus the first's, by relation."""

_SPLIT_SEED = 7
_HELD_OUT_PAIRS = 0.2


@dataclass(frozen=True, order=True)
class Figure:
    """A coloured shape in a caption; a size of "" is either size."""

    colour: str
    shape: str
    size: str = ""

    @property
    def text(self) -> str:
        """Words of the figure, such as "a small green triangle"."""
        return " ".join(word for word in ("a", self.size, self.colour, self.shape) if word)


@dataclass(frozen=True)
class Caption:
    """One figure, or two in a relation; `relation` is a key of RELATIONS, or "" for one figure."""

    figures: tuple[Figure, ...]
    relation: str = ""

    @property
    def text(self) -> str:
        """Text of the caption."""
        return f" {self.relation} ".join(figure.text for figure in self.figures)

    def change_attributes(self) -> Iterator[tuple[str, Caption]]:
        """Yield (attribute, caption) for each caption that differs from this one in a single attribute.

        Attributes are "colour", "shape", "size" (only of figures that have one) and "relation". A relation changes to
        the three others.
        """
        for index, figure in enumerate(self.figures):
            changes = [
                ("colour", replace(figure, colour=colour)) for colour in COLOURS if colour != figure.colour
            ]
            changes += [("shape", replace(figure, shape=shape)) for shape in SHAPES if shape != figure.shape]
            changes += [
                ("size", replace(figure, size=size)) for size in SIZES if figure.size not in ("", size)
            ]
            for attribute, changed in changes:
                yield (
                    attribute,
                    replace(self, figures=(*self.figures[:index], changed, *self.figures[index + 1 :])),
                )
        for relation in RELATIONS if self.relation else ():
            if relation != self.relation:
                yield "relation", replace(self, relation=relation)


def parse_caption(text: str) -> Caption:
    """Return the caption that a text states.

    Raises:
        ValueError: The text is not one figure, or two figures with a relation between them.
    """
    words = text.lower().split()
    for relation in RELATIONS:
        middle = relation.split()
        for start in range(1, len(words) - len(middle)):
            if words[start : start + len(middle)] == middle:
                first, second = words[:start], words[start + len(middle) :]
                return Caption((_parse_figure(first, text), _parse_figure(second, text)), relation)
    return Caption((_parse_figure(words, text),))


def _parse_figure(words: list[str], text: str) -> Figure:
    """Return the figure that words state, such as ["a", "small", "red", "circle"]; `text` is for the error."""
    size = words[1] if len(words) == 4 else ""
    if len(words) in (3, 4) and words[0] == "a" and size in ("", *SIZES):
        colour, shape = words[-2:]
        if colour in COLOURS and shape in SHAPES:
            return Figure(colour, shape, size)
    raise ValueError(
        f"'{text[:80]}' is no caption: write one figure, or two with {', '.join(RELATIONS)} between them; a figure is "
        f"'a [small|large] {'|'.join(COLOURS)} {'|'.join(SHAPES)}'"
    )


@dataclass(frozen=True)
class Split:
    """Captions that training never sees, in any part.

    figures  sized figures that no training picture shows: of each shape, one colour in small and one in large
    pairs    unordered pairs of (colour, shape) that no training picture shows together
    """

    figures: frozenset[Figure]
    pairs: frozenset[frozenset[tuple[str, str]]]

    def is_held_out(self, figures: tuple[Figure, ...]) -> bool:
        """Return whether training may not show these figures, all of which have a size."""
        if any(figure in self.figures for figure in figures):
            return True
        return (
            len(figures) == 2 and frozenset((figure.colour, figure.shape) for figure in figures) in self.pairs
        )


def make_split() -> Split:
    """Return the division of captions into training and held-out ones; it is the same at every call.

    Of each shape, one colour is held out in large and the next one in small, so most pairs of colour and shape are seen
    in both sizes. A fifth of the pairs of different (colour, shape) are held out.
    """
    colours = list(COLOURS)
    figures = [
        Figure(colours[(position + offset) % len(colours)], shape, size)
        for position, shape in enumerate(SHAPES)
        for offset, size in ((1, "large"), (2, "small"))
    ]
    rng = np.random.default_rng(_SPLIT_SEED)
    appearances = list(itertools.product(COLOURS, SHAPES))
    pairs = [frozenset(pair) for pair in itertools.combinations(appearances, 2)]
    chosen = rng.permutation(len(pairs))[: round(_HELD_OUT_PAIRS * len(pairs))]
    return Split(frozenset(figures), frozenset(pairs[index] for index in chosen))


def draw_training_figures(rng: np.random.Generator, split: Split) -> tuple[tuple[Figure, ...], str]:
    """Return sized figures and a relation ("" for one figure) of a training picture.

    A quarter of the pictures have one figure. Figures are drawn again until the split allows them, and two differ in
    colour or shape.
    """
    while True:
        count = 1 if rng.random() < 0.25 else 2
        figures = tuple(draw_figure(rng) for _ in range(count))
        relation = str(rng.choice(list(RELATIONS))) if count == 2 else ""
        appearances = {(figure.colour, figure.shape) for figure in figures}
        if len(appearances) == count and not split.is_held_out(figures):
            return figures, relation


def draw_figure(rng: np.random.Generator) -> Figure:
    """Return a figure with a size, each attribute drawn uniformly."""
    return Figure(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), str(rng.choice(SIZES)))


def drop_sizes(rng: np.random.Generator, figures: tuple[Figure, ...]) -> tuple[Figure, ...]:
    """Return figures of which each loses its size with probability 1/2: what a caption says of a picture."""
    return tuple(replace(figure, size="") if rng.random() < 0.5 else figure for figure in figures)


def list_held_out_captions(count: int = 200) -> list[Caption]:
    """Return different captions of pictures that training never sees; the same at every call.

    First those of one figure, all of the split's; the others have two figures whose pair is held out, with sizes that
    training shows.
    """
    split = make_split()
    captions = [Caption((figure,)) for figure in sorted(split.figures)]
    pairs = sorted(sorted(pair) for pair in split.pairs)
    rng = np.random.default_rng(_SPLIT_SEED + 1)
    known = set(captions)
    while len(captions) < count:
        pair = pairs[rng.integers(len(pairs))]
        figures = []
        for colour, shape in (pair[index] for index in rng.permutation(2)):
            sizes = [size for size in SIZES if Figure(colour, shape, size) not in split.figures]
            figures.append(Figure(colour, shape, str(rng.choice(sizes))))
        caption = Caption(tuple(figures), str(rng.choice(list(RELATIONS))))
        if caption not in known:
            known.add(caption)
            captions.append(caption)
    return captions[:count]
