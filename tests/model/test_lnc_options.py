"""Physical cores of a rank in predictions: `--lnc` of commands, `LLM(lnc=…)`, and the variable that is the default."""

from __future__ import annotations

import json
from io import BytesIO
from typing import NoReturn

import pytest

from model import LLM, EngineArgs, SamplingParams
from model.commands.top.command import format_metrics, read
from model.errors import ModelError
from model.families import load_config
from model.llm.prediction import Deployment, StepPredictor
from model.loading.shipped import PRETRAINED
from model.plan.predict import Predictor
from nkw.commands import main
from tests.model.folders import write_folder
from tests.step_shapes import decode_shape

LNC = "NEURON_LOGICAL_NC_CONFIG"
CHIP_COMMANDS = {
    "generate": ["generate"],
    "serve": ["serve"],
    "compile": ["compile", "stories", "--list"],
    "bundle": ["bundle", "stories", "--layer", "0", "--out", "never"],
    "transcribe": ["transcribe", "speech.wav", "--model", "absent"],
    "peer": ["peer", "absent", "--with", "transformers-neuronx"],
}
"""Commands whose predictions are of a chip, `--target`; plan and traffic, which have instances, default to LNC 2."""
DEPLOYMENT = Deployment(PRETRAINED, "trn2", 1, 1, 1, "auto", 256, {None: 16}, 16)


@pytest.mark.parametrize("command", CHIP_COMMANDS)
@pytest.mark.parametrize(
    ("variable", "words", "sentence"),
    [
        ("1", ["--lnc", "2"], "--lnc is 2, physical cores of a rank; on trn1 set it to 1"),
        ("2", [], f"{LNC} is 2, physical cores of a rank; on trn1 set it to 1"),
        ("3", [], f"{LNC} is '3'; a rank has 1 or 2 physical cores: set it to one of these, or unset it"),
    ],
)
def test_commands_refuse_physical_cores_that_the_chip_does_not_have(
    capsys, monkeypatch, command, variable, words, sentence
) -> None:
    monkeypatch.setenv(LNC, variable)
    assert main([*CHIP_COMMANDS[command], "--target", "trn1", *words]) == 2
    assert capsys.readouterr().err == f"nkw: error: {sentence}\n"


@pytest.mark.parametrize("words", [["plan"], ["traffic", "--users", "1"]])
def test_the_variable_is_the_default_of_commands_with_an_instance(
    capsys, tmp_path, monkeypatch, words
) -> None:
    monkeypatch.setenv(LNC, "2")
    command, *more = words
    config = write_folder(tmp_path / "model", max_position_embeddings=2048) / "config.json"
    assert main([command, str(config), "--instance", "trn1.2xlarge", *more]) == 2
    sentence = f"{LNC} is 2, physical cores of a rank; on trn1 set it to 1"
    assert capsys.readouterr().err == f"nkw: error: {sentence}\n"


@pytest.mark.parametrize("command", ["generate", "transcribe"])
def test_a_backend_without_predictions_does_not_read_the_variable(capsys, monkeypatch, command) -> None:
    monkeypatch.setenv(LNC, "3")
    words = {"generate": [], "transcribe": ["speech.wav"]}[command]
    assert main([command, *words, "--model", "absent", "--backend", "numpy"]) == 2
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "words", "lnc"), [("2", [], 2), ("2", ["--lnc", "1"], 1)])
def test_generate_prints_the_physical_cores_of_its_predictions(
    capsys, tmp_path, monkeypatch, variable, words, lnc
) -> None:
    monkeypatch.setenv(LNC, variable)
    folder, file = write_folder(tmp_path / "model"), tmp_path / "generate.json"
    arguments = ["--model", str(folder), "--max-new-tokens", "2", "--no-check", "--json", str(file)]
    assert main(["generate", *arguments, *words]) == 0
    table = capsys.readouterr().out
    assert f"trn2 (LNC {lnc})" in table and "trn1 (LNC 1)" in table
    predictions = json.loads(file.read_text())["predictions"]
    assert predictions["trn2"]["per_token"]["lnc"] == lnc


@pytest.mark.parametrize(
    ("variable", "words", "lnc"),
    [(None, [], 1), ("2", [], 2), ("2", ["--lnc", "1"], 1), (None, ["--lnc", "2"], 2)],
)
def test_serve_says_at_its_start_which_physical_cores_it_predicts(
    caplog, monkeypatch, variable, words, lnc
) -> None:
    monkeypatch.delenv(LNC, raising=False)
    if variable is not None:
        monkeypatch.setenv(LNC, variable)

    def stop(args: EngineArgs) -> NoReturn:
        assert (args.lnc or lnc) == lnc
        raise ModelError("the port is not opened")

    monkeypatch.setattr("model.commands.serve.command.make_engine", stop)
    monkeypatch.setattr("model.serve.log.log_to_stderr", lambda level: None)  # it would stay for other tests
    caplog.set_level("INFO", "nkw.serve")
    assert main(["serve", *words]) == 2
    assert f"the predicted clock is that of trn2 (LNC {lnc})" in caplog.messages


def test_a_bundled_generation_has_one_physical_core(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(LNC, "2")
    words = [
        "bundle",
        str(write_folder(tmp_path / "model")),
        "--max-new-tokens",
        "1",
        "--out",
        str(tmp_path / "b"),
    ]
    assert main(words) == 2
    assert (
        "2 physical cores of a rank: the launches of a generation run in one process"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("variable", "lnc", "chosen"), [(None, None, 1), ("2", None, 2), ("2", 1, 1)])
def test_llm_predicts_its_steps_on_the_physical_cores_of_lnc(
    tmp_path, monkeypatch, variable, lnc, chosen
) -> None:
    monkeypatch.delenv(LNC, raising=False)
    if variable is not None:
        monkeypatch.setenv(LNC, variable)
    folder = write_folder(tmp_path / "model")
    llm = LLM(folder, lnc=lnc, max_num_seqs=2)
    llm.generate("Tom", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    prediction, cache = llm.predict_steps(), llm.engine.scheduler.cache
    predictor = Predictor(load_config(folder), "trn2", 1, "float32", 64, lnc=chosen)
    step = predictor.make_paged_step({None: cache.pages}, cache.block_size)
    expected_ns = sum(
        count * predictor.predict_paged(step.resize(shape.sizes)).time.program_ns
        for shape, count in llm.engine.use.steps.items()
    )
    assert prediction.seconds == pytest.approx(1e-9 * expected_ns)
    assert str(prediction) == f"{expected_ns / 1e6:,.3f} ms on trn2 (LNC {chosen})"


@pytest.mark.parametrize(
    ("lnc", "target", "sentence"),
    [
        (2, "trn1", "--lnc is 2, physical cores of a rank; on trn1 set it to 1"),
        (3, "trn2", "--lnc is 3, physical cores of a rank; on trn2 set it to 1 or 2"),
        (2.5, "trn2", "lnc is 2.5; it must be a whole number"),
    ],
)
def test_llm_refuses_physical_cores_that_the_chip_does_not_have(lnc, target, sentence) -> None:
    with pytest.raises(ModelError) as refusal:
        LLM(lnc=lnc, target=target)
    assert str(refusal.value) == sentence


def test_steps_that_verify_drafts_are_not_predicted() -> None:
    predictor = StepPredictor(DEPLOYMENT)
    verify, decode = decode_shape(1, 4, 128), decode_shape(1, 1, 128)
    assert predictor.predict(verify.sizes) is None
    seconds = predictor.predict(decode.sizes)
    assert seconds is not None and seconds > 0
    both = predictor.add_up({verify: 3, decode: 2})
    assert (both.seconds, both.unpredicted) == (2 * seconds, 3)
    assert str(both) == f"{2e3 * seconds:,.3f} ms on trn2 (LNC 1), without 3 parts of steps"


def test_top_names_the_chip_and_its_physical_cores(monkeypatch) -> None:
    target = 'model_name="m",target="trn2",lnc="2"'
    samples_of_two_replicas = (
        'nkw_steps_total{model_name="m"} 4\n'
        f'nkw_predicted_step_seconds_total{{{target},replica="0"}} 0.001\n'
        f'nkw_predicted_step_seconds_total{{{target},replica="1"}} 0.003\n'
        f'nkw_unpredicted_step_parts{{{target},replica="0"}} 1\n'
    )
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda request, timeout: BytesIO(samples_of_two_replicas.encode())
    )
    samples = read("http://127.0.0.1:8000", [])
    lines = format_metrics(samples, samples, 0.0).splitlines()
    assert "predicted clock   1.00 ms a step on trn2 (LNC 2), without 1 parts" in lines
