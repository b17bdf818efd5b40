"""Pictures of shapes: captions and their split, drawing, and the checker that compares a picture with a caption."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tools.shapes.captions import (
    COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    Caption,
    Figure,
    draw_training_figures,
    drop_sizes,
    list_held_out_captions,
    make_split,
    parse_caption,
)
from tools.shapes.checker import check_picture, check_shapes, find_shapes
from tools.shapes.drawing import (
    BACKGROUND,
    RADII,
    SIDE,
    PlacedShape,
    compute_coverage,
    draw_picture,
    place_shapes,
)

RED_CIRCLE = Caption((Figure("red", "circle"),))
RED_ABOVE_BLUE = parse_caption("a red circle above a blue square")


def draw(*shapes: PlacedShape) -> np.ndarray:
    return draw_picture(shapes)


@pytest.mark.parametrize(
    "text",
    [
        "a red circle",
        "a small green triangle left of a large red circle",
        "a black cross below a blue square",
    ],
)
def test_parses_what_captions_say(text: str) -> None:
    assert parse_caption(text).text == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "red circle",
        "a tiny red circle",
        "a red sphere",
        "a red circle near a blue square",
        "left of a red circle",
    ],
)
def test_refuses_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="is no caption: write one figure"):
        parse_caption(text)


def test_changes_one_attribute_at_a_time() -> None:
    changed = [
        attribute
        for attribute, _ in parse_caption("a small red circle above a blue square").change_attributes()
    ]
    figure_changes = len(COLOURS) - 1 + len(SHAPES) - 1
    assert sorted(changed) == sorted(
        ["colour"] * 2 * (len(COLOURS) - 1)
        + ["shape"] * (2 * figure_changes - 2 * (len(COLOURS) - 1))
        + ["size"]
        + ["relation"] * 3
    )


class TestSplit:
    split = make_split()

    def test_shows_every_attribute_and_hides_some_combinations(self) -> None:
        figures = {Figure(*combination) for combination in itertools.product(COLOURS, SHAPES, SIZES)}
        assert len(figures) == 60 and len(self.split.figures) == 10
        shown = figures - self.split.figures
        for first, second in itertools.combinations(("colour", "shape", "size"), 2):
            combinations = {(getattr(figure, first), getattr(figure, second)) for figure in figures}
            assert {(getattr(figure, first), getattr(figure, second)) for figure in shown} == combinations

    def test_training_never_draws_what_is_held_out(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(2000):
            figures, relation = draw_training_figures(rng, self.split)
            assert not set(figures) & self.split.figures
            appearances = frozenset((figure.colour, figure.shape) for figure in figures)
            assert len(appearances) == len(figures) == (2 if relation else 1)
            assert appearances not in self.split.pairs

    def test_lists_two_hundred_captions_that_training_never_sees(self) -> None:
        captions = list_held_out_captions()
        assert len(set(captions)) == 200 and captions == list_held_out_captions()
        assert all(self.split.is_held_out(caption.figures) for caption in captions)
        single, double = (
            [caption for caption in captions if len(caption.figures) == count] for count in (1, 2)
        )
        assert {caption.figures[0] for caption in single} == self.split.figures
        # Figures of pairs are known by themselves, so that only the pair is new.
        assert not {figure for caption in double for figure in caption.figures} & self.split.figures
        assert {caption.relation for caption in double} == set(RELATIONS)


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_is_the_area(shape: str) -> None:
    radius = 12.0
    sides = {"square": (1.76 * radius) ** 2, "diamond": 2 * radius**2, "triangle": 2 * radius**2}
    cross = (2 * 2 * 0.6 - 0.6**2) * radius**2
    area = sides.get(shape, cross if shape == "cross" else np.pi * radius**2)
    # The outline is shorter than 8 radii, and a quarter of a pixel on each side of it is uncertain.
    assert abs(float(compute_coverage(shape, 31.3, 30.9, radius).sum()) - area) < 8 * radius / 4


def test_accepts_drawings_and_rejects_every_change_of_one_attribute() -> None:
    rng = np.random.default_rng(1)
    for caption in list_held_out_captions()[::10]:
        shapes = place_shapes(rng, caption.figures, caption.relation)
        noisy = np.clip(draw_picture(shapes) + rng.normal(0, 6, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        regions = find_shapes(noisy)
        assert check_shapes(regions, caption).is_right
        assert check_shapes(regions, Caption(drop_sizes(rng, caption.figures), caption.relation)).is_right
        for attribute, changed in caption.change_attributes():
            verdict = check_shapes(regions, changed)
            assert not verdict.is_right, (attribute, changed.text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_recognises_sizes_at_both_ends_of_their_range(size: str, shape: str) -> None:
    for radius in RADII[size]:
        (region,) = find_shapes(draw(PlacedShape("blue", shape, 30.4, 33.7, radius)))
        assert region is not None
        assert (region.colour, region.shape) == ("blue", shape)
        assert abs(region.radius - radius) < 0.8
        assert np.hypot(region.row - 30.4, region.column - 33.7) < 0.8
        assert check_picture(
            draw(PlacedShape("blue", shape, 30, 33, radius)), Caption((Figure("blue", shape, size),))
        ).is_right


class TestPicturesThatAreWrong:
    def test_empty_picture(self) -> None:
        empty = np.broadcast_to(np.uint8(BACKGROUND), (SIDE, SIDE, 3))
        assert find_shapes(empty) == []
        assert not check_picture(empty, RED_CIRCLE).count

    def test_second_shape(self) -> None:
        circle, square = PlacedShape("red", "circle", 15, 30, 7), PlacedShape("blue", "square", 45, 30, 7)
        assert check_picture(draw(circle), RED_CIRCLE).is_right
        assert not check_picture(draw(circle, square), RED_CIRCLE).count
        assert check_picture(draw(circle, square), RED_ABOVE_BLUE).is_right
        assert not check_picture(draw(circle), RED_ABOVE_BLUE).count

    def test_shapes_that_touch(self) -> None:
        circle, square = PlacedShape("red", "circle", 23, 30, 7), PlacedShape("blue", "square", 34, 30, 7)
        assert find_shapes(draw(circle, square)) == [None]

    def test_colours_of_two_shapes_swapped(self) -> None:
        circle, square = PlacedShape("blue", "circle", 15, 30, 7), PlacedShape("red", "square", 45, 30, 7)
        verdict = check_picture(draw(circle, square), RED_ABOVE_BLUE)
        assert verdict.count and not verdict.is_right

    def test_relation_on_the_other_axis(self) -> None:
        circle, square = PlacedShape("red", "circle", 28, 12, 7), PlacedShape("blue", "square", 36, 50, 7)
        verdict = check_picture(draw(circle, square), RED_ABOVE_BLUE)
        assert verdict.relation is False and verdict.colour and verdict.shape
        assert check_picture(
            draw(circle, square), parse_caption("a red circle left of a blue square")
        ).is_right

    def test_blurred_beyond_recognition(self) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        assert not check_picture(noise, RED_CIRCLE).is_right
