"""Options of `nkw serve` as the arguments of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from model.llm.llm import EngineArgs
from model.serve.serving import count_max_continuations, engine_args
from nkw.commands import build_parser


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
        ("--quantization fp8", "quantization", "fp8"),
        ("--no-chunked-prefill", "enable_chunked_prefill", False),
        ("-q fp8", "quantization", "fp8"),
        ("--tensor_parallel_size=2", "tensor_parallel_size", 2),
        ("--max-num-batched-tokens 1k", "max_num_batched_tokens", 1000),
        ("--max-model-len 1K", "max_model_len", 1024),
        ("--max-model-len 0.5k", "max_model_len", 500),
    ],
)
def test_an_option_sets_one_argument(words: str, field: str, value: Any) -> None:
    bare = engine_args(build_parser(["serve"]).parse_args(["serve"]))
    args = engine_args(build_parser(["serve"]).parse_args(["serve", *words.split()]))
    changed = {name for name in EngineArgs.__dataclass_fields__ if getattr(bare, name) != getattr(args, name)}
    assert changed == {field}
    assert getattr(args, field) == value


@pytest.mark.parametrize("text", ["0.5K", "k", "0", "0k", "-1K", "1e3", "auto"])
def test_a_size_that_is_no_whole_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser(["serve"]).parse_args(["serve", f"--max-model-len={text}"])
    assert ended.value.code == 2
    assert "whole number" in capsys.readouterr().err


def test_without_options_the_arguments_are_those_of_an_engine() -> None:
    assert engine_args(build_parser(["serve"]).parse_args(["serve"])) == EngineArgs()


def test_every_group_has_places_of_its_own() -> None:
    for words, count in (((), 16 + 64), (("--ep", "2"), 2 * 16 + 64), (("--max-queue", "0"), 16)):
        assert count_max_continuations(build_parser(["serve"]).parse_args(["serve", *words])) == count


@pytest.mark.parametrize(("text", "seconds"), [("0.25", 0.25), ("9999999", 9999999.0)])
def test_a_mask_has_any_positive_number_of_seconds(text: str, seconds: float) -> None:
    assert build_parser(["serve"]).parse_args(["serve", "--mask-timeout", text]).mask_timeout == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e7", "soon"])
def test_a_mask_timeout_that_is_no_number_of_seconds_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser(["serve"]).parse_args(["serve", f"--mask-timeout={text}"])
    assert ended.value.code == 2
    assert f"'{text}' is no number of seconds; give more than 0" in capsys.readouterr().err
