"""`nkw quantize`: folders that the loader reads back, the report, and input that is refused with nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import model.quantize.folder as folders
from model.commands.options.quantisation import SCHEMES as NAMES
from model.families import compose, load_config
from model.formats import QuantisedWeight
from model.loading.checkpoint import open_checkpoint
from model.quantize.schemes import SCHEMES
from model.quantize.step_times import StepTimes
from nkw.commands import main
from tests.interruptible import started
from tests.model.folders import load, write_folder
from tests.quantize.quantised import widen_all

FILE = "model.safetensors"
TEXT = "\n<|endoftext|>\n".join(
    f"Once upon a time there were {number} cats. They ran." for number in range(12)
)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a tiny Llama in bfloat16 whose matrices have whole groups of 32 columns."""
    return write_folder(tmp_path / "model", dtype=BFLOAT16, intermediate_size=64, torch_dtype="bfloat16")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the predicted steps out, which take most of the time of a tiny model."""
    steps = StepTimes(64, 1, "bfloat16", (), "left out")
    monkeypatch.setattr("model.commands.quantize.command.predict_steps", lambda *arguments: steps)


def quantize(model: Path, scheme: str, *words: str, out: str = "out") -> tuple[int, Path]:
    """Run the command with an output folder beside the model; return its status and the folder."""
    target = model.parent / out
    return main(["quantize", str(model), "--scheme", scheme, "--out", str(target), *words]), target


def refuse(capsys: Capture, model: Path, scheme: str, *words: str) -> str:
    """Return the one line of a refused command, which must leave nothing behind."""
    before = sorted(model.parent.rglob("*"))
    try:
        status, _ = quantize(model, scheme, *words)
    except SystemExit as exit:
        status = exit.code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("memory: ")]
    assert status == 2 and len(lines) == 1 and sorted(model.parent.rglob("*")) == before
    return lines[0]


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / FILE)


def test_options_name_all_schemes() -> None:
    assert tuple(SCHEMES) == NAMES


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", SCHEMES)
def test_the_loader_reads_what_was_written(model: Path, text: Path, capsys: Capture, name: str) -> None:
    """Every weight has the numbers of its rounding, and a second run writes equal bytes."""
    status, out = quantize(model, name, "--calibration", str(text))
    assert status == 0 and not list(model.parent.glob(".*"))
    config = load_config(out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows are not rounded by kernels, which the loader says
        weights = dict(open_checkpoint(out, config))
    original = open_checkpoint(model, load_config(model))
    quantised = {key for key, weight in weights.items() if isinstance(weight, QuantisedWeight)}
    assert quantised == {key for key in original if key.endswith("proj.weight")}
    expected = widen_all(model, name, text)
    for key, weight in weights.items():
        wide = weight.astype(np.float32) if key in quantised else weight
        # bitsandbytes stores 127 times the scale, whose rounding may change the scale by 2^-23 of it.
        tolerance = 2.0**-22 * np.abs(expected[key]) if name == "llm-int8" else 0
        assert (np.abs(np.asarray(wide).astype(np.float32) - expected[key]) <= tolerance).all(), key
    folded = {
        key
        for key in weights
        if not np.array_equal(expected[key], np.asarray(original[key]).astype(np.float32))
    } - quantised
    assert (folded != set()) == (name in ("awq", "smoothquant")) and all("norm" in key for key in folded)
    assert not (out / "model.safetensors.index.json").exists() and (out / "tokenizer.json").exists()
    if name == "smoothquant":
        again = quantize(model, name, "--calibration", str(text), out="again")[1]
        assert (again / FILE).read_bytes() == (out / FILE).read_bytes()
        assert (again / "config.json").read_text() == (out / "config.json").read_text()
    assert config.quant_method == ("bitsandbytes" if name == "llm-int8" else "compressed-tensors")
    assert f"{name}: 14 linear weights" in " ".join(capsys.readouterr().out.split())


STORED: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "int8": {"_packed": ("I32", (64, 8)), "_scale": ("BF16", (64, 1)), "_shape": ("I64", (2,))},
    "w8a8": {"": ("I8", (64, 32)), "_scale": ("BF16", (64, 1))},
    "fp8": {"": ("F8_E4M3", (64, 32)), "_scale": ("BF16", (64, 1))},
    "int4": {"_packed": ("I32", (64, 4)), "_scale": ("BF16", (64, 1)), "_shape": ("I64", (2,))},
    "awq": {"_packed": ("I32", (64, 4)), "_scale": ("BF16", (64, 1)), "_shape": ("I64", (2,))},
    "gptq": {"_packed": ("I32", (64, 4)), "_scale": ("BF16", (64, 1)), "_shape": ("I64", (2,))},
    "mxfp8": {"": ("F8_E4M3", (64, 32)), "_scale": ("U8", (64, 1))},
    "mxfp4": {"_packed": ("U8", (64, 16)), "_scale": ("U8", (64, 1))},
}


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("name", STORED)
def test_tensors_have_the_names_of_compressed_tensors(model: Path, text: Path, name: str) -> None:
    status, out = quantize(model, name, "--calibration", str(text))
    prefix = "model.layers.1.mlp.up_proj.weight"
    with safetensors.safe_open(out / FILE, framework="np") as file:
        slices = {key: file.get_slice(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
        stored = {
            key.removeprefix(prefix): (tensor.get_dtype(), tuple(tensor.get_shape()))
            for key, tensor in slices.items()
        }
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert status == 0 and stored == STORED[name] and config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.usefixtures("fast")
def test_llm_int8_has_the_tensors_of_bitsandbytes(model: Path, text: Path) -> None:
    """Row maxima, and the columns whose inputs exceed 6 in the calibration text."""
    norm = read_tensors(model)
    norm["model.layers.0.input_layernorm.weight"][3] = 100
    safetensors.numpy.save_file(norm, model / FILE)
    status, out = quantize(model, "llm-int8", "--calibration", str(text))
    tensors, original = read_tensors(out), norm["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
    module = "model.layers.0.self_attn.q_proj."
    assert status == 0 and tensors[module + "weight"].dtype == np.int8
    np.testing.assert_allclose(tensors[module + "SCB"], np.abs(original).max(axis=1), rtol=1e-6)
    wide = tensors[module + "weight"] * tensors[module + "SCB"][:, None] / 127
    assert (np.abs(wide - original) <= tensors[module + "SCB"][:, None] / 253).all()
    outliers = json.loads((out / "outlier_columns.json").read_text())
    assert 3 in outliers["columns"][module[:-1]] and outliers["threshold"] == 6.0


@pytest.mark.usefixtures("fast")
def test_shards_keep_their_files(model: Path) -> None:
    tensors = read_tensors(model)
    names = sorted(tensors)
    members_by_file = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    (model / FILE).unlink()
    for file, members in members_by_file.items():
        safetensors.numpy.save_file({name: tensors[name] for name in members}, model / file)
    index = {"weight_map": {name: file for file, members in members_by_file.items() for name in members}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    status, out = quantize(model, "fp8")
    assert status == 0 and {path.name for path in out.glob("*.safetensors")} == set(members_by_file)
    assert len(load(out)[1]) == len(tensors)


@pytest.mark.usefixtures("fast")
def test_ignored_modules_stay_plain(model: Path) -> None:
    status, out = quantize(
        model, "int8", "--ignore", "re:.*down_proj", "--ignore", "model.layers.0.mlp.up_proj"
    )
    _, weights = load(out)
    plain = {name for name, weight in weights.items() if not isinstance(weight, QuantisedWeight)}
    assert status == 0 and {name for name in plain if "proj" in name} == {
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    }
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {"lm_head", *(name.removesuffix(".weight") for name in plain if "proj" in name)}


def test_the_report_has_the_runs_that_the_scheme_has(model: Path, text: Path, tmp_path: Path) -> None:
    """Losses of the original do not depend on the scheme, and a cache is measured for every scheme."""
    documents: dict[str, Any] = {}
    for name in ("fp8", "w8a8"):
        words = [
            "--held-out",
            str(text),
            "--json",
            str(tmp_path / "r.json"),
            "--html",
            str(tmp_path / "r.html"),
        ]
        assert quantize(model, name, *words, out=name)[0] == 0
        documents[name] = json.loads((tmp_path / "r.json").read_text())
        page = (tmp_path / "r.html").read_text()
        assert "Error by layer" in page and "<script" not in page and "model.layers.1.mlp.up_proj" in page
    runs = {name: document["held_out"] for name, document in documents.items()}
    assert runs["fp8"]["original"] == runs["w8a8"]["original"] and runs["fp8"]["original"]["kl"] == 0
    assert runs["fp8"]["cache_only"] == runs["w8a8"]["cache_only"]
    assert runs["fp8"]["activations_only"] is None and runs["fp8"]["scheme"] is None
    assert runs["w8a8"]["scheme"]["kl"] > runs["w8a8"]["activations_only"]["kl"] > 0
    document = documents["w8a8"]
    assert document["bytes_after"] < document["bytes_before"]
    assert document["memory"]["stated_bytes"] > 0 and len(document["weight_errors"]) == 14
    assert len(document["layer_errors"]) == len(list(compose(load_config(model)).layers))
    times = document["step_times"]["steps"]
    assert {step["chip"] for step in times} == {"trn1", "trn2", "trn3"}
    assert all(step["original_ns"] > 0 and step["quantised_ns"] > 0 for step in times)


@pytest.mark.usefixtures("fast")
def test_losses_are_those_of_the_written_folder(model: Path, text: Path, tmp_path: Path) -> None:
    """The folder is loaded and its loss computed token by token."""
    from model.loading.tokenizer import Tokenizer
    from model.runners.reference import ReferenceModel

    words = ["--held-out", str(text), "--texts", "2", "--json", str(tmp_path / "r.json")]
    _, out = quantize(model, "int8", *words)
    measured = json.loads((tmp_path / "r.json").read_text())["held_out"]["weights_only"]
    config = load_config(out)
    weights = {
        name: weight.astype(np.float32) if isinstance(weight, QuantisedWeight) else weight
        for name, weight in open_checkpoint(out, config).items()
    }
    reference, tokenizer = ReferenceModel(config, weights), Tokenizer(out, config.vocab_size)
    losses = []
    for paragraph in TEXT.split("\n<|endoftext|>\n")[:2]:
        ids = [*tokenizer.encode(paragraph), 2]
        sequence = reference.start()
        for token, target in pairwise(ids):
            logits = reference.extend(sequence, [token]).logits.astype(np.float64)
            losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])
    assert measured["tokens"] == len(losses)
    assert measured["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.usefixtures("fast")
def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    words = ["quantize", "smollm2-135m", "--scheme", "fp8", "--plan", "--json", str(tmp_path / "p.json")]
    assert main(words) == 0
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["weights"] == 210 and document["bytes_before"] == 2 * 134_515_008
    assert document["bytes_after"] < 0.7 * document["bytes_before"] and "held_out" not in document
    assert document["memory"]["reached_bytes"] is None


@pytest.mark.usefixtures("fast")
def test_experts_that_no_text_reaches_are_named(tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Tom\n<|endoftext|>\nTom")
    document = tmp_path / "r.json"
    words = [
        "quantize",
        "stories-moe",
        "--scheme",
        "gptq",
        "--calibration",
        str(text),
        "--ignore",
        "re:.*attn",
    ]
    assert main([*words, "--out", str(tmp_path / "out"), "--json", str(document)]) == 0
    unreached = json.loads(document.read_text())["unreached_experts"]
    errors = json.loads(document.read_text())["weight_errors"]
    assert 0 < len(unreached) < len(errors) and all("experts" in module for module in unreached)
    assert all((errors[module]["product"] is None) == (module in unreached) for module in errors)
    assert "Calibration never reached" in capsys.readouterr().out


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["int9"], "invalid choice"),
        (["gptq"], "--scheme gptq reads the inputs of layers: give --calibration FILE"),
        (
            ["fp8", "--ignore", "model.layers.0.mlp.up_prj"],
            "matches no linear module of the model; did you mean",
        ),
        (["fp8", "--ignore", "re:nothing"], "re:nothing matches no linear module"),
        (["fp8", "--ignore", "re:("], "is no regular expression"),
        (["fp8", "--ignore", "re:.*"], "matches all linear modules"),
        (["fp8", "--act-order"], "--act-order belongs to --scheme gptq"),
        (["fp8", "--group-size", "32"], "schemes with groups are int4, gptq, awq"),
        (["int4", "--group-size", "64"], "has 32 columns, which are no whole groups of 64"),
        (["fp8", "--plan"], "--plan writes no folder"),
        (["gptq", "--calibration", "EMPTY"], "has no text"),
        (["gptq", "--calibration", "MISSING"], "is missing"),
        (["gptq", "--calibration", "EMPTY", "--damping", "2"], "is not above 0"),
    ],
)
def test_wrong_options_are_refused(model: Path, capsys: Capture, words: list[str], message: str) -> None:
    empty = model.parent / "empty.txt"
    empty.write_text("\n<|endoftext|>\n  \n")
    named = {"EMPTY": str(empty), "MISSING": str(model.parent / "missing.txt")}
    assert message in refuse(capsys, model, *(named.get(word, word) for word in words))


@pytest.mark.usefixtures("fast")
def test_folders_that_cannot_be_quantised_are_refused(model: Path, capsys: Capture) -> None:
    _, out = quantize(model, "fp8")
    capsys.readouterr()
    assert "out exists; give the name of a folder" in refuse(capsys, model, "fp8")
    assert main(["quantize", str(out), "--scheme", "int8", "--out", str(model.parent / "twice")]) == 2
    assert "is quantised already, by compressed-tensors" in capsys.readouterr().err
    inside = model / "inside"
    assert main(["quantize", str(model), "--scheme", "int8", "--out", str(inside)]) == 2
    assert "is inside the model's folder" in capsys.readouterr().err and not inside.exists()
    nowhere = model.parent / "no" / "where"
    assert main(["quantize", str(model), "--scheme", "int8", "--out", str(nowhere)]) == 2
    assert "is no folder that can be written" in capsys.readouterr().err


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(model: Path, capsys: Capture, number: float) -> None:
    tensors = read_tensors(model)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = number
    safetensors.numpy.save_file(tensors, model / FILE)
    line = refuse(capsys, model, "int8")
    assert "model.layers.1.mlp.down_proj.weight has weights that are not finite" in line


@pytest.mark.usefixtures("fast")
def test_a_full_disk_is_said(model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        usage = shutil._ntuple_diskusage(10**6, 10**6 - 10, 10)
        patched.setattr(folders.shutil, "disk_usage", lambda path: usage)
        assert "give a folder on a disk with more room" in refuse(capsys, model, "fp8")

    def write(self: Any, name: str, array: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.WeightFile, "write", write)
    assert "the disk is full; nothing was left there" in refuse(capsys, model, "fp8")


def test_an_interrupt_leaves_nothing(model: Path, text: Path) -> None:
    """The process waits in the middle of its work until the signal comes."""
    code = (
        "import sys, time, model.quantize.folder as f\n"
        "from nkw.commands import main\n"
        "def write(self, name, array):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "f.WeightFile.write = write\n"
        "sys.exit(main())"
    )
    words = ["quantize", str(model), "--scheme", "fp8", "--out", str(model.parent / "out")]
    running = started("-c", code, *words)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    before = [path.name for path in model.parent.iterdir()]
    running.send_signal(signal.SIGINT)
    _, err = running.communicate()
    assert running.returncode in (130, -signal.SIGINT) and "nkw: interrupted" in err
    assert any(re.fullmatch(r"\.out\.\d+\.part", name) for name in before)
    assert {path.name for path in model.parent.iterdir()} == {"model", "text.txt"}
    assert os.path.isdir(model)
