"""Plans and traffic of models with quantised caches: stored bytes, pages that fit, and the options of commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from model.families import read_record
from model.layers.paged import NEWEST
from model.plan.memory import list_page_kinds
from model.plan.predict import Predictor
from model.plan.sizes import ModelSizes
from model.traffic.deployment import Deployment, Setup
from nkw.commands import main
from tests.model.folders import write_folder

PUBLISHED = Path(__file__).resolve().parents[2] / "model" / "published"
BYTES = {"auto": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def read_published(name: str) -> ModelConfig:
    config = read_record(PUBLISHED / f"{name}.json", None)
    assert isinstance(config, ModelConfig)
    return config


@pytest.mark.parametrize("name", BYTES)
def test_caches_count_stored_bytes(name: str) -> None:
    """Llama 3.1 8B has 32 layers of 8 key/value heads of 128; DeepSeek V3 61 rows of 576; Mamba states stay float32."""
    llama, deepseek = (ModelSizes(read_published(model), name) for model in ("llama-3.1-8b", "deepseek-v3"))
    assert llama.count_cache_bytes(1000, "bfloat16", 8) == 1000 * 32 * 2 * 128 * BYTES[name]
    assert deepseek.count_cache_bytes(1000, "bfloat16", 64) == 1000 * 61 * 576 * BYTES[name]
    (page_kind,) = list_page_kinds(llama, "bfloat16", 8, 16, 4096)
    assert page_kind.page_bytes == 16 * 32 * 2 * 128 * BYTES[name]
    states = [
        ModelSizes(read_published("mamba-130m"), cache).count_page_bytes(1, "bfloat16")
        for cache in (name, "auto")
    ]
    assert states[0] == states[1]


def test_a_step_with_a_cache_of_fp8_takes_less_time_and_twice_as_many_pages_fit() -> None:
    config = read_published("llama-3.1-8b")
    times, pages = {}, {}
    for name in ("auto", "fp8"):
        predictor = Predictor(config, "trn2", 8, "bfloat16", 4096, cache_dtype=name)
        times[name] = predictor.predict_step(16).time.program_ns
        model = ModelSizes(config, name)
        deployment = Deployment(model, Setup("trn2.48xlarge", "bfloat16", 4096, tp=8, replicas=1))
        pages[name] = deployment.page_kinds[0].pages
    assert times["fp8"] < 0.9 * times["auto"]
    assert 2 * pages["auto"] <= pages["fp8"] <= 2 * pages["auto"] + 1


def test_full_pages_of_four_bits_are_planned_with_their_scales_and_a_newest_page() -> None:
    """A page of 16 positions of a head of 128 has 128 two-byte scales of keys and 16 four-byte scales of values."""
    llama = ModelSizes(read_published("llama-3.1-8b"), "int4")
    page, newest = 32 * (2 * 16 * 64 + 128 * 2 + 16 * 4), 32 * 2 * 16 * 128 * 2
    assert llama.count_cache_bytes(4096, "bfloat16", 8) == 256 * page + newest
    assert llama.count_cache_bytes(5, "bfloat16", 8) == (5 * page + 5 * newest) // 16
    sizes = {pages.window: pages.page_bytes for pages in list_page_kinds(llama, "bfloat16", 8, 16, 4096)}
    assert sizes == {None: page, NEWEST: newest}
    step = Predictor(llama.config, "trn2", 8, "bfloat16", 256, cache_dtype="int4").predict_step(2)
    prompts = Predictor(llama.config, "trn2", 8, "bfloat16", 256, cache_dtype="int4").predict_prompts(64)
    for kernels, attention in ((step.kernels, "attention_decode"), (prompts.kernels, "attention_prefill")):
        launches = {kernel.name: kernel.launches for kernel in kernels}
        assert launches["pack_pages"] == launches[attention] == 32


def test_commands_take_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, document = str(write_folder(tmp_path / "m")), tmp_path / "plan.json"
    plans: dict[str, Any] = {}
    for name in ("auto", "int8"):
        assert main(["plan", folder, "--kv-cache-dtype", name, "--json", str(document)]) == 0
        plans[name] = json.loads(document.read_text())
        assert plans[name]["kv_cache_dtype"] == name
    assert plans["auto"]["cache_bytes_per_token"] == 4 * plans["int8"]["cache_bytes_per_token"]
    assert "cache in int8: 64 bytes per token" in capsys.readouterr().out
    assert main(["plan", folder, "--kv-cache-dtype", "int4"]) == 0
    assert "cache in int4: 52 bytes per token" in capsys.readouterr().out
    for command, sentence in (
        (
            ["generate", "--model", folder],
            "which is for pages, and this cache is contiguous: use int8 or fp8",
        ),
        (["traffic", folder, "--rate", "1"], "for caches that store all positions alike: use int8 or fp8"),
        (
            ["plan", str(PUBLISHED / "gemma-2-2b.json")],
            "without a window; layers.0.attention is not: use int8",
        ),
    ):
        assert main([*command, "--kv-cache-dtype", "int4"]) == 2
        assert sentence in capsys.readouterr().err
