"""nkw plan --schemes: bytes, steps and accuracies of quantisation schemes side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.config.published import PUBLISHED
from model.config.quantization import quantise_config
from model.errors import ModelError
from model.families import read_config
from model.formats import SCHEMES
from model.loading.shipped import PRETRAINED
from model.plan.plan import Request, make_plan
from model.plan.predict import Predictor
from model.plan.schemes import CACHES, compare_schemes, read_accuracies
from model.plan.sizes import load_model
from nkw.commands import main

STORED = Path(__file__).parents[2] / "benchmarks" / "quantisation" / "stored.json"


def test_accuracies_are_those_that_the_benchmark_stored() -> None:
    measured = json.loads(STORED.read_text())
    _, accuracies = read_accuracies()
    assert set(accuracies) == set(SCHEMES)
    for name, accuracy in accuracies.items():
        runs = measured[name]["runs"]
        run = runs.get("scheme", runs["weights only"])
        assert accuracy.loss_change == pytest.approx(run["change"], abs=5e-7)
        assert accuracy.same_top_token == pytest.approx(run["same"], abs=5e-7)


@pytest.mark.slow
def test_rows_count_stored_bytes_and_compare_with_plain_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", str(PRETRAINED), "--tp", "2", "--lnc", "1", "--dtype", "bfloat16", "--prompt", "100"]
    assert main([*words, "--generate", "28", "--batch", "2", "--schemes", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["schemes"]
    assert [(row["weights"], row["cache"]) for row in rows] == [
        (weights, cache) for weights in ("plain", *SCHEMES) for cache in CACHES
    ]
    plain, *_ = rows
    assert plain["step_ratio"] == 1 and plain["readers"] == [] and plain["accuracy"] is None
    for row in rows:
        assert row["step_ratio"] == pytest.approx(row["step_ns"] / plain["step_ns"])
        assert row["cache_bytes"] == plain["cache_bytes"] // (2 if row["cache"] == "fp8" else 1)
        assert (row["weight_bytes"] < plain["weight_bytes"]) == (row["weights"] != "plain")
    sizes = {row["weights"]: row["weight_bytes"] for row in rows}
    assert sizes["int4"] < sizes["fp8"] == sizes["int8"] == sizes["fp8-dynamic"] == sizes["w8a8"]
    text = capsys.readouterr().out
    assert (
        "same token" in text
        and "int4: qkv_projection, output_projection and mlp read quantised weights" in " ".join(text.split())
    )


@pytest.mark.parametrize(
    ("quantization", "instance", "accelerator", "message"),
    [
        ("fp8", "trn1.2xlarge", None, "these are quantised by fp8: leave --schemes or --quantization out"),
        (None, None, "h100", "this plan has none: leave it out"),
    ],
)
def test_a_plan_without_plain_weights_or_steps_is_refused(
    quantization: str | None, instance: str | None, accelerator: str | None, message: str
) -> None:
    model = load_model(PRETRAINED, quantization=quantization)
    plan = make_plan(model, Request(tp=1, prompt=8, generate=8, instance=instance, accelerator=accelerator))
    with pytest.raises(ModelError, match=message):
        compare_schemes(plan)


def test_schemes_are_compared_on_one_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PRETRAINED), "--schemes", "--recommend", "--rate", "1"]) == 2
    assert "--schemes compares schemes on one instance" in capsys.readouterr().err


@pytest.mark.slow
def test_fp8_rows_are_multiplied_at_twice_the_rate_where_the_chip_has_it() -> None:
    """No launch takes less than its roofline; that of fp8 rows is half from trn2 on, that of int8 rows is not."""
    ratios = {}
    for target in ("trn1", "trn2"):
        floors = []
        for scheme in (None, "fp8-dynamic", "w8a8"):
            config = quantise_config(read_config(PRETRAINED), scheme)
            passed = Predictor(config, target, 1, "bfloat16", 256).predict_prompts(256)
            floors.append(next(kernel.floor_ns for kernel in passed.kernels if kernel.name == "mlp"))
        ratios[target] = floors[1] / floors[0]
        assert floors[2] == pytest.approx(floors[0], rel=1e-6)
    assert ratios == pytest.approx({"trn1": 1.0, "trn2": 0.5}, rel=1e-6)


@pytest.mark.parametrize(("tp", "is_cut"), [("2", False), ("4", True)])
def test_a_plan_says_which_weights_ranks_cut_inside_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tp: str, is_cut: bool
) -> None:
    """768 columns of an expert are 6 blocks: 2 ranks have 3 each, 4 have one and a half."""
    fields = json.loads((PUBLISHED / "qwen3-30b-a3b.json").read_text()) | {"num_hidden_layers": 1}
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["plan", str(tmp_path), "--instance", "trn2.48xlarge", "--tp", tp]) == 0
    text = " ".join(capsys.readouterr().out.split())
    sentence = (
        "are widened at load, because 4 tensor-parallel ranks cut inside the blocks of 128 by 128 elements of fp8; "
        "kernels read them as stored with 1 or 2 ranks."
    )
    assert (sentence in text) == is_cut
