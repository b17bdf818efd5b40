"""The option --row-scales: scales of quantised rows from each rank's columns, or from the columns of all ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.commands.options import engine as options
from model.config.quantization import GLOBAL, RANK, ROW_SCALES, quantise_config
from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import load_config
from model.formats import SCHEMES
from model.formats.groups import CLASSES, Group, Groups
from model.formats.modelopt import ModelOpt
from model.formats.mx import Mx8
from model.formats.scaled import Scaled
from model.llm import LLM
from model.llm.engine_args import EngineArgs
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import PRETRAINED
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.plan import Request, make_plan
from model.plan.row_scales import compare_row_scales
from model.plan.sizes import load_model
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.tiny_families import write_tiny

IDS = [5, 3, 9, 1, 7, 2, 4, 8]
STATIC = Scaled("modelopt", None, None, has_quantised_rows=True, has_static_rows=True)
DYNAMIC = SCHEMES["fp8-dynamic"]
FEW_ROUNDINGS = 2.0**-16
"""A result passes fewer than 256 roundings of 2^-24 in a row."""


def compute_logits(
    folder: Path, scheme: str, row_scales: str, ranks: int, on_kernels: bool, sequence: bool = False
) -> np.ndarray:
    """Return the logits after a prompt and after a decode step, of kernels or of the reference, in float32."""
    config = quantise_config(load_config(folder), scheme, row_scales)
    checkpoint = open_checkpoint(folder, config)
    if on_kernels:
        shards = shard_weights(config, checkpoint, ranks, dtype="float32")
        mesh = Mesh(ranks, sequence=sequence)
        model = KernelModel(config, shards, SimulatedDevice("trn2", ranks), 128, mesh=mesh)
    else:
        model = ReferenceModel(config, checkpoint, "float32", ranks=ranks)
    return np.stack([model.prefill([IDS])[0].logits, model.decode([7], [len(IDS)])[0].logits])


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        ("fp8-dynamic", "qwen3"),
        ("w8a8", "deepseek v3"),
        *(
            pytest.param(scheme, family, marks=pytest.mark.slow)
            for scheme, family in (
                *(("w8a8", family) for family in ("qwen3", "gemma2", "qwen2", "glm4-moe")),
                *(("fp8-dynamic", family) for family in ("deepseek v3", "gemma2", "qwen2", "glm4-moe")),
            )
        ),
    ],
)
def test_logits_with_global_scales_are_those_of_one_rank(tmp_path: Path, scheme: str, family: str) -> None:
    """Sums over ranks are rounded in another order, and nothing else differs; other scales change logits by more."""
    folder = write_tiny(tmp_path, family)
    for on_kernels in (True, False):
        one_rank = compute_logits(folder, scheme, RANK, 1, on_kernels)
        bound = FEW_ROUNDINGS * np.abs(one_rank).max()
        assert np.array_equal(compute_logits(folder, scheme, GLOBAL, 1, on_kernels), one_rank)
        for ranks in (2, 4):
            shared = compute_logits(folder, scheme, GLOBAL, ranks, on_kernels)
            assert np.abs(shared - one_rank).max() <= bound
            assert np.array_equal(shared.argmax(axis=1), one_rank.argmax(axis=1))
            alone = compute_logits(folder, scheme, RANK, ranks, on_kernels)
            assert np.abs(alone - one_rank).max() > 4 * bound


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w8a8"])
def test_ranks_that_divide_the_rows_of_a_prompt_have_global_scales(tmp_path: Path, scheme: str) -> None:
    folder = write_tiny(tmp_path, "qwen3")
    one_rank = compute_logits(folder, scheme, RANK, 1, True)
    shared = compute_logits(folder, scheme, GLOBAL, 2, True, sequence=True)
    assert np.abs(shared - one_rank).max() <= FEW_ROUNDINGS * np.abs(one_rank).max()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w8a8"])
def test_text_is_that_of_the_reference(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--prompt", "Once upon a time", "--max-new-tokens", "6", "--quantization", scheme]
    for ranks in ("1", "2"):
        assert main([*words, "--tp", ranks, "--row-scales", GLOBAL]) == 0
        assert "6 of 6 tokens equal to the numpy reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        (None, "and the weights are not quantised: quantise by fp8-dynamic or w8a8, or leave the option out"),
        (
            "int8",
            "and int8 computes no scales of rows here: quantise by fp8-dynamic or w8a8, or leave the option",
        ),
        ("fp8", "and fp8 computes no scales of rows here"),
    ],
)
def test_global_scales_are_for_schemes_that_quantise_rows(scheme: str | None, sentence: str) -> None:
    config = load_config(PRETRAINED)
    assert quantise_config(config, scheme, RANK) == quantise_config(config, scheme)
    with pytest.raises(
        ModelError, match="row_scales is 'global', which is for rows with a scale computed"
    ) as refused:
        quantise_config(config, scheme, GLOBAL)
    assert sentence in str(refused.value)


def test_formats_that_compute_no_scale_for_each_row_are_refused() -> None:
    """Static scales, and blocks of MX formats, are the same for every number of ranks."""
    config = load_config(PRETRAINED)
    for name, container in (
        ("modelopt", ModelOpt("modelopt", (Group("all", CLASSES, STATIC),))),
        ("compressed-tensors", Mx8()),
    ):
        static = replace(config, weight_format=container, quant_method=name)
        with pytest.raises(ModelError, match=f"and {name} computes no scales of rows here"):
            quantise_config(static, None, GLOBAL)
    mixed = Groups(
        "compressed-tensors", (Group("first", CLASSES, STATIC), Group("second", ("mlp",), DYNAMIC))
    )
    shared = quantise_config(
        replace(config, weight_format=mixed, quant_method="compressed-tensors"), None, GLOBAL
    )
    assert shared.weight_format is not None
    assert [format.shares_row_maxima for format in shared.weight_format.formats] == [False, True]


def test_other_names_are_refused() -> None:
    assert options.ROW_SCALES == ROW_SCALES and ROW_SCALES[0] == EngineArgs().row_scales == RANK
    with pytest.raises(ModelError, match="row_scales is 'tensor'; it is rank or global"):
        quantise_config(load_config(PRETRAINED), "w8a8", "tensor")
    with pytest.raises(ModelError, match="row_scales"):
        EngineArgs(row_scales=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["generate", "serve", "plan"])
def test_commands_refuse_global_scales_with_one_sentence(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [str(PRETRAINED)] if command != "generate" else ["--model", str(PRETRAINED)]
    assert main([command, *model, "--quantization", "int8", "--row-scales", GLOBAL]) == 2
    error = capsys.readouterr().err
    assert "row_scales is 'global'" in error and "Traceback" not in error


def test_an_engine_has_the_tokens_of_one_rank() -> None:
    texts = []
    for ranks in (1, 2):
        llm = LLM(
            PRETRAINED,
            quantization="w8a8",
            row_scales=GLOBAL,
            tensor_parallel_size=ranks,
            max_model_len=64,
        )
        (output,) = llm.generate(["Once upon a time"], use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_a_plan_prints_what_global_scales_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        str(PRETRAINED),
        "--lnc",
        "1",
        "--prompt",
        "100",
        "--generate",
        "28",
        "--quantization",
        "w8a8",
    ]
    documents = []
    for row_scales in (RANK, GLOBAL):
        path = tmp_path / f"{row_scales}.json"
        assert main([*words, "--tp", "2", "--row-scales", row_scales, "--json", str(path)]) == 0
        documents.append(json.loads(path.read_text()))
    alone, shared = documents
    assert "row_scales" not in alone
    prompt, step = shared["row_scales"]
    assert (prompt["name"], step["name"]) == ("first token", "step")
    for cost, name in ((prompt, "first_token"), (step, "step")):
        assert cost["rank_ns"] == pytest.approx(alone[name]["program_ns"])
        assert cost["global_ns"] == pytest.approx(shared[name]["program_ns"])
        # Each layer has two row-parallel products, and an all-reduce of two ranks takes 3.6 us on trn2.
        assert cost["global_ns"] - cost["rank_ns"] > 2 * alone["layers"] * 3000
    text = " ".join(capsys.readouterr().out.split())
    assert "row scales: global, of all columns, cost an all-reduce of row maxima" in text
    assert main([*words, "--tp", "1", "--row-scales", GLOBAL]) == 0
    assert "one rank has all columns, so global scales are those of the rank" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_plan_without_predictions_has_no_costs() -> None:
    model = load_model(PRETRAINED, quantization="w8a8", row_scales=GLOBAL)
    plan = make_plan(model, Request(tp=2, prompt=8, generate=8, accelerator="h100"))
    assert compare_row_scales(plan, load_model(PRETRAINED, quantization="w8a8")) == []
