"""`nkw plan`: what it prints, writes and chooses by itself, and one line with status 2 for what it cannot use."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from model.device import INSTANCES, chip
from model.plan.memory import compute_footprint
from model.plan.plan import Request, make_plan
from model.plan.sizes import load_model
from model.plan.text import _format_count
from nkw.commands import main
from tests.model.test_cli import only_progress
from tests.model.test_plan_parameters import CONFIGS, GEMMA3N, NOT_COMPUTED, changed
from tests.model.test_plan_predict import tiny


def printed(capsys, *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    captured = capsys.readouterr()
    assert only_progress(captured.err)
    assert max(map(len, captured.out.splitlines())) <= 80
    return captured.out


def refused(capsys, *arguments: str, command: str = "plan") -> str:
    """Run a command that is refused and return the one line that it prints."""
    try:
        status = main([command, *arguments])
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


@pytest.fixture
def small(tmp_path, monkeypatch) -> str:
    """Write a config under a short name, so that lines have the length they have for a user."""
    tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "config.json"


@pytest.mark.slow
def test_a_plan_with_kernels_says_where_the_time_goes(small, capsys) -> None:
    text = printed(capsys, small, "--tp", "2", "--price", "12.5")
    assert "trn2.48xlarge: tp 2 of 64 logical cores (LNC 2), 32 copies" in text
    for kernel in (
        "qkv_projection",
        "attention_prefill",
        "attention_block_decode",
        "output_projection",
        "lm_head",
    ):
        assert f"\n{kernel} " in text
    assert "$ input $ output" in text
    assert "trn2.48xlarge at $12.50/h\n" in text
    assert "Times are dry runs of this project's kernels" in text
    assert "for a part:" not in text


def test_a_family_without_kernels_gets_rooflines_and_one_sentence_why(tmp_path, capsys, monkeypatch) -> None:
    total = tiny(tmp_path, **GEMMA3N).total
    monkeypatch.chdir(tmp_path)
    text = printed(capsys, "config.json", "--price", "40", "--batch", "3")
    sentence = f"Times are rooflines, at least, because no kernel of this project computes {NOT_COMPUTED}."
    assert sentence in " ".join(text.split())
    assert "keeps ttft 500 ms, itl 50 ms: at least, as rooflines: TTFT " in " ".join(text.split())
    assert "dataflow" not in text
    assert f"{total:,}" in text


@pytest.mark.parametrize(
    ("quantisation", "sentence"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            "Weights quantised by fp8 are planned as float32.",
        ),
        (
            {"quant_method": "fp8"},
            "Of the weights quantised by fp8, qkv_projection, output_projection and mlp read their own as stored; "
            "others are float32.",
        ),
        (None, ""),
    ],
)
def test_a_plan_says_which_quantised_weights_are_planned_plain(
    tmp_path, quantisation, sentence, capsys, monkeypatch
) -> None:
    tiny(tmp_path, **({} if quantisation is None else {"quantization_config": quantisation}))
    monkeypatch.chdir(tmp_path)
    text = " ".join(printed(capsys, "config.json", "--accelerator", "h100").split())
    assert sentence in text and ("quantised by" in text) == (quantisation is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-27b", "whisper-tiny", "deepseek-v2-lite", "mamba-130m"])
def test_every_family_says_that_its_weights_are_quantised(tmp_path, capsys, monkeypatch, name) -> None:
    changed(tmp_path, name, quantization_config={"quant_method": "fp8\x1b[31m"})
    monkeypatch.chdir(tmp_path)
    text = " ".join(printed(capsys, "config.json", "--accelerator", "h100").split())
    assert "Weights quantised by fp8\\x1b[31m are planned as" in text
    monkeypatch.chdir(CONFIGS)
    assert "Weights quantised by" not in printed(capsys, f"{name}.json", "--accelerator", "h100")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "soft", "hard"])
def test_a_plan_replaces_no_file_of_a_model(small, tmp_path, capsys, name) -> None:
    for file_name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / file_name).write_text("kept")
    (tmp_path / "soft").symlink_to("config.json")
    os.link(tmp_path / "config.json", tmp_path / "hard")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for source in (small, str(tmp_path)):
        message = refused(capsys, source, "--json", str(tmp_path / name))
        assert message.endswith(
            f"the plan cannot be written to {tmp_path / name}: this command reads that file"
        )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert main(["plan", small, "--json", str(tmp_path / "plan.json")]) == 0


@pytest.mark.slow
def test_no_document_holds_an_infinity(small, tmp_path, capsys) -> None:
    for arguments in (["--price", "1e9"], ["--price", "1e-6"], ["--accelerator", "1e-9,1e-9"]):
        text = json.dumps(document(tmp_path, capsys, small, *arguments), allow_nan=False)
        assert json.loads(text)["batches"]
    for arguments in (["--price", "1.1e9"], ["--price", "9e-7"], ["--accelerator", "9e-10,1"]):
        assert "from 1e-0" in refused(capsys, small, *arguments)


def test_an_accelerator_is_planned_by_its_peaks(capsys, monkeypatch) -> None:
    monkeypatch.chdir(CONFIGS)
    text = printed(capsys, "llama-2-13b.json", "--accelerator", "h100", "--batch", "256", status=1)
    assert "ridge 295.2 op/byte: 989.0 TFLOPS over 3.350 TB/s" in text
    steps = {line.split()[0]: line.split()[1:4] for line in text.splitlines() if line[:6].strip().isdigit()}
    assert steps["1"] == ["16.04", "(8.02..47.18)", "62.3"]
    assert steps["64"] == ["47.59", "(23.80..139.98)", "1,344.7"]
    assert steps["256"] == ["-", "-", "-"]
    assert "Times are rooflines, at least, of the peaks given" in " ".join(text.split())
    assert "batch 256 does not fit beside the weights here" in text


def document(folder, capsys, *arguments: str) -> dict[str, Any]:
    path = folder / "plan.json"
    printed(capsys, *arguments, "--json", str(path))
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_document_holds_what_the_text_says(small, tmp_path, capsys) -> None:
    plan = document(tmp_path, capsys, small, "--tp", "4", "--price", "3", "--batch", "3")
    assert (plan["schema"], plan["target"], plan["tp"], plan["copies"]) == (1, "trn2", 4, 16)
    parameters = dict(plan["parameters"])
    total, active = parameters.pop("all"), parameters.pop("active")
    assert total == sum(parameters.values())
    assert active == total - parameters["embedding"] - 32
    assert [batch_row["batch"] for batch_row in plan["batches"]] == [1, 2, 3, 4, 8, 16, 32, 64]
    alone = document(tmp_path, capsys, small, "--tp", "4")
    assert alone["first_tokens"] == alone["first_token"]
    assert plan["first_tokens"]["operations"] == pytest.approx(3 * plan["first_token"]["operations"])
    for phase in (plan["first_token"], plan["first_tokens"], plan["step"]):
        assert phase["dataflow_ns"] <= phase["program_ns"] <= phase["serial_ns"]
        for reading in ("dataflow_ns", "program_ns", "serial_ns"):
            kernels = sum(kernel[reading] for kernel in phase["kernels"])
            assert kernels + phase["overhead_ns"] == pytest.approx(phase[reading], rel=1e-12)
    assert {instance["instance"] for instance in plan["instances"]} >= {"trn1.2xlarge", "inf2.48xlarge"}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "rows"), [("1", 0), ("3", 2)])
def test_prompts_of_a_batch_have_rows_for_roofline_and_prediction(small, capsys, batch, rows) -> None:
    text = printed(capsys, small, "--batch", batch)
    assert text.count(f"\n{batch} prompts, packed ") == rows


@pytest.mark.slow
def test_the_rows_of_a_pass_add_up_to_it(small, capsys) -> None:
    lines = printed(capsys, small, "--tp", "2").splitlines()
    for title in ("first token, by kernel", "one step, by kernel"):
        rows = lines[next(index for index, line in enumerate(lines) if line.startswith(title)) + 1 :]
        rows = [
            line.split()
            for line in rows[: next(index for index, row in enumerate(rows) if row.startswith("all ")) + 1]
        ]
        times = [float(next(word for word in row if "." in word)) for row in rows]
        # Each row is rounded to 0.001 ms.
        assert sum(times[:-1]) == pytest.approx(times[-1], abs=0.0005 * len(times))
        shares = [float(word[:-1]) for row in rows[:-1] for word in row if "." in word and "%" in word]
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


@pytest.mark.slow
def test_counts_of_sequences_are_written_out(capsys, monkeypatch) -> None:
    monkeypatch.chdir(CONFIGS)
    text = printed(capsys, "mamba-130m.json")
    plan = make_plan(load_model(CONFIGS / "mamba-130m.json"), Request())
    for fit in plan.fits:
        row = next(line for line in text.splitlines() if line.startswith(f"{fit.instance.name} "))
        assert row.split()[-1] == f"{fit.sequences:,}"
    num_sequences = next(footprint for footprint in plan.footprints if footprint.tp == 64).sequences(
        2 * chip("trn3").hbm_bytes_per_core
    )
    assert f" {num_sequences // 1000:,}k " in text
    assert "e+" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gemma-3-27b", ("--instance", "inf2.xlarge"), "30.3 GB for each of 2, which have 17.2"),
        ("llama-3.1-70b", ("--accelerator", "h100"), "141.1 GB for each of 1, which has 80.0"),
    ],
)
def test_weights_that_do_not_fit_are_told_from_a_cache_that_does_not(
    name, arguments, message, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(CONFIGS)
    text = printed(capsys, f"{name}.json", "--prompt", "8", "--generate", "1", *arguments, status=1)
    assert f"the weights do not fit here: {message}" in text
    assert "then 1 token; batch 1" in " ".join(text.split())
    assert "no batch fits, so there are no rates and no prices" in text
    assert "beside the weights here" not in text


@pytest.mark.deep
def test_large_times_keep_to_the_columns(capsys, monkeypatch) -> None:
    monkeypatch.chdir(CONFIGS)
    arguments = ["--dtype", "float32", "--batch", "100000", "--price", "1000", "--instance", "trn1.32xlarge"]
    assert "the weights do not fit here" in printed(capsys, "llama-3.1-405b.json", *arguments, status=1)


@pytest.mark.slow
def test_prices_are_those_of_complete_requests_on_all_copies(small, tmp_path, capsys) -> None:
    plan = document(tmp_path, capsys, small, "--price", "36", "--prompt", "40", "--generate", "10")
    first, copies = plan["stack"]["first_token"]["program_ns"], plan["copies"]
    for rate in plan["batches"]:
        batch, step = rate["batch"], rate["served"]["program_ns"]
        seconds = (batch * first + 9 * step) / 1e9
        tokens = copies * batch * 10
        assert rate["request_tokens_per_s"] == pytest.approx(tokens / seconds)
        assert rate["dollars_per_million"]["program"] == pytest.approx(36 / 3600 * seconds / tokens * 1e6)
        dollars = 36 / 3600 * seconds / (batch * copies)
        prompts, steps = (
            rate[f"dollars_per_million_{side}"]["program"] / 1e6 for side in ("input", "output")
        )
        assert 40 * prompts + 9 * steps == pytest.approx(dollars)
        assert rate["tokens_per_s"] == pytest.approx(batch * 1e9 / step)


@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3"])
def test_names_of_instances_are_whole(capsys, name) -> None:
    text = printed(capsys, str(CONFIGS / f"{name}.json"), "--instance", "inf2.xlarge", status=1)
    assert all(f"\n{instance} " in text for instance in INSTANCES)


def test_a_config_of_a_mistyped_family_is_told_the_likely_one(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, meant in (("lama", "; did you mean llama? Known"), ("xyz", "; known")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        assert f"model_type: '{name}' is not known{meant} are afmoe, deepseek_v2" in refused(capsys, ".")


@pytest.mark.slow
def test_a_kernel_that_works_in_another_way_from_a_batch_on_is_named(tmp_path, capsys) -> None:
    """Mixtral's choices of experts, up to 8; all experts beyond."""
    changed(tmp_path, "mixtral-8x7b", num_hidden_layers=1)
    options = ["--instance", "inf2.48xlarge", "--tp", "8", "--json", str(tmp_path / "plan.json")]
    text = " ".join(printed(capsys, str(tmp_path), *options).split())
    assert "from batch 8 on experts_decode works in another way: " in text
    assert text.count("works in another way") == 1
    rates = json.loads((tmp_path / "plan.json").read_text())["batches"]
    assert all("experts_decode" in rate["kernels"] for rate in rates)


@pytest.mark.parametrize(("generate", "status"), [("1", 0), ("100000", 1)])
def test_a_batch_that_does_not_fit_has_no_times_rates_or_prices(tmp_path, capsys, generate, status) -> None:
    path, config = tmp_path / "plan.json", str(CONFIGS / "llama-3-8b.json")
    arguments = ["--accelerator", "h100", "--price", "3", "--batch", generate, "--json", str(path)]
    printed(capsys, config, *arguments, status=status)
    plan = json.loads(path.read_text(encoding="utf-8"))
    rate = next(rate for rate in plan["batches"] if rate["batch"] == int(generate))
    assert plan["fits"] == rate["fits"] == (status == 0)
    keys = "program_ns serial_ns tokens_per_s request_tokens_per_s dollars_per_million".split()
    keys += ["dollars_per_million_input", "dollars_per_million_output"]
    assert [rate[key] is None for key in keys] == [status == 1] * len(keys)
    assert [plan[phase]["program_ns"] is None for phase in ("first_token", "step")] == [status == 1] * 2


@pytest.mark.slow
def test_the_same_plan_twice_is_the_same_document(small, tmp_path, capsys) -> None:
    assert document(tmp_path, capsys, small) == document(tmp_path, capsys, small)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ([], (56, 8)),
        (["--generate", "1"], (63, 1)),
        (["--prompt", "10"], (10, 8)),
        (["--prompt", "60", "--generate", "4"], (60, 4)),
    ],
)
def test_tokens_left_open_fill_the_context(small, tmp_path, capsys, arguments, tokens) -> None:
    plan = document(tmp_path, capsys, small, *arguments)
    assert (plan["prompt"], plan["generate"]) == tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [([], "float32"), (["--dtype", "auto"], "float32"), (["--dtype", "bfloat16"], "bfloat16")],
)
def test_auto_is_the_dtype_that_the_config_names(small, tmp_path, capsys, arguments, dtype) -> None:
    assert document(tmp_path, capsys, small, *arguments)["dtype"] == dtype


@pytest.mark.deep
def test_ranks_left_open_are_the_fewest_that_hold_the_batch() -> None:
    """A rank of trn2 is a logical core of two physical ones, with 25.77 GB; 93.4 GB of weights take four of them."""
    model, core_bytes = load_model(CONFIGS / "mixtral-8x7b.json"), 2 * chip("trn2").hbm_bytes_per_core
    sequences = [compute_footprint(model, "bfloat16", tp, 1024).sequences(core_bytes) for tp in (2, 4, 8)]
    assert sequences[0] <= 0 < sequences[1] < 100 < sequences[2]
    plan = make_plan(model, Request(instance="trn2.48xlarge"))
    assert (plan.placement.shape.tp, plan.rate.fits) == (4, True)
    larger = make_plan(model, Request(instance="trn2.48xlarge", batch=100))
    assert (larger.placement.shape.ranks, larger.rate.fits) == (8, True)
    nowhere = make_plan(model, Request(instance="inf2.xlarge"))
    assert (nowhere.placement.shape.tp, nowhere.rate.fits) == (2, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "65"], "65 ranks on trn2.48xlarge, which has 64 logical cores (LNC 2)"),
        (["--instance", "p5"], "instance 'p5' is not known; known are trn1.2xlarge, "),
        (
            ["--instance", "trn2.48xl"],
            "'trn2.48xl' is not known; did you mean trn2.48xlarge? known are trn1.2",
        ),
        (
            ["--instance", "2 x trn1.32xlrge"],
            "is not known; did you mean 2 x trn1.32xlarge? known are trn1.2xl",
        ),
        (["--instance", "inf2.xlarge", "--tp", "4"], "4 ranks on inf2.xlarge, which has 2 cores"),
        (["--instance", "2 x inf2.48xlarge"], "no EFA rate of inf2.48xlarge is on record"),
        (["--instance", "2 x trn1.32xlarge", "--tp", "128"], "128 ranks on 2 x trn1.32xlarge, which has 64"),
        (["--prompt", "60", "--generate", "5"], "a prompt of 60 and 5 generated tokens exceed the model's"),
        (["--accelerator", "b9"], "accelerator 'b9'; known are a100, h100, or give TFLOPS,TB/s"),
        (["--accelerator", "h1000"], "accelerator 'h1000'; did you mean h100? known are a100, h100, or give"),
        (["--accelerator", "h100", "--instance", "inf2.xlarge"], "for an instance or for an accelerator"),
        (
            ["--accelerator", "h100", "--tp", "1000"],
            "1000 ranks for 300 tokens; each rank needs one, so this model takes 1 to 300 ranks",
        ),
        (["--batch", "0"], "'0' is not a positive whole number"),
        (["--batch", "1048577"], "a batch of 1048577; a plan takes at most 1,048,576"),
        (["--price", "0"], "'0' is not a number from 1e-06 to 1e+09"),
        (["--price", "inf"], "'inf' is not a number from 1e-06 to 1e+09"),
        (["--prices", "missing.json"], "missing.json is missing"),
        (
            ["--prices", "config.json"],
            "config.json, 'architectures': dollars_per_hour is no number from 1e-06",
        ),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (
            ["--json", "missing/plan.json"],
            "the plan cannot be written to missing/plan.json: No such file or directory",
        ),
    ],
)
def test_refuses_wrong_options_in_one_line(small, capsys, arguments, message) -> None:
    assert message in refused(capsys, small, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"), [("trn2 UltraServer", 256), ("2 x trn1.32xlarge", 64), ("2 x trn1.32xlarge", 32)]
)
def test_ranks_go_up_to_the_last_core_of_what_is_joined(name: str, tp: int) -> None:
    model = load_model(CONFIGS / "mamba-130m.json")
    assert 768 * 2 % tp == 0
    plan = make_plan(model, Request(instance=name, tp=tp))
    assert (plan.placement.name, plan.placement.shape.tp) == (name, tp)
    assert plan.placement.mesh.copies == plan.placement.instance.physical_cores // tp // plan.placement.lnc


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--instance", "inf2.xlarge", "--tp", "2"],
        ["--instance", "trn1.32xlarge", "--tp", "32"],
        ["--accelerator", "h100", "--tp", "32"],
    ],
)
def test_accepts_ranks_up_to_the_cores_and_the_vocabulary(small, capsys, arguments) -> None:
    assert printed(capsys, small, *arguments)


@pytest.mark.deep
def test_refuses_more_tokens_than_a_plan_takes(tmp_path, capsys) -> None:
    assert "a plan takes at most 1,073,741,824" in refused(
        capsys, str(CONFIGS / "mamba-130m.json"), "--prompt", str(2**30), "--generate", "1"
    )
    changed(tmp_path, "mamba-130m", num_hidden_layers=1)
    assert main(["plan", str(tmp_path), "--prompt", str(2**30 - 1), "--generate", "1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("nothing", "nothing is neither a config.json, nor a folder of one, nor a published model;"),
        ("nothing/config.json", "nothing/config.json is neither a config.json, nor"),
        (".", "is an empty folder"),
    ],
)
def test_refuses_a_config_that_is_not_there(config, problem, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem in refused(capsys, config)


@pytest.mark.slow
def test_llama_3_1_70b_takes_the_fewest_cores_and_says_by_how_much_others_are_too_small(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(CONFIGS)
    lines = printed(capsys, "llama-3.1-70b.json", "--json", str(tmp_path / "plan.json")).splitlines()
    short = next(line for line in lines if line.startswith("trn1.2xlarge"))
    assert short.split(maxsplit=6)[4:] == ["2", "0", "does not fit: 71.77 > 17.18 GB"]
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    for instance in plan["instances"]:
        assert (instance["tp"] is None) == (instance["bytes_per_core"] > instance["core_bytes"])
    assert (plan["lnc"], plan["tp"], plan["copies"], plan["fits"]) == (2, 8, 8, True)
    assert all(kernel["roofline_because"] is None for kernel in plan["step"]["kernels"])
    rates = [rate for rate in plan["batches"] if rate["fits"]]
    for times in (plan["first_token"], plan["step"], *rates):
        assert times["dataflow_ns"] <= times["program_ns"] <= times["serial_ns"]


@pytest.mark.slow
def test_a_plan_says_what_cores_hold_padded(capsys, tmp_path) -> None:
    """Heads of SmolLM2-135M: 9 in 3 groups, which 3 cores share evenly and 2 do not."""
    path = tmp_path / "plan.json"
    for tp, uneven in ((3, []), (2, ["9 query heads in 3 groups: 6 a rank, 3 of 12 are padding"])):
        options = ["--tp", str(tp), "--prompt", "4", "--generate", "4", "--json", str(path)]
        assert main(["plan", str(CONFIGS / "smollm2-135m.json"), *options]) == 0
        assert json.loads(path.read_text())["uneven"] == uneven
        text = " ".join(capsys.readouterr().out.split())
        assert ("on 2 logical cores 9 query heads in 3 groups" in text) == bool(uneven)


@pytest.mark.slow
def test_ranks_that_cut_the_sequence_change_the_prompt_only(small, capsys, tmp_path) -> None:
    plans = []
    for arguments in ([], ["--sp"]):
        path = tmp_path / "plan.json"
        text = printed(capsys, small, "--tp", "4", "--batch", "2", *arguments, "--json", str(path))
        assert f"trn2.48xlarge: tp 4{' with sp' if arguments else ''} of 64 logical cores (LNC 2)" in text
        plans.append(json.loads(path.read_text()))
    uncut, cut = plans
    assert (uncut["sp"], cut["sp"]) == (False, True)
    assert cut["step"] == uncut["step"]
    for phase in ("first_token", "first_tokens"):
        names = [[kernel["kernel"] for kernel in plan[phase]["kernels"]] for plan in plans]
        assert "embedding, last rows" in names[1]
        assert set(names[1]) - set(names[0]) <= {"embedding, last rows"}
        assert cut[phase]["program_ns"] != uncut[phase]["program_ns"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (
            "config.json",
            [],
            "--sp cuts prompts over tensor-parallel ranks and there is 1; ask for more with --tp",
        ),
        (
            "config.json",
            ["--tp", "2", "--accelerator", "h100"],
            "--sp changes launches of kernels; for h100 a plan has rooflines only",
        ),
        (
            "gemma3n.json",
            ["--tp", "2"],
            "--sp changes launches of kernels; this model has rooflines only, as no kernel computes sparse activations",
        ),
    ],
)
def test_a_plan_refuses_sp_where_no_ranks_cut_anything(
    small, tmp_path, capsys, source, arguments, message
) -> None:
    (tmp_path / "gemma3n.json").write_text(json.dumps(GEMMA3N))
    assert refused(capsys, source, *arguments, "--sp").removesuffix(": leave --sp out").endswith(message)
    printed(capsys, "config.json", "--tp", "2", "--sp")


@pytest.mark.parametrize(
    ("count", "written"),
    [(99_999, "99,999"), (100_000, "100k"), (9_999_999, "9,999k"), (10_000_000, "10M"), (10**10, "10,000M")],
)
def test_a_count_takes_at_most_six_characters_up_to_a_billion(count, written) -> None:
    assert _format_count(count) == written
