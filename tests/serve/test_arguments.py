"""Options of `nkw serve` as the arguments of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from model.cli import _parser
from model.llm import EngineArgs
from model.serve.serving import engine_args, places


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--tp 3", "tensor_parallel_size", 3),
        ("--ep 2", "expert_parallel_size", 2),
        ("--num-state-slots 5", "num_state_slots", 5),
        ("--mamba-block-size 64", "mamba_block_size", 64),
        ("--num-pages 7", "num_pages", 7),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--target trn1", "target", "trn1"),
    ],
)
def test_an_option_sets_one_argument(words: str, field: str, value: Any) -> None:
    bare = engine_args(_parser().parse_args(["serve"]))
    given = engine_args(_parser().parse_args(["serve", *words.split()]))
    changed = {
        name for name in EngineArgs.__dataclass_fields__ if getattr(bare, name) != getattr(given, name)
    }
    assert changed == {field}
    assert getattr(given, field) == value


def test_without_options_the_arguments_are_those_of_an_engine() -> None:
    assert engine_args(_parser().parse_args(["serve"])) == EngineArgs()


def test_every_group_has_places_of_its_own() -> None:
    for words, count in (((), 16 + 64), (("--ep", "2"), 2 * 16 + 64), (("--max-queue", "0"), 16)):
        assert places(_parser().parse_args(["serve", *words])) == count
