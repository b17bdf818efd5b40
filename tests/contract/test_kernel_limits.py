"""The model asks kernels what they take: where a limit of a kernel changes, the model launches accordingly."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.device import ArrayShape, find_refusal
from model.execution.launch_list import list_copy_sizes
from model.families import compose, load_config
from model.layers.launch import FLOAT32, INT32, Launch, Phase, StepShape, WeightDtypes
from model.loading.shipped import SHIPPED

STEP = StepShape(Phase.decode, 8, 8, 128, 64, 1, FLOAT32, WeightDtypes(FLOAT32))
LATENT: dict[str, Any] = dict(
    model_type="deepseek_v2",
    vocab_size=151,
    hidden_size=36,
    intermediate_size=50,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    kv_lora_rank=20,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    n_routed_experts=6,
    n_shared_experts=2,
    num_experts_per_tok=3,
    moe_intermediate_size=13,
    topk_method="greedy",
    first_k_dense_replace=1,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
)
PAGES = ArrayShape((9, 4), FLOAT32)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    find_refusal.cache_clear()
    yield
    find_refusal.cache_clear()


def launches(config: Path, **changes: Any) -> list[Launch]:
    """Return what a decode step of 8 sequences, or with changes, launches."""
    step = replace(STEP, **changes)
    return [launch for layer in compose(load_config(config)).layers for launch in layer.launches(step)]


def kernels(config: Path, **changes: Any) -> set[str]:
    return {launch.kernel for launch in launches(config, **changes)}


def limit(patch: pytest.MonkeyPatch, kernel: str, name: str, value: int) -> None:
    patch.setattr(importlib.import_module(f"nki_kernels.{kernel}"), name, value)


@pytest.mark.parametrize(("name", "size"), [("MAX_HIDDEN", 256), ("MAX_DEPTH", 64)])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_attention_is_one_launch_as_far_as_its_kernel_goes(
    name: str, size: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "attention_block_decode", name, size + more)
    assert ("attention_block_decode" in kernels(SHIPPED["stories"])) == (more >= 0)
    assert ("attention_decode" in kernels(SHIPPED["stories"])) == (more < 0)


@pytest.mark.parametrize("tokens", [7, 8, 9])
def test_experts_sort_tokens_that_the_decode_kernel_refuses(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "experts_decode", "PARTITIONS", 8)
    launched = kernels(SHIPPED["stories-moe"], tokens=tokens, sequences=tokens)
    assert ("experts_decode" in launched, "experts_prefill" in launched) == (tokens <= 8, tokens > 8)


@pytest.mark.parametrize(("most", "rows"), [(5, [5, 3]), (7, [7, 1]), (8, [8]), (9, [8])])
def test_the_head_takes_as_many_rows_as_its_kernel(
    most: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "lm_head", "PARTITIONS", most)
    heads = [launch.rows for launch in launches(SHIPPED["stories"]) if launch.kernel == "lm_head"]
    assert heads == rows


@pytest.mark.parametrize(("most", "rows"), [(7, [7, 1]), (8, [8]), (9, [8])])
def test_latent_attention_takes_as_many_queries_as_its_kernel(
    most: int, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has 4 heads of 4 bytes on each partition."""
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    limit(monkeypatch, "latent_attention_decode", "MAX_QUERY_BYTES", 16 * most + 15)
    decodes = [launch for launch in launches(tmp_path) if launch.kernel == "latent_attention_decode"]
    assert [launch.rows for launch in decodes] == rows


@pytest.mark.parametrize("most", [15, 16, 17])
@pytest.mark.parametrize("kernel", ["attention_prefill", "attention_mixed"])
def test_attention_of_a_prompt_is_refused_by_its_length(
    kernel: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "prefill.checks", "MAX_TOKENS", most)
    paged = replace(STEP, pages=20, block_size=16)
    decoding = paged if kernel == "attention_mixed" else None
    step = vars(paged.with_sizes(Phase.prefill, 1, 16, 128, decoding=decoding))
    refused = (
        f"attention_prefill takes at most {most} tokens, not 16; divide the prompt into chunks, with a prefix"
    )
    sentence = refused if most < 16 else None
    assert (kernel, sentence) in {
        (launch.kernel, launch.refusal) for launch in launches(SHIPPED["stories"], **step)
    }


@pytest.mark.parametrize(
    ("most", "sizes"), [(7, [4, 4]), (8, [8]), (9, [8]), (1, [1] * 8), (100, [8]), (2, [2] * 4)]
)
def test_pages_are_copied_by_powers_of_two(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "copy_pages", "PARTITIONS", most)
    assert list_copy_sizes(8) == sizes


@pytest.mark.parametrize(("count", "refused"), [(127, False), (128, False), (129, True)])
def test_the_answer_is_the_sentence_of_the_kernel(count: int, refused: bool) -> None:
    numbers = ArrayShape((count, 1), INT32)
    arguments = (("cache", PAGES), ("other", None), ("sources", numbers), ("destinations", numbers))
    sentence = (
        f"copy_pages makes at most 128 copies, not {count}: launch it several times" if refused else None
    )
    assert find_refusal("copy_pages", arguments) == sentence


def test_a_call_that_no_check_of_the_kernel_refuses_is_an_error_of_the_caller() -> None:
    numbers = ArrayShape((1, 1), INT32)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'destinations'"):
        find_refusal("copy_pages", (("cache", PAGES), ("other", None), ("sources", numbers)))
