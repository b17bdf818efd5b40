"""A layer of a model as a bundle: its launches, there and back, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nkw.commands import main
from simulate.bundle.blame import Comparison
from simulate.bundle.manifest import Bundle, Case, load_bundle
from simulate.bundle.values import Agreement
from simulate.cli import main as simulator
from tests.model.folders import write_folder

LAUNCHES = [
    "prefill-1-qkv_projection",
    "prefill-2-attention_prefill",
    "prefill-3-output_projection",
    "prefill-4-mlp",
    "decode-1-decoder_layer_decode",
]
TOKENS = 6


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 of the shipped story model."""
    folder = tmp_path_factory.mktemp("layer") / "bundle"
    words = ["bundle", "stories", "--layer", "1", "--tokens", str(TOKENS), "--target", "trn2"]
    assert main([*words, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of two layers and 64 positions and return its folder."""
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


def load_arguments(folder: Path, case: Case) -> dict[str, np.ndarray]:
    return {argument.name: np.load(folder / argument.file) for argument in case.arguments if argument.file}


def expected(folder: Path, case: Case) -> list[np.ndarray]:
    return [np.load(folder / output.file) for output in case.outputs]


def bundled(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return status and text of `nkw bundle`."""
    try:
        status = main(["bundle", *words])
    except SystemExit as stopped:  # options that cannot be parsed
        status = int(stopped.code or 0)
    captured = capsys.readouterr()
    return status, " ".join((captured.out + captured.err).split())


@pytest.mark.slow
def test_all_launches_of_the_layer_are_cases_in_their_order(layer: Path) -> None:
    bundle = load_bundle(layer)
    assert (bundle.bundle_kind, bundle.target) == ("layer", "trn2")
    assert [case.name for case in bundle.cases] == LAUNCHES
    assert all(output.tolerance is not None for case in bundle.cases for output in case.outputs)


def test_a_launch_is_given_what_those_before_it_return(layer: Path) -> None:
    """Queries, keys and values, the residual, and the caches, which the prompt fills and the token finds filled."""
    bundle = load_bundle(layer)
    arrays = [load_arguments(layer, case) for case in bundle.cases]
    outputs = [expected(layer, case) for case in bundle.cases]
    assert [arrays[1][name].tobytes() for name in "qkv"] == [array.tobytes() for array in outputs[0]]
    assert outputs[1][0].tobytes() in {array.tobytes() for array in arrays[2].values()}
    assert outputs[2][0].tobytes() in {array.tobytes() for array in arrays[3].values()}
    for cache in outputs[1][1:]:
        assert cache.any()
        assert cache.tobytes() in {array.tobytes() for array in arrays[4].values()}
        assert not any(array.any() for array in arrays[1].values() if array.shape == cache.shape)
    for before, after in zip(outputs[1][1:], outputs[4][1:]):  # one position more
        axis = 2 if before.shape[2] > before.shape[3] else 3
        other_axes = tuple(dim for dim in range(4) if dim != axis)
        assert np.flatnonzero((before != after).any(axis=other_axes)).tolist() == [TOKENS]


@pytest.mark.slow
def test_the_weights_are_those_of_the_layer(tiny: Path, tmp_path: Path) -> None:
    import safetensors.numpy

    weights = safetensors.numpy.load_file(tiny / "model.safetensors")
    for number in (0, 1):
        folder = tmp_path / str(number)
        assert main(["bundle", str(tiny), "--layer", str(number), "--tokens", "2", "--out", str(folder)]) == 0
        arrays = load_arguments(folder, load_bundle(folder).cases[0]).values()
        norms = [weights[f"model.layers.{layer}.input_layernorm.weight"].tobytes() for layer in (0, 1)]
        assert [norm in {array.tobytes() for array in arrays} for norm in norms] == [number == 0, number == 1]


@pytest.mark.slow
def test_unchanged_it_comes_back_equal(
    layer: Path, tmp_path: Path, instance: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    carried = Path(shutil.copytree(layer, tmp_path / "carried"))
    done = instance().run(carried)
    assert done.returncode == 0, done.stdout + done.stderr
    assert simulator(["compare", str(carried)]) == 0
    assert capsys.readouterr().out.startswith("all 5 cases are equal (trn2;")


@pytest.mark.slow
def test_a_changed_instruction_is_met_at_the_first_launch_that_uses_it(
    layer: Path, tmp_path: Path, instance: Callable[..., Any], compared: Callable[[Path], Comparison]
) -> None:
    bundle: Bundle = load_bundle(layer)
    assert "reciprocal" not in bundle.cases[0].instructions.ops
    assert "reciprocal" in bundle.cases[1].instructions.ops
    carried = Path(shutil.copytree(layer, tmp_path / "carried"))
    machine = instance(instruction="reciprocal", above=0.0)
    assert machine.run(carried, "--only", *LAUNCHES[:2]).returncode == 0
    first, second, *untried = compared(carried).cases
    assert first.agrees and first.agreement is Agreement.equal
    assert second.agreement is Agreement.wrong
    assert len(untried) == 3


@pytest.mark.slow
def test_the_document_lists_the_launches(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And bfloat16 activations travel, on another chip."""
    words = [str(tiny), "--layer", "0", "--tokens", "2", "--dtype", "bfloat16", "--target", "trn1"]
    assert main(["bundle", *words, "--out", str(tmp_path / "b"), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["left_out"]) == ("bundle", [])
    bundle = load_bundle(tmp_path / "b")
    assert (bundle.target, bundle.digest) == ("trn1", document["digest"])
    assert document["cases"] == [
        {"name": case.name, "lnc": 1, "instructions": case.instructions.count} for case in bundle.cases
    ]
    assert {output.dtype for case in bundle.cases for output in case.outputs} == {"bfloat16"}


@pytest.mark.slow
def test_launches_of_a_layer_have_the_physical_cores_of_the_option_or_the_variable(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of the layer has one launch on one core; two cores divide its attention block and its MLP."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    words = [str(tiny), "--layer", "0", "--tokens", "2", "--target", "trn2", "--out"]
    assert (
        "5 kernel launches for trn2 (LNC 1), "
        in bundled(capsys, *words, str(tmp_path / "one"), "--lnc", "1")[1]
    )
    assert "6 kernel launches for trn2 (LNC 2), " in bundled(capsys, *words, str(tmp_path / "two"))[1]
    one, two = (load_bundle(tmp_path / name) for name in ("one", "two"))
    assert {case.lnc for case in one.cases} == {1}
    assert [(case.name, case.lnc) for case in two.cases[-2:]] == [
        ("decode-1-attention_block_decode", 2),
        ("decode-2-mlp", 2),
    ]
    for before, after in zip(one.cases[:4], two.cases[:4]):
        assert (before.name, after.lnc) == (after.name, 2)
        assert after.instructions.count > before.instructions.count
        assert before.predicted.program_ns != after.predicted.program_ns
    for values_of_one, values_of_two in zip(
        expected(tmp_path / "one", one.cases[3]), expected(tmp_path / "two", two.cases[3])
    ):
        assert np.allclose(values_of_one, values_of_two, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "accepted", "sentence"),
    [
        (["--layer", "2"], ["--layer", "1"], "--layer 2: this model has layers 0 to 1"),
        (["--tp", "2"], ["--tp", "1"], "a bundle holds launches of one rank; leave --tp out"),
        (
            ["--target", "trn1", "--lnc", "2"],
            ["--target", "trn1", "--lnc", "1"],
            "--lnc is 2, physical cores of a rank; on trn1 set it to 1",
        ),
        (
            ["--tokens", "64"],
            ["--tokens", "63"],
            "--tokens 64: this model takes 64 positions, and a token follows the prompt",
        ),
    ],
)
def test_what_a_layer_cannot_be_is_one_sentence(
    words: list[str],
    accepted: list[str],
    sentence: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = [str(tiny), "--layer", "0", "--out", str(tmp_path / "b")]
    assert bundled(capsys, *shared, *words) == (2, f"nkw: error: {sentence}")
    assert not (tmp_path / "b").exists()
    assert bundled(capsys, *shared, *accepted)[0] == 0
    assert (tmp_path / "b" / "run.py").is_file()
    status, text = bundled(capsys, *shared, *accepted)
    assert status == 2 and text.endswith("b exists already; give a new or empty folder")


def wide(folder: Path, width: int) -> Path:
    """Write a model of one layer: its MLP has 6,144 bytes for each column, attention and norms 3,149,824."""
    changes = {"hidden_size": 512, "intermediate_size": width, "num_hidden_layers": 1}
    return write_folder(folder / "wide", **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "travel"), [(789, True), (790, False)])
def test_weights_of_up_to_eight_megabytes_travel(
    width: int, travel: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = wide(tmp_path, width)
    words = [str(folder), "--layer", "0", "--tokens", "2", "--out", str(tmp_path / "b")]
    status, text = bundled(capsys, *words)
    assert status == 0 and ("--weights FOLDER" in text) == (not travel)
    bundle = load_bundle(tmp_path / "b")
    assert (bundle.weights is None) == travel
    argument_kinds = {argument.argument_kind for case in bundle.cases for argument in case.arguments}
    assert ("weight" in argument_kinds) == (not travel)
    size = sum(path.stat().st_size for path in (tmp_path / "b").rglob("*") if path.is_file())
    assert (size > 8_000_000) == travel


@pytest.mark.slow
def test_a_larger_layer_takes_its_weights_from_the_models_folder(
    tmp_path: Path, instance: Callable[..., Any], compared: Callable[[Path], Comparison]
) -> None:
    folder, carried = wide(tmp_path, 1100), tmp_path / "b"
    assert main(["bundle", str(folder), "--layer", "0", "--tokens", "2", "--out", str(carried)]) == 0
    machine = instance()
    done = machine.run(carried)
    assert done.returncode == 1 and "the weights are missing: give --weights FOLDER" in done.stdout
    assert machine.run(carried, "--weights", str(folder)).returncode == 0
    seen = compared(carried)
    assert seen.agrees and {case.agreement for case in seen.cases} == {Agreement.equal}


@pytest.mark.slow
def test_a_layer_of_a_config_alone_has_drawn_weights(
    tmp_path: Path, instance: Callable[..., Any], compared: Callable[[Path], Comparison]
) -> None:
    """They are drawn again there; of another seed, or by another generator, they would have another digest."""
    folder, carried = tmp_path / "config", tmp_path / "b"
    folder.mkdir()
    shutil.copy(wide(tmp_path, 1100) / "config.json", folder)
    assert main(["bundle", str(folder), "--layer", "0", "--tokens", "129", "--out", str(carried)]) == 2
    assert main(["bundle", str(folder), "--layer", "0", "--tokens", "3", "--out", str(carried)]) == 0
    bundle = load_bundle(carried)
    assert bundle.weights is not None and bundle.weights.drawn and not bundle.weights.files
    assert sum(path.stat().st_size for path in carried.rglob("*") if path.is_file()) < 2_500_000
    machine = instance()
    assert machine.run(carried).returncode == 0
    seen = compared(carried)
    assert seen.agrees and {case.agreement for case in seen.cases} == {Agreement.equal}
    manifest = json.loads((carried / "bundle.json").read_text())
    manifest["weights"]["drawn"][0]["seed"] += 1
    (carried / "bundle.json").write_text(json.dumps(manifest))
    assert machine.run(carried, "--only", bundle.cases[0].name).returncode == 1
    (case,) = json.loads((carried / "result" / "result.json").read_text())["cases"]
    assert case["stage"] == "compile" and "as it is made here, not" in case["error"]["message"]


def test_a_folder_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = bundled(capsys, str(tmp_path / "none"), "--layer", "0", "--out", str(tmp_path / "b"))
    assert status == 2 and text.startswith("nkw: error: ") and "none" in text
    assert not (tmp_path / "b").exists()


def test_a_kernel_goes_to_the_command_of_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a folder that is not there, without the number of a layer, to that of kernels too."""
    words = ["nki_kernels:matmul", "f32[8,64]", "f32[64,8]", "--target", "trn2", "--out", str(tmp_path / "b")]
    assert bundled(capsys, *words)[0] == 0
    assert load_bundle(tmp_path / "b").bundle_kind == "kernels"
    status, text = bundled(capsys, "none", "--out", str(tmp_path / "c"))
    assert status == 2 and "none names no kernel" in text
