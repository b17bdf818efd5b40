"""A model as a bundle: a generation, there and back; what goes wrong on the way is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model.loading.shipped import PRETRAINED, find_model_path
from nkw.commands import main
from simulate.bundle import chain
from simulate.bundle.blame import Comparison
from simulate.bundle.manifest import Bundle, load_bundle
from simulate.bundle.values import Agreement
from simulate.cli import main as simulator
from tests.model.folders import write_folder
from tests.model.test_scaled_weights import SCHEMES, quantised

Make = Callable[..., Any]
Compared = Callable[[Path], Comparison]
WEIGHTS = ("--weights", str(PRETRAINED))
LAYERS = 6
PROMPT_LAUNCHES = 4  # of a layer; a token's layer is one launch


def bundled(folder: Path, *words: str) -> Path:
    assert main(["bundle", *words, "--target", "trn2", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokens of the shipped story model."""
    return bundled(tmp_path_factory.mktemp("model") / "bundle", "stories", "--max-new-tokens", "2")


@pytest.fixture
def taken(generation: Path, tmp_path: Path) -> Path:
    """Copy the bundle of a generation, as it arrives on an instance, and return the copy's folder."""
    return Path(shutil.copytree(generation, tmp_path / "taken"))


def result_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "result" / "result.json").read_text())
    return document


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the sentence for which nothing is bundled."""
    try:
        status = main(["bundle", *words])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    captured = capsys.readouterr()
    assert status == 2 and captured.out == "", captured
    return " ".join(captured.err.split())


# -- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_launch_of_every_step_is_a_case_in_order(generation: Path) -> None:
    bundle = load_bundle(generation)
    assert (bundle.bundle_kind, bundle.target) == ("model", "trn2")
    names = [case.name for case in bundle.cases]
    assert len(names) == 2 + LAYERS * PROMPT_LAUNCHES + 2 + LAYERS
    assert names[:2] == ["p1-t1-embedding-embedding", "p1-t1-layer-0-qkv_projection"]
    assert names[-2:] == ["p1-t2-layer-5-decoder_layer_decode", "p1-t2-head-lm_head"]
    assert {case.model_part for case in bundle.cases} == {
        "embedding",
        "head",
        *(f"layer {n}" for n in range(6)),
    }
    assert all(
        output.tolerance for case in bundle.cases for output in case.outputs if output.dtype != "int32"
    )


@pytest.mark.slow
def test_tokens_are_those_that_the_model_generates(
    generation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "Once upon a time", "--max-new-tokens", "2", "--json", "-"]) == 0
    (sequence,) = json.loads(capsys.readouterr().out)["generations"]
    generated = load_bundle(generation).generated
    assert generated is not None
    assert list(generated.prompts[0].ids) == sequence["prompt_ids"]
    assert [step.token for step in generated.steps] == sequence["generated_ids"]


def test_weights_stay_behind(generation: Path) -> None:
    """The largest array that travels is a table or an output; the model has 4.6 million weights."""
    files = [path for path in generation.rglob("*") if path.is_file() and path.suffix != ".py"]
    sizes = {path: path.stat().st_size for path in files}
    assert sum(sizes.values()) < PRETRAINED.joinpath("model.safetensors").stat().st_size / 8
    assert not [path for path in sizes if path.suffix == ".safetensors"]


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_unchanged_it_comes_back_equal(
    taken: Path, instance: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    done = instance().run(taken, *WEIGHTS)
    assert done.returncode == 0, done.stdout + done.stderr
    capsys.readouterr()
    assert simulator(["compare", str(taken)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("all 34 launches are equal (trn2; instance unknown, launcher nki, nki 0.7.0)")
    assert "prompt 1: 2 of 2 tokens are equal" in out and "likely" not in out
    result = result_of(taken)
    assert {case["inputs"] for case in result["cases"]} == {"expected"}
    assert not (taken / "result" / "values").exists()  # equal values need not travel


@pytest.mark.slow
def test_the_first_wrong_launch_of_a_changed_instruction_is_named(
    taken: Path, instance: Make, compared: Compared, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launches with it are wrong; those without it are right, also behind wrong ones, as their inputs are mended."""
    bundle = load_bundle(taken)
    assert instance(instruction="reciprocal", above=0.0).run(taken, *WEIGHTS).returncode == 0
    seen = compared(taken)
    wrong = {case.case.name for case in seen.cases if case.agreement is Agreement.wrong}
    using = {case.name for case in bundle.cases if "reciprocal" in case.instructions.ops}
    assert wrong == using and wrong
    assert {case.agreement for case in seen.cases} == {Agreement.wrong, Agreement.equal}
    first = next(case.name for case in bundle.cases if case.name in using)
    assert first == "p1-t1-layer-0-attention_prefill"
    assert simulator(["compare", str(taken)]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert f"prompt 1, token 1, layer 0: {first} output-0 is wrong: first tile (0, 0)" in words
    assert "7 more launches differ" in words
    (likely,) = seen.likely
    assert (likely.rule, likely.cases[0]) == (6, first) and "reciprocal" in likely.why


@pytest.mark.slow
def test_rounding_is_carried_on_and_not_blamed(taken: Path, instance: Make, compared: Compared) -> None:
    """A square that is off by a little: within the bound of each launch, beyond it where launches add up."""
    assert instance(instruction="nc_matmul", above=0.0, times=1 + 1e-5).run(taken, *WEIGHTS).returncode == 0
    seen = compared(taken)
    results = [case.result for case in seen.cases if case.result is not None]
    assert {case.inputs for case in results} == {"expected", "own"}
    assert not [case.case.name for case in seen.cases if case.agreement is Agreement.wrong]
    assert any(case.drift for case in results)
    assert all(step.agrees for step in seen.steps)


@pytest.mark.slow
def test_a_crash_in_the_middle_loses_one_launch(taken: Path, instance: Make, compared: Compared) -> None:
    """Another process goes on behind it; what crashes twice is left out from then on."""
    assert instance(crash="mlp").run(taken, *WEIGHTS).returncode == 1
    result = result_of(taken)
    assert len(result["cases"]) == 34 and result["finished"] is not None
    mlp_cases = [case for case in result["cases"] if case["name"].endswith("-mlp")]
    assert [case["status"] for case in mlp_cases] == ["failed"] * 2 + ["skipped"] * 4
    assert mlp_cases[0]["error"] == {"type": "Crash", "message": "ended by SIGSEGV"}
    assert mlp_cases[2]["error"]["message"] == "mlp with arguments of these shapes ended 2 processes before"
    other_cases = [case for case in compared(taken).cases if case.case.kernel != "mlp"]
    assert {case.agreement for case in other_cases} == {Agreement.equal}


@pytest.mark.slow
def test_a_kernel_that_the_compiler_refuses_loses_its_launches(
    taken: Path, instance: Make, compared: Compared
) -> None:
    assert instance(refuse="output_projection").run(taken, *WEIGHTS).returncode == 1
    seen = compared(taken)
    failed = [case.case.kernel for case in seen.cases if not case.ran]
    assert failed == ["output_projection"] * LAYERS
    assert all(case.agreement is Agreement.equal for case in seen.cases if case.ran)
    assert [step.token for step in seen.steps] == [step.step.token for step in seen.steps]
    (likely,) = seen.likely
    assert (likely.rule, likely.cases) == (4, ("p1-t1-layer-0-output_projection",))


@pytest.mark.slow
def test_a_launch_that_hangs_is_ended(taken: Path, instance: Make) -> None:
    words = (*WEIGHTS, "--timeout", "5", "--only", "p1-t1-layer-0-mlp", "p1-t1-layer-1-qkv_projection")
    assert instance(hang="mlp").run(taken, *words).returncode == 1
    first, second = result_of(taken)["cases"]
    assert first["error"] == {"type": "Timeout", "message": "ended after 5 s"}
    assert second["status"] == "ran"


@pytest.mark.slow
def test_times_of_programs_come_from_the_device(taken: Path, instance: Make, compared: Compared) -> None:
    names = ("p1-t1-layer-0-mlp", "p1-t1-layer-1-mlp")
    done = instance().run(taken, *WEIGHTS, "--no-profile", "--only", *names, on_device=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = result_of(taken)["cases"]
    assert (first["times"]["clock"], second["times"]["clock"]) == ("device", "host")
    seen = {case.case.name: case for case in compared(taken).tried}
    assert seen[names[0]].inside is True and seen[names[1]].inside is None


@pytest.mark.slow
def test_large_outputs_are_compared_by_digests_and_are_lost_with_their_launch(
    tmp_path: Path, instance: Make, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as an output has are still values, one less and it has digests."""
    folder = write_folder(tmp_path / "tiny", num_hidden_layers=1)
    hidden = 3 * 32 * 4  # bytes of three rows of 32 columns: the token that begins a text, and two bytes
    has_file = {}
    for limit in (hidden, hidden - 1):
        monkeypatch.setattr(chain, "MOST_OUTPUT_BYTES", limit)
        words = (str(folder), "--prompt", "ab", "--max-new-tokens", "2")
        bundle = load_bundle(bundled(tmp_path / f"b{limit}", *words))
        has_file[limit] = {
            case.name: bool(case.outputs[0].file) for case in bundle.cases if case.outputs[0].shape == (3, 32)
        }
    assert has_file[hidden] and all(has_file[hidden].values()) and not any(has_file[hidden - 1].values())
    weights = ("--weights", str(folder))
    machine = instance(crash="attention_prefill")
    assert machine.run(tmp_path / f"b{hidden - 1}", *weights).returncode == 1
    results = {case["name"]: case for case in result_of(tmp_path / f"b{hidden - 1}")["cases"]}
    assert len(results) == len(bundle.cases)
    lost = results["p1-t1-layer-0-output_projection"]
    assert lost["status"] == "skipped"
    assert lost["error"]["message"] == (
        "it takes an output of p1-t1-layer-0-attention_prefill, which was lost there and is not stored in the bundle"
    )
    seen = {case.case.name: case for case in compared(tmp_path / f"b{hidden - 1}").cases}
    assert seen["p1-t1-embedding-embedding"].agreement is Agreement.equal
    assert results["p1-t2-embedding-embedding"]["status"] == "ran"


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_the_right_weights_there_is_one_sentence(
    taken: Path, tmp_path: Path, instance: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = instance()
    (tmp_path / "empty").mkdir()
    changed = tmp_path / "changed"
    shutil.copytree(PRETRAINED, changed)
    content = bytearray((changed / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (changed / "model.safetensors").write_bytes(content)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "model.safetensors").write_bytes(content[:-1])
    tries = {
        (): "the weights are missing: give --weights FOLDER, the folder that holds model.safetensors",
        ("--weights", str(tmp_path / "none")): f"--weights {tmp_path / 'none'} is no folder",
        ("--weights", str(tmp_path / "empty")): "model.safetensors cannot be read: No such file or directory",
        ("--weights", str(tmp_path / "short")): "it has 9,187,727 bytes, that of the bundle 9,187,728",
        ("--weights", str(changed)): "is not the file that the bundle was made with: its SHA-256 is ",
    }
    for words, sentence in tries.items():
        done = machine.run(taken, *words)
        assert done.returncode == 1 and sentence in done.stdout, done.stdout + done.stderr
        assert done.stderr == "" and len(done.stdout.splitlines()) == 2
        assert simulator(["compare", str(taken)]) == 1
        assert f"nothing ran: {sentence}"[:40] in " ".join(capsys.readouterr().out.split()) or words


# -- other models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experts_come_back_equal(tmp_path: Path, instance: Make, compared: Compared) -> None:
    """Two prompts of different lengths, and bfloat16 activations."""
    words = ["stories-moe", "--max-new-tokens", "2", "--dtype", "bfloat16"]
    folder = bundled(tmp_path / "b", *words, "--prompt", "Once upon", "--prompt", "The little dog ran")
    done = instance().run(folder, "--weights", str(find_model_path("stories-moe")))
    assert done.returncode == 0, done.stdout + done.stderr
    seen = compared(folder)
    assert seen.agrees and {case.agreement for case in seen.cases} == {Agreement.equal}
    assert [(step.step.prompt, step.step.number) for step in seen.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.slow
def test_weights_are_rounded_as_the_loader_rounds_them(
    tmp_path: Path, instance: Make, compared: Compared
) -> None:
    """Those in float32 beside bfloat16 activations, in two files."""
    folder = write_folder(tmp_path / "tiny", num_hidden_layers=1)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    names = sorted(tensors)
    names_by_file = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, file_names in names_by_file.items():
        safetensors.numpy.save_file({name: tensors[name] for name in file_names}, folder / file)
    where = {name: file for file, file_names in names_by_file.items() for name in file_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "model.safetensors").unlink()
    bundle = bundled(tmp_path / "b", str(folder), "--max-new-tokens", "1", "--dtype", "bfloat16")
    loaded: Bundle = load_bundle(bundle)
    assert loaded.weights is not None
    assert [file.name for file in loaded.weights.files] == ["one.safetensors", "two.safetensors"]
    assert {operand.dtype for operand in loaded.weights.operands} == {"bfloat16"}
    assert instance().run(bundle, "--weights", str(folder)).returncode == 0
    assert compared(bundle).agrees


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stories", "--tp", "2"], "a bundle holds launches of one rank; leave --tp out"),
        (["stories", "--tokens", "2"], "--tokens goes with --layer"),
        (["stories", "--layer", "0", "--prompt", "a"], "--prompt goes without --layer"),
        (["stories", "--layer", "0", "--max-new-tokens", "1"], "--max-new-tokens goes without --layer"),
        (["stories", "--prompt", "a " * 300], "the context of 256 leaves no room for a new one"),
    ],
)
def test_what_cannot_be_bundled_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, *words, "--out", str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_weights_that_are_computed_when_they_are_loaded_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of eight bits with scales; the same model with bfloat16 ones is accepted."""
    folder = write_folder(tmp_path / "tiny", num_hidden_layers=1, torch_dtype="bfloat16")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    stored, plain = quantised(tensors, "blocks", bfloat16, np.dtype(np.float32))
    words = (str(folder), "--prompt", "a", "--max-new-tokens", "1", "--out")
    safetensors.numpy.save_file(plain, folder / "model.safetensors")
    assert main(["bundle", *words, str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SCHEMES["blocks"][0]
    (folder / "config.json").write_text(json.dumps(config))
    sentence = refusal(capsys, *words, str(tmp_path / "b"))
    assert "cannot be bundled" in sentence and not (tmp_path / "b").exists()


INTEGERS = "int-quantized"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "target"),
    [
        ("a scale for each tensor", "trn2"),
        ("a scale for each tensor", "trn3"),
        ("compressed, channel", "trn2"),
        (INTEGERS, "trn2"),
    ],
)
def test_weights_of_8_bits_are_read_from_the_files_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, target: str
) -> None:
    """An instance of trn2 halves elements of e4m3fn and doubles scales as the loader does; recipes are compared."""
    folder = write_folder(tmp_path / "tiny", num_hidden_layers=1, torch_dtype="bfloat16")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    stored, _ = quantised(tensors, scheme, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SCHEMES[scheme][0]
    (folder / "config.json").write_text(json.dumps(config))
    out = tmp_path / "b"
    words = (
        "--dtype",
        "bfloat16",
        "--prompt",
        "a",
        "--max-new-tokens",
        "2",
        "--target",
        target,
        "--out",
        str(out),
    )
    assert main(["bundle", str(folder), *words]) == 0
    weights = load_bundle(out).weights
    assert weights is not None
    operands = {operand.name: operand for operand in weights.operands}
    scales = {name for name in operands if name.endswith("_scales")}
    assert {"layers.0.mlp.w_up_scales", "layers.0.attention.w_qkv_scales"} <= scales
    is_integer = scheme == INTEGERS
    fp8 = "float8_e4m3fn" if target == "trn3" else "float8_e4m3"
    assert operands["layers.0.mlp.w_up"].dtype == ("int8" if is_integer else fp8)
    inputs = {f"layers.0.mlp.w_{name}_input_scale" for name in ("gate", "up", "down")}
    assert {name for name in operands if name.endswith("_input_scale")} == (
        inputs if scheme == "a scale for each tensor" else set()
    )
    scaled = [operand for name, operand in operands.items() if name.endswith(("_scales", "_input_scale"))]
    assert {operand.factor for operand in scaled} == {2.0 if fp8 == "float8_e4m3" and not is_integer else 1.0}
