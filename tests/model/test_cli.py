"""The command line: what it prints and writes, and one line with status 2 for whatever it cannot use."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model.commands.generate.command import create_prompt_progress
from model.config.published import PUBLISHED
from model.loading.shipped import PRETRAINED
from nkw.commands import main
from tests.deep import deep_except
from tests.interruptible import remove_progress, started

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numpy", "tokenizers", "simulate.hardware", "nki_kernels", "torch", "rich", "ml_dtypes")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def only_progress(err: str) -> bool:
    """Return whether stderr has only the lines of progress that a slow machine gets."""
    pattern = r"[\w ]+: (layer )?\d+ of \d+( done)?|plan of \S+: dry runs of its kernels"
    return all(re.fullmatch(pattern, line) for line in err.splitlines())


def refused(capsys, *arguments: str) -> str:
    """Run a command that is refused and return the one line that it prints."""
    try:
        status = main(["generate", *arguments])
    except SystemExit as left:
        status = left.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


@pytest.fixture
def tiny(write_model) -> str:
    return str(write_model(eos_token_id=None))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["generate", "--help"],
        ["serve", "--help"],
        ["time", "--help"],
        ["lint", "--help"],
        ["bundle", "--help"],
    ],
)
def test_help_and_version_import_nothing_heavy(arguments) -> None:
    code = f"""
import sys
from nkw.commands import main
try:
    main(sys.argv[1:])
except SystemExit as left:
    assert not left.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = python(code, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_llm_is_imported_without_the_simulator() -> None:
    done = python(
        "import sys; from model import LLM; print('simulate' in sys.modules, 'nki_kernels' in sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_version_is_one_line(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("nki-workbench ")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_fits_80_columns(capsys, monkeypatch, arguments) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(arguments)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.slow
def test_numpy_backend_writes_without_the_simulator(tiny) -> None:
    code = """
import sys
from nkw.commands import main
status = main(sys.argv[1:])
print([name for name in ("simulate.hardware", "nki_kernels", "nki", "torch") if name in sys.modules])
sys.exit(status)
"""
    done = python(code, "generate", "--backend", "numpy", "--model", tiny, "--max-new-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("Once upon a time")
    assert "5 tokens by the numpy reference; nothing was compared or predicted" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_simulated_run_is_checked_predicted_and_written(tiny, tmp_path, capsys) -> None:
    results, trace = tmp_path / "out.json", tmp_path / "trace.json"
    arguments = ["--model", tiny, "--prompt", "ab", "--max-new-tokens", "4", "--tp", "2", "--target", "trn3"]
    assert main(["generate", *arguments, "--json", str(results), "--trace", str(trace)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert only_progress(captured.err)
    assert lines[0].startswith("ab")
    assert "4 of 4 tokens equal to the numpy reference" in lines
    assert any(line.startswith("predicted on 2 cores") for line in lines)
    assert [line.split()[0] for line in lines if "..0" in line] == ["trn1", "inf2", "trn2", "trn3"]
    assert lines[-1] == f"trace: {trace}"
    assert all(len(line) <= 80 for line in lines[2:-1])
    assert json.loads(trace.read_text())["traceEvents"]

    document = json.loads(results.read_text())
    assert document["schema"] == 3
    (done,) = document["generations"]
    assert (done["prompt"], done["prompt_ids"][0], len(done["prompt_ids"])) == ("ab", 1, 3)
    assert len(done["generated_ids"]) == 4
    assert done["stopped_by"] == "length"
    assert done["checks"] == {
        "reference": "numpy",
        "tokens_compared": 4,
        "tokens_equal": 4,
        "differences": [],
    }
    assert (document["backend"], document["target"], document["tp"]) == ("simulate", "trn3", 2)
    assert list(document["predictions"]) == ["trn1", "inf2", "trn2", "trn3"]
    for prediction in document["predictions"].values():
        for phase in ("first_token", "per_token"):
            times = prediction[phase]
            assert 0 < times["dataflow_ns"] <= times["program_ns"] <= times["serial_ns"]
    assert set(document["versions"]) == {"nki-workbench", "python", "numpy"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.json", "trace.json"]


@pytest.mark.slow
def test_both_backends_write_the_same_and_a_seed_repeats_it(tiny, tmp_path, capsys) -> None:
    sampled = [
        "--temperature",
        "0.9",
        "--top-k",
        "12",
        "--top-p",
        "0.95",
        "--seed",
        "5",
        "--max-new-tokens",
        "6",
    ]
    texts = []
    for number, backend in enumerate(["numpy", "simulate", "numpy"]):
        path = tmp_path / f"{number}.json"
        assert main(["generate", "--model", tiny, "--backend", backend, *sampled, "--json", str(path)]) == 0
        texts.append(json.loads(path.read_text())["generations"][0]["generated_ids"])
    capsys.readouterr()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        (["--dtype", "bfloat16"], "bfloat16", ", both with bfloat16 activations"),
        (["--dtype", "auto", "--tp", "2"], "bfloat16", ", both with bfloat16 activations"),
        (["--dtype", "float32"], "float32", ""),
        ([], "float32", ""),
    ],
)
def test_activations_are_of_the_dtype_asked_for(
    write_model, tmp_path, capsys, options, dtype, message
) -> None:
    folder = write_model(eos_token_id=None, torch_dtype="bfloat16", dtype=ml_dtypes.bfloat16)
    results = tmp_path / "out.json"
    arguments = ["--model", str(folder), "--max-new-tokens", "4", "--json", str(results), *options]
    assert main(["generate", *arguments]) == 0
    assert f"4 of 4 tokens equal to the numpy reference{message}" in capsys.readouterr().out.splitlines()
    assert json.loads(results.read_text())["dtype"] == dtype


@pytest.mark.slow
def test_bfloat16_activations_are_predicted_to_be_faster_and_take_less_sbuf(
    write_model, tmp_path, capsys
) -> None:
    """Weights of bfloat16 are not cast on the chip, and every tile of activations has half the bytes."""
    folder = write_model(eos_token_id=None, torch_dtype="bfloat16", dtype=ml_dtypes.bfloat16, hidden_size=256)
    tokens = []
    for dtype in ("float32", "bfloat16"):
        results = tmp_path / f"{dtype}.json"
        arguments = [
            "--model",
            str(folder),
            "--max-new-tokens",
            "2",
            "--dtype",
            dtype,
            "--json",
            str(results),
        ]
        assert main(["generate", "--no-check", *arguments]) == 0
        tokens.append(json.loads(results.read_text())["predictions"]["trn2"]["per_token"])
    capsys.readouterr()
    wide, narrow = tokens
    assert narrow["program_ns"] < wide["program_ns"]
    assert narrow["sbuf_bytes"] < wide["sbuf_bytes"]


@pytest.mark.slow
def test_generate_simulates_trn2_unless_told_otherwise_and_the_demo_shows_trn1(
    tiny, capsys, monkeypatch
) -> None:
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert main(["generate", "--model", tiny, "--prompt", "ab", "--max-new-tokens", "2"]) == 0
    assert any(line.startswith("trn2: busiest engine") for line in capsys.readouterr().out.splitlines())
    recipe = (
        (Path(__file__).parents[2] / "Makefile").read_text().partition("\ndemo: ")[2].partition("\n\n")[0]
    )
    assert "nkw generate --target trn1 " in recipe


def test_default_model_is_the_shipped_one(capsys) -> None:
    assert PRETRAINED.name == "pretrained"
    assert main(["generate", "--backend", "numpy", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_question_marks(tiny) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "model", "generate", "--backend", "numpy", "--model", tiny, "--prompt", "é"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"?")


@pytest.mark.slow
def test_a_plan_has_question_marks_on_such_a_terminal_too(tmp_path, monkeypatch) -> None:
    named = tmp_path / "größe.json"
    named.write_text((PUBLISHED / "mamba-130m.json").read_text())
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["plan", str(named)]) == 0
    assert b"gr??e.json:" in written.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["generate", "--backend", "numpy"], ["plan"], ["sim", "targets"]])
def test_output_that_cannot_be_written_is_said_in_one_line(tiny, arguments) -> None:
    options = {"generate": ["--model", tiny], "plan": [tiny], "sim": []}[arguments[0]]
    words = [sys.executable, "-m", "model", *arguments, *options]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.removeprefix("nkw: ").startswith("error: the ")
    assert done.stderr.endswith("cannot be written: No space left on device\n")
    assert done.stderr.count("\n") == 1


def test_a_long_prompt_tells_its_layers_without_a_terminal(capsys) -> None:
    for every, lines in (
        (0.0, "prompt: layer 0 of 2\nprompt: layer 1 of 2\nprompt: layer 2 of 2\n"),
        (1e9, ""),
    ):
        show = create_prompt_progress(every)
        for _ in range(2):  # the prompt, and a token
            for done in range(3):
                show(done, 2)
        assert capsys.readouterr() == ("", lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "trn9"], "argument --target: invalid choice: 'trn9'"),
        (["--backend", "gpu"], "argument --backend: invalid choice: 'gpu'"),
        (["--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (["--tp", "0"], "argument --tp: '0' is not a positive whole number"),
        (["--tp", "two"], "argument --tp: 'two' is not a whole number"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens: '0' is not a positive whole number"),
        (["--max-new-tokens", "-3"], "argument --max-new-tokens: '-3' is not a positive whole number"),
        (["--temperature", "-1"], "argument --temperature: '-1' is neither 0 nor a positive number"),
        (["--temperature", "nan"], "argument --temperature: 'nan' is neither 0 nor a positive number"),
        (["--top-k", "0"], "argument --top-k: '0' is not a positive whole number"),
        (["--top-p", "0"], "argument --top-p: '0' is not above 0 and at most 1"),
        (["--top-p", "1.1"], "argument --top-p: '1.1' is not above 0 and at most 1"),
        (["--seed", "-1"], "argument --seed: '-1' is negative"),
        (["--frobnicate"], "there is no option --frobnicate; --help lists the options"),
    ],
)
def test_refuses_an_option_in_one_line(capsys, arguments, message) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.slow
def test_refuses_what_the_model_cannot_do(tiny, capsys, tmp_path) -> None:
    model = ["--model", tiny]
    for option, value in (("--top-k", "40"), ("--top-p", "0.9")):
        for zero in ([], ["--temperature", "0"]):
            assert refused(capsys, *model, option, value, *zero) == (
                f"nkw: error: {option} chooses among candidates, and temperature 0 always takes the most likely one: "
                "give --temperature T as well"
            )
    assert "leaves no room for a new one" in refused(capsys, *model, "--prompt", "x" * 64)
    assert "is not a folder" in refused(capsys, "--model", str(tmp_path / "nowhere"))
    assert "config.json is missing; a model is a" in refused(capsys, "--model", str(tmp_path))
    assert "the prompt is not Unicode text" in refused(capsys, *model, "--prompt", "\udcff")
    unwritable = str(tmp_path / "nowhere" / "file")
    assert f"cannot be written to {unwritable}: No such file" in refused(capsys, *model, "--json", unwritable)
    assert f"cannot be written to {unwritable}: No such file" in refused(
        capsys, *model, "--trace", unwritable
    )
    assert "it is a folder" in refused(capsys, *model, "--json", str(tmp_path))
    same = ["--html", str(tmp_path / "file"), "--json", str(tmp_path / "." / "file")]
    assert "it is the file of the page" in refused(capsys, *model, *same)
    trace = ["--backend", "numpy", "--trace", str(tmp_path / "trace.json")]
    assert "--trace needs the simulate backend" in refused(capsys, *model, *trace)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_prompt_may_fill_the_context_but_for_one_token(tiny, capsys) -> None:
    arguments = ["--model", tiny, "--backend", "numpy", "--prompt", "x" * 62]
    assert main(["generate", *arguments]) == 0
    assert "\n1 token by" in capsys.readouterr().out


def test_neuron_backend_without_its_packages_says_what_is_missing(tiny, capsys, monkeypatch) -> None:
    monkeypatch.setattr("model.device.neuron.installed.has_real_package", lambda: False)
    message = refused(capsys, "--model", tiny, "--backend", "neuron")
    assert message.startswith("nkw: error: the neuron backend needs nki")
    assert "pip install 'nki-workbench[neuron]' with AWS Neuron's package repository configured" in message


def test_refuses_no_command_in_one_line(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "nkw: error: a command is needed: generate, transcribe, imagine, serve, chat, run-batch, quantize, compile, "
        "peer, top, bench, plan, traffic, run, time, memory, check, verify, tune, bundle, compare, lint, doctor, "
        "explain, fidelity, calibrate, targets\n"
    )


def test_sim_hands_over_to_the_simulator(capsys) -> None:
    assert main(["sim", "targets"]) == 0
    assert "trn2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_interrupting_ends_with_130_and_leaves_nothing_behind(write_model, tmp_path, ranks) -> None:
    folder = write_model(max_position_embeddings=4096, eos_token_id=None)
    command = ["generate", "--model", str(folder), "--max-new-tokens", "4000", "--tp", ranks]
    process = started("-m", "model", *command, "--json", str(tmp_path / "out.json"))
    assert process.stdout is not None
    assert process.stdout.read(8) == "Once upo"
    process.send_signal(signal.SIGINT)
    errors = remove_progress(process.communicate()[1])
    assert process.returncode == 130
    last = r"[\d,]+ instructions, the last is \w+ at \S+:\d+ in \w+"
    launch = rf": \w+( on rank \d, core 0,)? has issued (nothing|{last})"
    assert re.fullmatch(rf"\nnkw: interrupted({launch})?\n", errors)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_closed_pipe_is_no_error(tiny) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "model", "generate", "--backend", "numpy", "--model", tiny],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = remove_progress(process.stderr.read())
    assert process.wait() == 0
    assert errors == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    deep_except([["--exact", "--verify-replay"], ["--exact"], [], ["--verify-replay", "--tp", "2"]], 4),
)
def test_every_way_of_replaying_writes_the_same_story(capsys, options) -> None:
    arguments = ["generate", "--max-new-tokens", "4", "--no-check", "--replay-report"]
    assert main(arguments) == 0
    story = capsys.readouterr().out.splitlines()[0]
    assert main([*arguments, *options]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == story
    assert " launches replayed, " in shown


@pytest.mark.parametrize("option", ["--json", "--trace", "--html"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "soft", "hard", "../model/config.json"]
)
def test_no_output_takes_the_place_of_an_input(write_model, capsys, option, name) -> None:
    model = write_model()
    (model / "soft").symlink_to("model.safetensors")
    os.link(model / "tokenizer.json", model / "hard")
    before = {path: path.read_bytes() for path in model.iterdir()}
    message = refused(capsys, "--model", str(model), option, str(model / name))
    assert message.endswith(f"cannot be written to {model / name}: this command reads that file")
    assert {path: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.slow
def test_a_cache_larger_than_the_machine_is_refused_before_it_is_allocated(write_model, capsys) -> None:
    most = 2**31 - 1
    model = str(write_model(max_position_embeddings=most, eos_token_id=None))
    message = refused(capsys, "--model", model, "--max-new-tokens", str(10**12), "--tp", "2")
    assert "a cache of 2,147,483,648 positions on 2 ranks takes 549.8 GB; this machine has" in message
    assert main(["generate", "--model", model, "--max-new-tokens", "1", "--no-check"]) == 0


@pytest.mark.parametrize("backend", ["numpy", "simulate"])
def test_weights_that_overflow_are_named_without_warnings(write_model, capfd, backend) -> None:
    model = write_model()
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= np.float32(1e38)
    safetensors.numpy.save_file(weights, model / "model.safetensors")
    assert main(["generate", "--model", str(model), "--backend", backend]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("nkw: error: the model's largest logit is ")
    assert line.endswith("; its weights are too large or not finite")


def test_the_smallest_temperature_takes_the_likeliest_token(write_model, capfd) -> None:
    words = ["generate", "--model", str(write_model()), "--backend", "numpy", "--max-new-tokens", "4"]
    assert main(words) == 0
    likeliest = capfd.readouterr()
    assert main([*words, "--temperature", "1e-320"]) == 0
    assert capfd.readouterr() == likeliest
    assert likeliest.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["magic", "Simulate"])
def test_a_backend_of_the_environment_that_is_not_known_is_named(tiny, name) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "model", "generate", "--model", tiny],
        cwd=ROOT,
        env={**os.environ, "NKI_BACKEND": name},
        capture_output=True,
        text=True,
        check=False,
    )
    known = "known are auto, simulate, neuron"
    assert (done.returncode, done.stderr) == (2, f"nkw: error: [NKW-BACKEND] NKI_BACKEND={name}; {known}\n")


def test_a_message_of_megabytes_is_cut(capsys) -> None:
    assert len(refused(capsys, "--target", "x" * 1_000_000)) < 500
    assert len(refused(capsys, "--seed", "9" * 1_000_000)) < 500


LONG = "a" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--model", LONG],
        ["serve", "--model", LONG],
        ["serve", "--api-key-file", LONG],
        ["plan", LONG],
        ["traffic", LONG],
        ["peer", LONG, "--with", "transformers-neuronx"],
        ["compile", LONG],
        ["bundle", LONG],
        ["transcribe", LONG, "--model", LONG],
        ["lint", LONG],
        ["run", LONG],
        ["compare", LONG],
    ],
    ids=lambda words: f"{words[0]} {words[1][:20]}",
)
def test_a_path_that_is_too_long_is_refused_in_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as left:
        status = int(left.code or 0)
    stderr = " ".join(capsys.readouterr().err.split())
    assert status == 2
    assert "error: " in stderr and len(stderr) < 1000, stderr[:1000]


@pytest.mark.slow
def test_continuations_of_two_prompts_are_those_of_an_engine(tiny, tmp_path, capsys) -> None:
    """Each has its own random numbers, penalties and form, equal to the reference's choice with the same."""
    results = tmp_path / "out.json"
    words = ["--model", tiny, "--prompt", "ab", "--prompt", "c", "--n", "2", "--max-new-tokens", "4"]
    words += ["--temperature", "1.5", "--seed", "5", "--min-p", "0.01", "--repetition-penalty", "1.5"]
    words += ["--logprobs", "1", "--json", str(results)]
    assert main(["generate", *words]) == 0
    summary = capsys.readouterr().out
    assert "16 of 16 tokens equal to the numpy reference" in summary
    assert "predicted on 1 core for 4 texts" in summary
    generations = json.loads(results.read_text())["generations"]
    assert [generation["prompt"] for generation in generations] == ["ab", "ab", "c", "c"]
    assert len({tuple(generation["generated_ids"]) for generation in generations}) == 4
    for generation in generations:
        chosen = [token[0]["id"] for token in generation["logprobs"]]
        assert chosen == generation["generated_ids"]
    alone = ["--model", tiny, "--prompt", "c", *words[6:]]
    assert main(["generate", *alone]) == 0
    again = json.loads(results.read_text())["generations"]
    assert [generation["generated_ids"] for generation in again] == [
        generation["generated_ids"] for generation in generations[2:]
    ]


def test_logprobs_need_a_document(tiny, capsys) -> None:
    assert main(["generate", "--model", tiny, "--logprobs", "1"]) == 2
    assert "--logprobs are written to --json FILE: give it as well" in capsys.readouterr().err


@pytest.mark.parametrize(("continuations", "taken"), [(64, True), (65, False)])
def test_a_batch_takes_128_texts(tiny, capsys, continuations, taken) -> None:
    words = ["--model", tiny, "--backend", "numpy", "--prompt", "a", "--prompt", "b", "--max-new-tokens", "1"]
    assert main(["generate", *words, "--n", str(continuations)]) == (0 if taken else 2)
    assert ("2 prompts with --n 65; one batch takes 128 texts" in capsys.readouterr().err) is not taken


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("3", "'3' is no JSON object"),
        ('{"x": 1}', "--structured-outputs has an unknown name; give one of json, regex, choice"),
    ],
)
def test_refuses_a_form_that_is_none(tiny, capsys, form, message) -> None:
    try:
        status = main(["generate", "--model", tiny, "--structured-outputs", form])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err
